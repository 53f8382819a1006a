"""One small exchange per step: every rank says what it proposes, and all come to the same plan (docs/design.md, 4).

The record is one packed row of integers per rank, the last of which are the words of what goes with the steps. Its
first fields must be equal on all ranks; a difference means that the ranks no longer speak of the same step or the same
experts, and nothing they compute together would be right. The ranks that are not with most of the others (of two
halves: with the one that has the lowest rank) end, and to the rest they are lost: so the server goes on without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dbo import alive
from dbo.threshold import agree
from ep.protocol import PeerLost, Pending, Ready
from ep.recorder import Kind
from ep.transport.group import Group

# The first fields of a record.
_EQUAL = ("epoch", "step", "number of passes computed", "checksum of model and options", "checksum of the placement")
_NUM_FIXED = len(_EQUAL) + 6  # fields before the words
_AGREEMENT, _IDLE = int(Kind.AGREEMENT), int(Kind.IDLE)


class Proposal(NamedTuple):
    """What one rank says of its next step. has_work: it has requests, or results not yet taken. known_epoch: the
    highest epoch of which it has heard. parts: in how many it would compute its tokens. words: of what else goes with
    the steps (engine/hooks.py), equally many on all ranks."""

    num_tokens: int
    has_work: bool
    shutdown: bool
    free_blocks: int
    known_epoch: int = 0
    parts: int = 1
    words: Sequence[int] = ()


class StepPlan(NamedTuple):
    """What all ranks do next; equal on all of them. One entry per rank in the tuples."""

    step: int
    busy: bool  # a rank has work; if not, all leave the lockstep and sleep
    shutdown: bool  # a rank was told to: all leave for good
    num_tokens: tuple[int, ...]
    free_blocks: tuple[int, ...]
    known_epoch: int = 0  # all have heard of this one: they change over to it instead of taking this step
    parts: int = 1  # in how many all ranks compute the step
    words: tuple[tuple[int, ...], ...] = ()  # of every rank
    epoch: int = 0

    @property
    def runs(self) -> bool:
        """Whether there is a forward pass, in which then every rank takes part."""
        return not self.shutdown and any(self.num_tokens)


class Agreement:
    """model, placement: checksums of what must be equal on all ranks; they are part of every record. The last one is
    changed by all ranks after the same step. passes: forward passes that this rank has begun in the epoch. ranks: the
    own numbers of the group's; None: they have no others."""

    def __init__(
        self, group: Group, epoch: int, placement: int, model: int = 0, ranks: Sequence[int] | None = None
    ) -> None:
        self.placement = placement
        self.passes = 0
        self._model = model
        self._ranks = range(group.size) if ranks is None else ranks
        self._group = group
        self._epoch = epoch
        self._step = 0

    def propose(self, proposal: Proposal) -> Pending[StepPlan]:
        """Every rank calls this once per step. When the ranks disagree `wait()` raises RuntimeError on those that are
        not with most of them, and on the others PeerLost naming these; PeerLost for whatever else is lost."""
        step, self._step = self._step, self._step + 1
        if self._group.size == 1:
            plan = _own_plan(self._epoch, step, proposal)
            alive.place(alive.AGREEING, step, _AGREEMENT if plan.busy else _IDLE)
            return Ready(plan)
        alive.place(alive.AGREEING, step, _AGREEMENT)
        record = [
            self._epoch,
            step,
            self.passes,
            self._model,
            self.placement,
            proposal.num_tokens,
            int(proposal.has_work),
            int(proposal.shutdown),
            proposal.free_blocks,
            proposal.known_epoch,
            proposal.parts,
            *proposal.words,
        ]
        return _PendingPlan(self._group.all_gather_ints(record), self._group.rank, self._ranks)


class _PendingPlan:
    def __init__(self, records: Pending[list[list[int]]], own: int, ranks: Sequence[int]) -> None:
        self._records = records
        self._own = own
        self._ranks = ranks

    def wait(self) -> StepPlan:
        records = self._records.wait()
        if any(record[: len(_EQUAL)] != records[0][: len(_EQUAL)] for record in records):
            self._disagree(records)
        plan = _plan(records)
        if not plan.busy:
            alive.place(alive.AGREEING, plan.step, _IDLE)
        return plan

    def _disagree(self, records: list[list[int]]) -> None:
        for index, name in enumerate(_EQUAL):
            values = [record[index] for record in records]
            counts = Counter(values)
            if len(counts) == 1:
                continue
            said = ", ".join(f"rank {rank}: {value}" for rank, value in zip(self._ranks, values, strict=True))
            most = max(counts, key=counts.__getitem__)  # the first of equals
            others = tuple(rank for rank, value in enumerate(values) if value != most)
            names = ", ".join(str(self._ranks[rank]) for rank in others)
            reason = f"the ranks disagree on the {name} ({said}); not with the others: rank {names}"
            raise RuntimeError(reason) if self._own in others else PeerLost(others, reason)


def _own_plan(epoch: int, step: int, proposal: Proposal) -> StepPlan:
    """What a rank that is alone comes to."""
    return StepPlan(
        step,
        proposal.has_work or proposal.num_tokens > 0,
        proposal.shutdown,
        (proposal.num_tokens,),
        (proposal.free_blocks,),
        proposal.known_epoch,
        max(1, proposal.parts),
        (tuple(proposal.words),),
        epoch,
    )


def _plan(records: list[list[int]]) -> StepPlan:
    columns = zip(*(record[:_NUM_FIXED] for record in records), strict=True)
    epoch, step, _, _, _, num_tokens, has_work, shutdown, free_blocks, known_epochs, parts = columns
    return StepPlan(
        step=step[0],
        busy=any(has_work) or any(num_tokens),
        shutdown=any(shutdown),
        num_tokens=num_tokens,
        free_blocks=free_blocks,
        known_epoch=min(known_epochs),
        parts=agree(num_tokens, parts),
        words=tuple(tuple(record[_NUM_FIXED:]) for record in records),
        epoch=epoch[0],
    )
