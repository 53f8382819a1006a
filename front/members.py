"""Which ranks serve, what is lost, and what every recovery took. Pure bookkeeping of the front: no sockets, no loop.

One life of a rank, which is a process, says RankReady at most once, perhaps RankFailed, and the supervisor then says
RankLost for it. The two speak through different sockets, so messages of two incarnations may come in another order than
they were sent.

    LOADING --RankReady--> UP --RankLost--> LOST --RankReady--> JOINING --Joined--> UP
    STARTING --RankReady--> JOINING;  any --resize--> LEFT --resize--> STARTING
    LOST --RankReady, of the first after the loss of all--> UP

Ranks 0 to count - 1 are wanted; those beyond have left, and keep their numbers until they are wanted again.

When all are lost at once nothing ends: the epochs go on to rise, and those that come back begin with the linear
placement. The first of them waits a moment for the others (`gather`): alone it would begin a step with the requests of
all. Only the supervisor knows when no rank can be started any more (NoneLeft).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Literal

from msgspec import Struct

from configs.engine import MAX_RANKS
from front.messages import Joined, Membership, NoneLeft, RankFailed, RankLost, RankReady, Waiting

_MAX_RECOVERIES = 1024
GATHER_SECONDS = 0.05  # how long the first rank after the loss of all waits for the others: processes that waited


class State(Enum):
    LOADING = "loading"  # for the first time
    UP = "up"
    LOST = "lost"
    JOINING = "joining"  # it has loaded while the others were at work and is in the membership, but has not said Joined
    STARTING = "starting"  # added to a running server; it has not loaded
    LEFT = "left"  # not wanted any more


_MEMBERS = (State.LOADING, State.UP, State.JOINING)


class Recovery(Struct):
    """One lost rank, and the seconds until tokens came again.

    detect: from the last sign of life to the front's knowing. repair: the slowest survivor's own count.
    agree: the rest of the time from the front's knowing to the last survivor's Joined.
    first_token: from the last survivor's Joined to the first token from any rank; None when no request waited for one.
    """

    rank: int
    reason: str
    epoch: int
    detect: float
    notified: float  # the front's clock
    agree: float = 0.0
    repair: float = 0.0
    first_token: float | None = None
    total: float = 0.0  # detect, and from `notified` to the first token (or to the last Joined)
    replayed: int = 0  # requests moved to another rank
    missing: set[int] = set()  # members that have not said Joined
    joined: float | None = None  # when the last one did
    token_came: bool = False  # from a rank that had said Joined, while others had not


class Members:
    """states, one per rank that there ever was. `started` once all have loaded: from then on a lost rank is
    survived."""

    def __init__(
        self,
        num_ranks: int,
        num_experts: int = 0,
        slots_per_rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_experts 0: no rank needs another one."""
        self.states = [State.LOADING] * num_ranks
        self.count = num_ranks  # of the ranks that are wanted
        self.ready: dict[int, RankReady] = {}  # of the members
        self.started = False
        self.failed: str | None = None
        self.troubles: dict[int, str] = {}  # why a rank does not go on, or does not come back, as it said itself
        self.epoch = 0
        self.epochs = [0] * num_ranks  # the last one that a rank has joined
        self.losses = [0] * num_ranks
        self.added: set[int] = set()  # ranks that were added and have not served yet
        self.num_experts_loaded = 0
        self.num_bytes_read = 0
        self.open: list[Recovery] = []  # under way
        self.done: deque[Recovery] = deque(maxlen=_MAX_RECOVERIES)  # ended; their reader takes them out
        self.last_recovery: dict[int, float] = {}  # rank -> seconds in all
        self._num_experts = num_experts
        self._slots_per_rank = slots_per_rank
        self._clock = clock
        self._joined_epoch = [0] * num_ranks  # the epoch with which a rank came back
        self._back: dict[int, RankReady] = {}  # after the loss of all, until they are members
        self._gathers_until = 0.0
        self._early: dict[int, RankReady] = {}  # of a next life, before the end of the last one is known
        self._ended: list[set[int]] = [set() for _ in range(num_ranks)]  # processes of each rank that have ended

    @property
    def num_losses(self) -> int:
        return sum(self.losses)

    @property
    def up(self) -> list[int]:
        return [rank for rank, state in enumerate(self.states) if state is State.UP]

    @property
    def missing(self) -> list[int]:
        """Wanted, but not serving."""
        return [rank for rank in range(self.count) if self.states[rank] is not State.UP]

    @property
    def mode(self) -> Literal["full", "growing", "degraded"]:
        """growing: only ranks that were added are missing."""
        missing = self.missing
        if not missing:
            return "full"
        return "growing" if self.added.issuperset(missing) else "degraded"

    @property
    def alive(self) -> list[bool]:
        """Who takes part in the membership."""
        return [state in _MEMBERS for state in self.states]

    def is_member(self, rank: int) -> bool:
        return self.states[rank] in _MEMBERS

    @property
    def shortage(self) -> str | None:
        """Why nothing can be computed now: the ranks that are left cannot hold all experts, or one of them cannot read
        those that it needs. None: they can."""
        num_up = len(self.up)
        num_slots = num_up * self._slots_per_rank
        if not num_up or num_slots < self._num_experts:
            room = f", with room for {num_slots} of {self._num_experts} experts in each layer" if num_up else ""
            return f"{num_up} of {self.count} ranks serve{room}; waiting for rank {self._missing_text()}"
        stuck = next((rank for rank in self.troubles if self.is_member(rank)), None)
        return None if stuck is None else f"rank {stuck} waits: {self.troubles[stuck]}"

    def _missing_text(self) -> str:
        reasons = [f" (rank {rank}: {self.troubles[rank]})" for rank in self.missing if rank in self.troubles]
        return ", ".join(map(str, self.missing)) + "".join(reasons[:1])

    def memberships(self) -> list[tuple[int, Membership]]:
        """What to tell whom after a change."""
        alive = self.alive
        told = [rank for rank, lives in enumerate(alive) if lives]
        return [(rank, Membership(self.epoch, alive, self.ready[rank].process)) for rank in told]

    # ---- growing and shrinking on purpose ----

    @property
    def fewest(self) -> int:
        """The smallest count whose slots hold every expert."""
        return max(1, -(-self._num_experts // self._slots_per_rank) if self._slots_per_rank else 1)

    def impossible(self, count: int) -> str | None:
        """Why there can never be so many ranks, or so few. None: they would do."""
        if count > MAX_RANKS:
            return f"count must be at most {MAX_RANKS}, not {count}"
        if count >= self.fewest:
            return None
        if count < 1:
            return f"count must be at least 1, not {count}"
        room = count * self._slots_per_rank
        return (
            f"count must be at least {self.fewest}: {count} rank(s) of {self._slots_per_rank} slots have room for "
            f"{room} of {self._num_experts} experts"
        )

    def impossible_now(self, count: int) -> str | None:
        """Why `count` ranks would not do at the moment: of those that would stay some do not serve."""
        staying = [rank for rank in self.up if rank < count]
        if count >= self.count or len(staying) >= self.fewest:
            return None
        waiting = ", ".join(str(rank) for rank in self.missing if rank < count)
        return (
            f"{len(staying)} of the {count} ranks that would stay serve now, and it takes {self.fewest}; "
            f"wait for rank {waiting}"
        )

    def resize(self, count: int) -> list[int]:
        """Ranks 0 to count - 1 are wanted from now on. The members that leave: if there are any, the membership has
        changed.

        The caller has asked `impossible` and `impossible_now`. New ranks become members when they say that they are
        ready.
        """
        leaving = [rank for rank in range(count, len(self.states)) if self.is_member(rank)]
        for rank in range(count, len(self.states)):
            self.states[rank] = State.LEFT
            self.ready.pop(rank, None)
            self._early.pop(rank, None)
            self._back.pop(rank, None)
            self.added.discard(rank)
            self.last_recovery.pop(rank, None)
            self.troubles.pop(rank, None)
        for rank in range(self.count, count):
            self._add(rank)
        self.count = count
        if leaving:
            self.epoch += 1
            now = self._clock()
            for recovery in list(self.open):
                for rank in leaving:
                    self._said(recovery, rank, now, busy=True)
        return leaving

    def _add(self, rank: int) -> None:
        if rank == len(self.states):
            self.states.append(State.LEFT)
            self._joined_epoch.append(0)
            self._ended.append(set())
            self.epochs.append(0)
            self.losses.append(0)
        self.states[rank] = State.STARTING
        self.added.add(rank)

    def meet_again(self) -> None:
        """The members stay who they are, in a new epoch."""
        self.epoch += 1

    # ---- what ranks and the supervisor say ----

    def on_ready(self, message: RankReady) -> bool:
        """True: the membership has changed."""
        rank = message.rank
        if message.process in self._ended[rank]:
            return False
        if self.states[rank] in (State.UP, State.JOINING):
            self._early[rank] = message
            return False
        if self.states[rank] is State.LOADING:
            self.ready[rank] = message
            self.states[rank] = State.UP
            self.started = all(state is State.UP for state in self.states)
            return False
        if any(self.alive):
            self._join(message)
            return True
        if not self._back:
            self._gathers_until = self._clock() + GATHER_SECONDS
        self._back[rank] = message
        return self.gather()

    @property
    def gathering(self) -> bool:
        """A rank waits for `gather`."""
        return bool(self._back)

    def gather(self) -> bool:
        """To be called a few times per second. True: ranks that are back after the loss of all have become members,
        as none is missing or the first has waited long enough."""
        if not self._back or (len(self._back) < self.count and self._clock() < self._gathers_until):
            return False
        back, self._back = self._back, {}
        for message in back.values():
            self._join(message)
            self._serves(message.rank)  # its first step is the first of all, and has what waits
        return True

    def _join(self, message: RankReady) -> None:
        rank = message.rank
        self.ready[rank] = message
        self.troubles.pop(rank, None)
        self.epoch += 1
        self._joined_epoch[rank] = self.epoch
        self.states[rank] = State.JOINING
        if not self._num_experts:  # there is nothing to agree on with the others
            self._serves(rank)

    def on_failed(self, message: RankFailed) -> bool:
        """True: a member is lost."""
        rank = message.rank
        error = message.error.removeprefix(f"rank {rank}: ")
        changed = self._lose(rank, f"rank {rank} failed: {error}", self._clock())
        if self.states[rank] is not State.LEFT:
            self.troubles[rank] = error
        return changed

    def on_waiting(self, message: Waiting) -> None:
        if self.states[message.rank] is State.LEFT or not message.reason:
            self.troubles.pop(message.rank, None)
        else:
            self.troubles[message.rank] = message.reason

    def on_none_left(self, message: NoneLeft) -> None:
        self.failed = f"all ranks are lost: {message.reason}"

    def on_lost(self, message: RankLost) -> bool:
        """True: a member is lost."""
        rank = message.rank
        self._ended[rank].add(message.process)
        if rank in self._back and self._back[rank].process == message.process:
            del self._back[rank]
        if self.started and (rank not in self.ready or self.ready[rank].process != message.process):
            return False  # it was not a member: it was still loading, has left, or has said itself that it fails
        changed = self._lose(rank, f"rank {rank} is lost: {message.reason}", message.time)
        early = self._early.pop(rank, None)
        return (early is not None and self.on_ready(early)) or changed

    def _lose(self, rank: int, reason: str, last_life: float) -> bool:
        if not self.started:
            self.failed = reason
            return False
        if not self.is_member(rank):
            return False
        self.states[rank] = State.LOST
        self.ready.pop(rank, None)
        self.added.discard(rank)
        self.troubles.pop(rank, None)
        self.epoch += 1
        self.losses[rank] += 1
        members = {member for member, alive in enumerate(self.alive) if alive}
        now = self._clock()
        for recovery in list(self.open):
            self._said(recovery, rank, now, busy=True)
        detect = max(0.0, now - last_life)
        missing = members if self._num_experts else set()
        self.open.append(Recovery(rank, reason, self.epoch, detect, now, missing=missing))
        if not missing:
            self.open[-1].joined = now
        return True

    def on_joined(self, message: Joined, busy: bool) -> bool:
        """True: this rank takes work again. busy: requests wait, so that there will be a first token."""
        self.num_experts_loaded += message.experts_loaded
        self.num_bytes_read += message.bytes_read
        now = self._clock()
        for recovery in list(self.open):
            if message.epoch >= recovery.epoch and message.rank in recovery.missing:
                recovery.agree = max(recovery.agree, message.agree_seconds)
                recovery.repair = max(recovery.repair, message.repair_seconds)
                self._said(recovery, message.rank, now, busy)
        rank = message.rank
        self.troubles.pop(rank, None)
        if self.is_member(rank):
            self.epochs[rank] = max(self.epochs[rank], message.epoch)
        if self.states[rank] is not State.JOINING or message.epoch < self._joined_epoch[rank]:
            return False
        self._serves(rank)
        return True

    def _serves(self, rank: int) -> None:
        self.states[rank] = State.UP
        self.added.discard(rank)

    def _said(self, recovery: Recovery, rank: int, now: float, busy: bool) -> None:
        if rank not in recovery.missing:
            return
        recovery.missing.discard(rank)
        if recovery.missing:
            return
        recovery.joined = now
        # A survivor may have been busy with its step for a while before it missed its peer.
        recovery.agree = max(recovery.agree, now - recovery.notified - recovery.repair)
        if recovery.token_came:
            recovery.first_token = 0.0
        if recovery.token_came or not busy:
            self._end(recovery, now)

    def on_token(self, rank: int, now: float) -> None:
        """This rank has sent tokens. To be called while `open` is not empty."""
        for recovery in list(self.open):
            if recovery.joined is not None:
                recovery.first_token = now - recovery.joined
                self._end(recovery, now)
            elif rank not in recovery.missing:
                recovery.token_came = True

    def on_idle(self) -> None:
        """No request waits for tokens any more."""
        for recovery in list(self.open):
            if recovery.joined is not None:
                self._end(recovery, recovery.joined)

    def _end(self, recovery: Recovery, now: float) -> None:
        recovery.total = recovery.detect + now - recovery.notified
        self.open.remove(recovery)
        self.done.append(recovery)
        self.last_recovery[recovery.rank] = recovery.total
