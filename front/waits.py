"""Which ranks wait for which, as the supervisor has told last (launch/waits.py): the front's part, for /debug/waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from front.messages import Wait, Waits

_MAX_PAST = 64


class PastWait(msgspec.Struct, frozen=True):
    """A wait that is over. ended: Unix time, seconds; wait: as it was told of last."""

    ended: float
    wait: Wait


class WaitBook:
    """now: the waits that have passed the threshold. past: the newest that are over. total: of both, since the
    start."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.now: list[Wait] = []
        self.past: deque[PastWait] = deque(maxlen=_MAX_PAST)
        self.total = 0
        self._clock = clock

    def take(self, message: Waits) -> None:
        before = {_key(wait): wait for wait in self.now}
        after = {_key(wait) for wait in message.waits}
        self.total += len(after - before.keys())
        self.past += [PastWait(self._clock(), wait) for key, wait in before.items() if key not in after]
        self.now = message.waits


def _key(wait: Wait) -> tuple[object, ...]:
    return wait.rank, wait.epoch, wait.step, wait.layer, wait.kind
