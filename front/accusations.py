"""What comes of ranks that have lost each other though no process has ended: the front's part. No sockets, no loop.

A rank that misses others in an exchange, because they do not answer in time or a connection has broken, drops the
epoch, says `EpochLost`, and waits to be told who takes part. A rank that hangs is found by the supervisor of its
machine, which knows whether a rank's loop gets on (launch/monitor.py). All others are well, so they meet again, with
those that have said nothing: these may only have been long at work. Who does not come a second time is accused, and
killed like one that hangs. A rank that accuses has said so, and is never accused itself.

`WaitBook` is what the supervisor tells of ranks that wait for others (launch/waits.py), for /debug/waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from front.members import Members
from front.messages import EpochLost, Wait, Waits

SILENT_SECONDS = 3.0  # after the first that has lost an epoch: for the others to say so too, and for the news of an end
_MAX_PAST = 64  # waits that are over
AGAIN_SECONDS = 1.0  # between two times that the ranks meet for such a reason


class Finding(NamedTuple):
    meet_again: bool  # the members are to meet in a new epoch
    accused: list[int]  # are to be killed


NOTHING = Finding(False, [])


class Accusations:
    def __init__(self, members: Members, clock: Callable[[], float] = time.monotonic) -> None:
        self._members = members
        self._clock = clock
        self._epoch = -1
        self._lost: set[int] = set()  # ranks that have lost that epoch
        self._since = 0.0  # when the first said so
        self._silent: set[int] = set()  # in the epoch before, which the members left for this reason
        self._met_again = float("-inf")

    def on_lost(self, message: EpochLost) -> None:
        if message.epoch > self._epoch:
            self._epoch, self._lost, self._since = message.epoch, set(), self._clock()
        if message.epoch == self._epoch:
            self._lost.add(message.rank)

    def look(self) -> Finding:
        """To be asked now and then. The caller acts on it."""
        members, now = self._members, self._clock()
        if self._epoch != members.epoch or not members.started or now - self._met_again < AGAIN_SECONDS:
            return NOTHING
        taking_part = {rank for rank, alive in enumerate(members.alive) if alive}
        if not self._lost & taking_part:  # another process has the place of the rank that said so
            return NOTHING
        silent = taking_part - self._lost
        if silent and now - self._since < SILENT_SECONDS:
            return NOTHING
        accused = silent & self._silent
        if accused:
            return Finding(False, sorted(accused))
        self._silent = silent
        self._met_again = now
        return Finding(True, [])


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
