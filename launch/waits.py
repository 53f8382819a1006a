"""Who waits for whom, where and for how long, from the ranks' signs of life (engine/process/heartbeat.py): one line for
every wait that passes a threshold, and a report for the front (/debug/waits).

A rank says for whom it waits where its transport knows (shared memory, meetings, links). gloo does not: there the ranks
are waited for that are behind the place where the wait is, as steps and layers have the same numbers on all ranks. When
none is behind, what the others have sent has not come: a connection is broken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from engine.process.console import say
from engine.process.heartbeat import Sign, Track
from front.messages import Wait, WaitedFor, Waits

START_FACTOR = 10  # at the start of the server processes come to their first meeting one after another
REPORT_SECONDS = 0.5  # between two reports while ranks wait
_STATES = {"T": "stopped", "t": "stopped", "R": "at work", "D": "waiting for a disk", "S": "asleep", "Z": "ended"}

Key = tuple[int, tuple[int, ...]]  # epoch and the ranks that are waited for
_MEETING = "meeting"
FRONT: Key = (-1, ())


class _Open(Struct):
    """A wait of one or more ranks. told: its line has been said."""

    waits: list[Wait]
    told: bool = False


class WaitWatch:
    """threshold: seconds; 0: nothing is said. state_of: the state letter of a rank's process (proc_pid_stat(5)), ""
    where it is not known. say: takes the line."""

    def __init__(
        self,
        threshold: float,
        state_of: Callable[[int], str] = lambda rank: "",
        clock: Callable[[], float] = time.monotonic,
        say: Callable[..., None] = say,
    ) -> None:
        self.state_of = state_of
        self._threshold = threshold
        self._clock = clock
        self._say = say
        self._open: dict[Key, _Open] = {}
        self._reported = 0.0
        self._was_reported = False

    def look(self, signs: Mapping[int, Sign], front: float | None = None, front_state: str = "") -> None:
        """To be called a few times per second. front: when its loop last made a mark; None: it is not looked at."""
        if not self._threshold:
            return
        now = self._clock()
        found: dict[Key, list[Wait]] = {}
        places = {rank: _place(sign) for rank, sign in sorted(signs.items()) if _track(sign).since}
        for rank in places:
            wait = _wait(rank, signs, now, self.state_of)
            # The one that waits for ranks which all wait earlier themselves has nothing new to say.
            if not all(places.get(other.rank, places[rank]) < places[rank] for other in wait.waits_for):
                found.setdefault((wait.epoch, tuple(other.rank for other in wait.waits_for)), []).append(wait)
        if front is not None and now - front >= self._threshold:
            found[FRONT] = [_front_wait(now - front, front_state)]
        for key in [key for key in self._open if key not in found]:
            self._end(self._open.pop(key))
        for key, waits in found.items():
            self._open.setdefault(key, _Open(waits)).waits = waits
            starts = key[0] == 0 and all(wait.kind == _MEETING for wait in waits)
            if max(wait.seconds for wait in waits) >= self._threshold * (START_FACTOR if starts else 1):
                self._tell(self._open[key])

    def tell(self, rank: int) -> None:
        """This rank is about to be taken for lost: say who waits for it, however long that has been."""
        for key, one in self._open.items():
            if rank in key[1]:
                self._tell(one)

    def report(self) -> Waits | None:
        """For the front, now and then while there are waits to be told of, and once when there are none any more."""
        told = [wait for one in self._open.values() if one.told for wait in one.waits]
        now = self._clock()
        if (not told and not self._was_reported) or (told and now - self._reported < REPORT_SECONDS):
            return None
        self._reported, self._was_reported = now, bool(told)
        return Waits(told)

    def _tell(self, one: _Open) -> None:
        if not one.told:
            one.told = True
            self._say("wait", ranks=_names(wait.rank for wait in one.waits), text=repr(_line(one.waits)))

    def _end(self, one: _Open) -> None:
        if one.told:
            longest = max(one.waits, key=lambda wait: wait.seconds)
            names = _names(wait.rank for wait in one.waits)
            self._say("wait_over", ranks=names, at_least_seconds=f"{longest.seconds:.1f}", where=repr(longest.where))


def _names(ranks: Iterable[int]) -> str:
    return ",".join("front" if rank < 0 else str(rank) for rank in ranks)


def _track(sign: Sign) -> Track:
    """Of the thread that waits; of both: of the one that computes."""
    return sign.computing if sign.computing.since else sign.agreeing


def _place(sign: Sign) -> tuple[int, bool, tuple[int, ...]]:
    """Of a rank that waits: of two the one that is further has the higher one."""
    track = _track(sign)
    return track.step, track is sign.computing, track.order


def _wait(rank: int, signs: Mapping[int, Sign], now: float, state_of: Callable[[int], str]) -> Wait:
    """What it waits for."""
    sign = signs[rank]
    track = _track(sign)
    computes = track is sign.computing
    others = [other for other in sign.live if other != rank]
    behind = [other for other in others if _is_behind(signs.get(other), sign.epoch, track, computes)]
    missing = track.ranks or behind or others
    waits_for = [_waited_for(other, signs.get(other), track, sign.epoch, computes, now, state_of) for other in missing]
    seconds = now - track.since
    return Wait(rank, sign.epoch, track.step, track.layer, track.kind.name.lower(), seconds, track.text, waits_for)


def _front_wait(seconds: float, state: str) -> Wait:
    where = f"the front's loop stands still{_doing(state)}"
    return Wait(-1, -1, -1, 0, "front", seconds, where, [])


def _is_behind(sign: Sign | None, epoch: int, track: Track, computes: bool) -> bool:
    """Whether that rank has not come to where another one waits."""
    if sign is None or sign.epoch != epoch:
        return True
    return (sign.computing if computes else sign.agreeing).order < track.order


def _waited_for(
    rank: int,
    sign: Sign | None,
    track: Track,
    epoch: int,
    computes: bool,
    now: float,
    state_of: Callable[[int], str],
) -> WaitedFor:
    state = _STATES.get(state_of(rank), "")
    if sign is None:
        return WaitedFor(rank, None, "no sign of it", state)
    if sign.epoch != epoch:
        return WaitedFor(rank, now - sign.when, f"epoch {sign.epoch}", state)
    theirs = sign.computing if computes or sign.computing.step >= sign.agreeing.step else sign.agreeing
    where = theirs.text
    if not _is_behind(sign, epoch, track, computes):
        where += ", without having been there" if track.ranks else ", and what it sends does not come"
    if theirs is not sign.agreeing and sign.agreeing.since:
        where += f" (and waits itself in {sign.agreeing.text})"
    return WaitedFor(rank, now - sign.when, where, state)


def _doing(state: str) -> str:
    return f", its process is {_STATES[state]}" if state in _STATES else ""


def _line(waits: list[Wait]) -> str:
    """In the words of an operator; the ranks wait for the same ones."""
    first = max(waits, key=lambda wait: wait.seconds)
    if first.rank < 0:
        return f"{first.where} for {first.seconds:.1f} s"
    also = [wait.rank for wait in waits if wait is not first]
    others = f" (as rank {', '.join(map(str, also))})" if also else ""
    names = ", ".join(str(other.rank) for other in first.waits_for)
    seen = "; ".join(_seen(other, len(first.waits_for) > 1) for other in first.waits_for)
    where = f"epoch {first.epoch}, {first.where}" if first.kind == _MEETING else first.where
    return f"rank {first.rank}{others}, {where}, waits {first.seconds:.1f} s for rank {names}: {seen}"


def _seen(other: WaitedFor, named: bool) -> str:
    name = f"rank {other.rank} " if named else ""
    doing = f", its process is {other.state}" if other.state else ""
    if other.last_seen is None:
        return f"{name}{other.where}{doing}"
    return f"{name}last seen {other.last_seen:.1f} s ago in {other.where}{doing}"
