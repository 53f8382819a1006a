"""What a rank does between having loaded and saying that it is ready, where steps are captured as graphs: all ranks meet and
capture together, so that the first request does not wait for it.

Ranks load for different times, and a capture exchanges rows. So those of one machine first wait for each other here: each
leaves a file when it has loaded. What bounds that wait is the life of those that are still loading (engine/heartbeat.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from engine.heartbeat import last_beat
from engine.rank import Rank

LOOK_SECONDS = 0.02
SILENT_SECONDS = (
    15.0  # a rank that gives no sign of life for so long is not waited for; the keeper has ended it by then
)


def settle(
    rank: Rank,
    runtime_dir: Path,
    own: int,
    size: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """own, size: this rank and the number of all, in the first epoch. A peer that is lost is dealt with as at any other time: the
    rank is then without an epoch, and waits to be told of one."""
    (runtime_dir / f"loaded-{own}").touch()
    last_sign = clock()
    missing = set(range(size)) - {own}
    while missing and clock() - last_sign < SILENT_SECONDS:
        missing = {other for other in missing if not (runtime_dir / f"loaded-{other}").exists()}
        beats = [last_beat(runtime_dir / f"loading-{other}") for other in missing]
        last_sign = max([last_sign, *(beat for beat in beats if beat is not None)])
        if missing:
            sleep(LOOK_SECONDS)
    while rank.forming:
        rank.step()
        sleep(LOOK_SECONDS if rank.forming else 0.0)
