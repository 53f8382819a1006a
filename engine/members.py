"""Which ranks serve, what is lost, and what every recovery took. Pure bookkeeping of the front: no sockets, no loop.

One life of a rank, which is a process, says RankReady at most once, perhaps RankFailed, and the supervisor then says RankLost
for it. The two speak through different sockets, so what they say of two lives may come in another order than it was said.

    LOADING --RankReady--> UP --RankLost--> LOST --RankReady--> JOINING --Joined--> UP
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from engine.messages import Joined, Membership, RankFailed, RankLost, RankReady

_MAX_RECOVERIES = 1024


class State(Enum):
    LOADING = "loading"  # for the first time
    UP = "up"
    LOST = "lost"
    JOINING = "joining"  # it has loaded again and is in the membership, but has not said Joined


@dataclass(slots=True)
class Recovery:
    """One lost rank, and the seconds until tokens came again.

    detect: from the last sign of life to the front's knowing. agree, repair: the slowest survivor's own count.
    first_token: from the last survivor's Joined to the first token from any rank; None when nobody waited for one.
    """

    rank: int
    reason: str
    epoch: int
    detect: float
    told: float  # the front's clock
    agree: float = 0.0
    repair: float = 0.0
    first_token: float | None = None
    total: float = 0.0  # detect, and from `told` to the first token (or to the last Joined)
    replayed: int = 0  # requests moved to another rank
    missing: set[int] = field(default_factory=set)  # members that have not said Joined
    joined: float | None = None  # when the last one did


class Members:
    """states, one per rank. `started` once all have loaded: from then on a lost rank is survived."""

    def __init__(
        self,
        num_ranks: int,
        num_experts: int = 0,
        slots_per_rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_experts 0: no rank needs another one."""
        self.states = [State.LOADING] * num_ranks
        self.ready: dict[int, RankReady] = {}  # of the members
        self.started = False
        self.failed: str | None = None
        self.epoch = 0
        self.num_losses = 0
        self.num_experts_loaded = 0
        self.num_bytes_read = 0
        self.open: list[Recovery] = []  # under way
        self.done: deque[Recovery] = deque(maxlen=_MAX_RECOVERIES)  # ended; whoever takes note of them takes them out
        self._num_experts = num_experts
        self._slots_per_rank = slots_per_rank
        self._clock = clock
        self._joined_epoch = [0] * num_ranks  # the epoch with which a rank came back
        self._early: dict[int, RankReady] = {}  # of a next life, before the end of the last one was told
        self._ended: list[set[int]] = [set() for _ in range(num_ranks)]  # processes of each rank that have ended

    @property
    def up(self) -> list[int]:
        return [rank for rank, state in enumerate(self.states) if state is State.UP]

    @property
    def alive(self) -> list[bool]:
        """Who takes part in the membership."""
        return [state is not State.LOST for state in self.states]

    @property
    def shortage(self) -> str | None:
        """Why nothing can be computed now: the ranks that are left cannot hold all experts. None: they can."""
        num_slots = len(self.up) * self._slots_per_rank
        if num_slots >= self._num_experts:
            return None
        waiting = ", ".join(str(rank) for rank, state in enumerate(self.states) if state is not State.UP)
        return (
            f"{len(self.up)} of {len(self.states)} ranks serve, with room for {num_slots} of {self._num_experts} experts "
            f"in each layer; waiting for rank {waiting}"
        )

    def memberships(self) -> list[tuple[int, Membership]]:
        """What to tell whom after a change."""
        message = Membership(self.epoch, self.alive)
        return [(rank, message) for rank, alive in enumerate(message.alive) if alive]

    # ---- what ranks and the supervisor say ----

    def on_ready(self, message: RankReady) -> bool:
        """True: the membership has changed."""
        rank = message.rank
        if message.process in self._ended[rank]:
            return False
        if self.states[rank] in (State.UP, State.JOINING):
            self._early[rank] = message
            return False
        self.ready[rank] = message
        if self.states[rank] is State.LOADING:
            self.states[rank] = State.UP
            self.started = all(state is State.UP for state in self.states)
            return False
        self.epoch += 1
        self._joined_epoch[rank] = self.epoch
        # Without experts there is nothing to agree on with the others.
        self.states[rank] = State.JOINING if self._num_experts else State.UP
        return True

    def on_failed(self, message: RankFailed) -> bool:
        """True: a member is lost."""
        rank = message.rank
        error = message.error.removeprefix(f"rank {rank}: ")
        return self._lose(rank, f"rank {rank} failed: {error}", self._clock())

    def on_lost(self, message: RankLost) -> bool:
        """True: a member is lost."""
        rank = message.rank
        self._ended[rank].add(message.process)
        if self.started and (rank not in self.ready or self.ready[rank].process != message.process):
            return False  # it was not a member: it died while loading again, or has said itself that it fails
        changed = self._lose(rank, f"rank {rank} is lost: {message.reason}", message.time)
        early = self._early.pop(rank, None)
        return (early is not None and self.on_ready(early)) or changed

    def _lose(self, rank: int, reason: str, last_life: float) -> bool:
        if not self.started:
            self.failed = reason
            return False
        if self.states[rank] is State.LOST:
            return False
        self.states[rank] = State.LOST
        self.ready.pop(rank, None)
        self.epoch += 1
        self.num_losses += 1
        members = {member for member, alive in enumerate(self.alive) if alive}
        if not members:
            self.failed = f"all ranks are lost; {reason}" if len(self.states) > 1 else reason
            return False
        now = self._clock()
        for recovery in self.open:
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
        if self.states[rank] is not State.JOINING or message.epoch < self._joined_epoch[rank]:
            return False
        self.states[rank] = State.UP
        return True

    def _said(self, recovery: Recovery, rank: int, now: float, busy: bool) -> None:
        if rank not in recovery.missing:
            return
        recovery.missing.discard(rank)
        if recovery.missing:
            return
        recovery.joined = now
        if not busy:
            self._end(recovery, now)

    def on_token(self, now: float) -> None:
        """A rank has sent tokens. To be called while `open` is not empty."""
        for recovery in list(self.open):
            if recovery.joined is not None:
                recovery.first_token = now - recovery.joined
                self._end(recovery, now)

    def on_idle(self) -> None:
        """Nobody waits for tokens any more."""
        for recovery in list(self.open):
            if recovery.joined is not None:
                self._end(recovery, recovery.joined)

    def _end(self, recovery: Recovery, now: float) -> None:
        recovery.total = recovery.detect + now - recovery.told
        self.open.remove(recovery)
        self.done.append(recovery)
