"""Keeps the ranks of a server alive: sees one end or hang, fences it, says so, and starts it again. Starts more of them, and
sees off those that are not wanted any more.

Heartbeats: a rank that has loaded writes time.monotonic() as one float64 into RUNTIME_DIR/beat-RANK every 0.25 s. One that
has not written yet is loading, and writes into loading-RANK; when it is started into a running server it may take ten
times as long for that as the ranks took at first.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from configs.engine import Plan
from configs.env import child_environment
from engine.heartbeat import last_beat
from engine.messages import RankLost
from launch.processes import Child, Children, RuntimeDir

HANG_SECONDS = 2.0  # a heartbeat that is older means a hung rank
LOAD_HANG_SECONDS = 10.0  # the same while it loads, when a long operation may hold up its heartbeat
STALL_SECONDS = 1.0  # when this process itself was not run for so long, the ranks get their time anew
LOAD_FACTOR = 10  # a restarted rank may load for so many times what the first start took ...
LOAD_SECONDS = 30.0  # ... or for this long, if that is more
MAX_RESTARTS = 3  # of one rank ...
RESTART_WINDOW = 60.0  # ... within so many seconds; then it stays down until the window has room again
RESTART_PAUSE = 0.5  # seconds after a loss: the survivors recover before one that starts takes their cores
LEAVE_SECONDS = 10.0  # a rank that is not wanted any more is killed when it has not left by then


@dataclass(slots=True)
class _Place:
    """One rank, whatever process it is just now. child None: it is down."""

    rank: int
    child: Child | None = None
    joins: bool = False
    wanted: bool = True
    added: bool = False  # to a running server, and not started yet
    leaves: float | None = None  # since when this process is to leave
    started: float = 0.0
    load_seconds: float = 0.0  # from the first start to the first heartbeat
    verdict: str = ""  # why it was killed
    last_life: float = 0.0  # then: when it last gave a sign
    restarts: deque[float] = field(default_factory=deque)
    said_down: bool = False


class RankKeeper:
    """`start` starts one process per rank. `restarts`: whether an ended one is started again; off until all have been ready."""

    def __init__(
        self,
        children: Children,
        plan: Plan,
        runtime: RuntimeDir,
        startup_timeout: float,
        module: str = "engine.rank_process",
        clock: Callable[[], float] = time.monotonic,
        ranks: range | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """startup_timeout: the most seconds that a restarted rank may take to load; the first start is the caller's to bound.

        module: what a rank's process runs; options: more words of its command line. ranks: those of this machine; None: all,
        and only then may their number change."""
        self.restarts = False
        self.left = False  # a rank has ended by itself with exit code 0, as the front told it to
        self._children = children
        self._runtime = runtime
        self._directory = runtime.path
        self._plan = plan
        self._plan_path = runtime.write("plan.json", plan)
        self._environment = child_environment(plan.threads_per_rank, plan.spin_threads)
        self._startup_timeout = startup_timeout
        self._module = module
        self._options = options
        self._clock = clock
        self._looked = self._awake_since = clock()
        self._last_loss = self._looked - RESTART_PAUSE
        self._places = [_Place(rank) for rank in ranks or range(plan.data_parallel_size)]

    def start(self, join: bool = False) -> None:
        """join: the ranks of other machines are at work."""
        for place in self._places:
            place.joins = join
            self._start(place)

    @property
    def processes(self) -> dict[int, int]:
        """The process of each rank that has one."""
        return {place.rank: place.child.process.pid for place in self._places if place.child is not None}

    def resize(self, count: int) -> None:
        """Ranks 0 to count - 1 are wanted. The next `look`s start those that are missing, once `restarts` is set; the
        front tells those beyond to leave."""
        now = self._clock()
        while len(self._places) < count:
            self._places.append(_Place(len(self._places), joins=True, wanted=False))
            # A rank builds its part of the placement by the number of all ranks there ever were (eplb/repair.py).
            self._plan = replace(self._plan, data_parallel_size=len(self._places))
            self._plan_path = self._runtime.write(f"plan-{len(self._places)}.json", self._plan)
        for place in self._places:
            place.added = place.rank < count and (place.added or not place.wanted)
            place.wanted = place.rank < count
            if place.wanted or place.leaves is not None or place.child is None:
                continue
            place.leaves = now
            if self._beat(place.rank) is None:  # it is loading and cannot hear that it is to leave
                place.child.process.kill()

    def look(self, dead: list[Child]) -> list[RankLost]:
        """Call it a few times per second, with the children that have ended since. What has ended, for the front to know:
        the ranks that are lost, and those that have left because they are not wanted any more."""
        now = self._clock()
        if now - self._looked > STALL_SECONDS:
            self._awake_since = now
        self._looked = now
        lost = []
        for place in self._places:
            if place.child is not None and place.child in dead:
                message = self._on_end(place, place.child, now)
                if message is not None:
                    lost.append(message)
            elif place.child is not None and not place.verdict:
                self._check(place, place.child, now)
            elif place.child is None and place.wanted and self.restarts:
                if place.added:
                    self._add(place)
                else:
                    self._restart(place, now)
        return lost

    def kill_loading(self) -> None:
        """At the end of the server: those that are still loading again cannot hear that they are to leave."""
        for place in self._places:
            if place.child is not None and place.joins and self._beat(place.rank) is None:
                place.child.process.kill()

    def _start(self, place: _Place) -> None:
        for name in ("beat", "loading"):
            self._beat_path(place.rank, name).unlink(missing_ok=True)
        arguments = ["--plan", str(self._plan_path), "--rank", str(place.rank), "--runtime-dir", str(self._directory)]
        arguments += self._options
        if place.joins:
            arguments.append("--join")
        place.child = self._children.start(f"rank {place.rank}", place.rank, self._module, arguments, self._environment)
        place.started = self._clock()
        place.verdict = ""
        place.leaves = None

    def _on_end(self, place: _Place, child: Child, now: float) -> RankLost | None:
        self._children.forget(child)
        place.child = None
        if place.leaves is not None:
            place.leaves = None
            say("rank_left", rank=place.rank, pid=child.process.pid, end=repr(place.verdict or child.exit_text()))
            return RankLost(place.rank, "it was not wanted any more", now, child.process.pid)
        if child.process.returncode == 0:
            self.left = True
            return None
        self._last_loss = now
        reason = place.verdict or child.exit_text()
        last_life = place.last_life if place.verdict else now
        say("rank_lost", rank=place.rank, pid=child.process.pid, reason=repr(reason))
        return RankLost(place.rank, reason, last_life, child.process.pid)

    def _check(self, place: _Place, child: Child, now: float) -> None:
        """Kill it when it hangs; its end is then seen as every other end is."""
        beat = self._beat(place.rank)
        if beat is not None and not place.joins and not place.load_seconds:
            place.load_seconds = now - place.started
        if beat is None:
            self._check_loading(place, now)
        elif now - max(beat, self._awake_since) > HANG_SECONDS:
            place.verdict, place.last_life = f"hung: no heartbeat for {now - beat:.1f} s, killed", beat
        elif place.leaves is not None and now - max(place.leaves, self._awake_since) > LEAVE_SECONDS:
            place.verdict, place.last_life = f"has not left within {LEAVE_SECONDS:g} s, killed", beat
        if place.verdict:
            child.process.kill()

    def _check_loading(self, place: _Place, now: float) -> None:
        beat = self._beat(place.rank, "loading")
        longest = max(other.load_seconds for other in self._places)
        usual = max(LOAD_SECONDS, LOAD_FACTOR * longest) if longest else self._startup_timeout
        limit = min(self._startup_timeout, usual)
        if beat is not None and now - max(beat, self._awake_since) > LOAD_HANG_SECONDS:
            place.verdict, place.last_life = f"hung while loading: no heartbeat for {now - beat:.1f} s, killed", beat
        elif place.joins and now - place.started > limit:
            place.verdict, place.last_life = f"not loaded within {limit:.3g} s, killed", place.started

    def _add(self, place: _Place) -> None:
        place.added, place.joins, place.said_down = False, True, False
        place.restarts.clear()
        self._start(place)
        assert place.child is not None
        say("rank_added", rank=place.rank, pid=place.child.process.pid)

    def _restart(self, place: _Place, now: float) -> None:
        while place.restarts and now - place.restarts[0] > RESTART_WINDOW:
            place.restarts.popleft()
        if len(place.restarts) >= MAX_RESTARTS:
            if not place.said_down:
                wait = RESTART_WINDOW - (now - place.restarts[0])
                say("rank_stays_down", rank=place.rank, restarts=MAX_RESTARTS, next_try_seconds=round(wait))
            place.said_down = True
            return
        place.said_down = False
        if now - self._last_loss < RESTART_PAUSE:
            return
        place.restarts.append(now)
        place.joins = True
        self._start(place)
        assert place.child is not None
        say("rank_restarted", rank=place.rank, pid=place.child.process.pid, restart=len(place.restarts))

    def _beat_path(self, rank: int, name: str = "beat") -> Path:
        return self._directory / f"{name}-{rank}"

    def _beat(self, rank: int, name: str = "beat") -> float | None:
        """When the rank last wrote. None: it has not (or is just writing)."""
        return last_beat(self._beat_path(rank, name))


def say(event: str, **fields: object) -> None:
    """One line, for people and programs."""
    print(
        f"moesaic: event={event}", *(f"{name}={value}" for name, value in fields.items()), file=sys.stderr, flush=True
    )
