"""One small exchange per step: every rank says what it proposes, and all come to the same plan (docs/design.md, 4).

The record is one packed row of integers per rank, the last of which are the words of what goes with the steps. Its
first three fields must be equal on all ranks; a difference means that the ranks no longer speak of the same step or the
same experts, and nothing they compute together would be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dbo.threshold import agree
from ep.protocol import Pending, Ready
from ep.transport.group import Group

_NUM_FIXED = 9  # fields of a record, before the words


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
    """checksum: of whatever must be equal on all ranks (placement, model, dtype); it is part of every record. All ranks
    change it after the same step."""

    def __init__(self, group: Group, epoch: int, checksum: int) -> None:
        self.checksum = checksum
        self._group = group
        self._epoch = epoch
        self._step = 0

    def propose(self, proposal: Proposal) -> Pending[StepPlan]:
        """Every rank calls this once per step. `wait()` raises PeerLost, or RuntimeError when the ranks disagree."""
        step, self._step = self._step, self._step + 1
        if self._group.size == 1:
            return Ready(_own_plan(self._epoch, step, proposal))
        record = [
            self._epoch,
            step,
            self.checksum,
            proposal.num_tokens,
            int(proposal.has_work),
            int(proposal.shutdown),
            proposal.free_blocks,
            proposal.known_epoch,
            proposal.parts,
            *proposal.words,
        ]
        return _PendingPlan(self._group.all_gather_ints(record))


class _PendingPlan:
    def __init__(self, records: Pending[list[list[int]]]) -> None:
        self._records = records

    def wait(self) -> StepPlan:
        return _plan(self._records.wait())


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
    for index, name in enumerate(("epoch", "step", "checksum of model and placement")):
        values = [record[index] for record in records]
        if len(set(values)) > 1:
            said = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise RuntimeError(f"the ranks disagree on the {name} ({said})")
    columns = zip(*(record[:_NUM_FIXED] for record in records), strict=True)
    epoch, step, _, num_tokens, has_work, shutdown, free_blocks, known_epochs, parts = columns
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
