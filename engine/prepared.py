"""A step as tensors: what engine/step_buffers.py makes of a schedule, and engine/runner.py computes.

Legend: P rows whose logits are wanted, S sequences sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from dbo.split import Cut
from layers.step import StepInput

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
V = TypeVar("V")


class ScheduledTokens(Struct, frozen=True):
    """Entries of a schedule, or pieces of them; entry_B: which. begins_B: whether it is the first piece of its
    entry."""

    entry_B: Ints
    rows_B: Ints
    starts_B: Ints
    counts_B: Ints
    samples_B: Bools
    begins_B: Bools

    def between(self, first: Cut, last: Cut) -> ScheduledTokens:
        """A part of it."""
        chosen = slice(first.entry, last.entry + (last.tokens > 0))
        starts_B, counts_B, samples_B = (
            self.starts_B[chosen].copy(),
            self.counts_B[chosen].copy(),
            self.samples_B[chosen],
        )
        if last.tokens:
            samples_B = samples_B.copy()
            counts_B[-1], samples_B[-1] = last.tokens, False
        if first.tokens and len(counts_B):
            starts_B[0] += first.tokens
            counts_B[0] -= first.tokens
        begins_B = self.begins_B[chosen].copy()
        if first.tokens and len(begins_B):
            begins_B[0] = False
        part = ScheduledTokens(self.entry_B[chosen], self.rows_B[chosen], starts_B, counts_B, samples_B, begins_B)
        filled_B = counts_B > 0
        return part if filled_B.all() else part.take(filled_B)

    def ordered(self) -> tuple[ScheduledTokens, int]:
        """Entries of one token first, and how many those are."""
        one_B = self.counts_B == 1
        num_decodes = int(np.count_nonzero(one_B))
        if one_B[:num_decodes].all():
            return self, num_decodes
        return self.take(np.argsort(~one_B, kind="stable")), num_decodes

    def verified(self, drafts_E: Ints) -> ScheduledTokens:
        """An entry with drafts is decoded in pieces of one token, each of which reads what those before it have
        written: so what decodes also verifies, with the arithmetic of a step without drafts. drafts_E: how many each
        entry of the schedule has; empty: none has any."""
        if not len(drafts_E):
            return self
        pieces_B = np.where(self.samples_B & (drafts_E[self.entry_B] > 0), self.counts_B, 1)
        which_B = np.repeat(np.arange(len(pieces_B)), pieces_B)
        place_B = np.arange(len(which_B)) - np.repeat(np.cumsum(pieces_B) - pieces_B, pieces_B)
        work = self.take(which_B)
        counts_B = np.where(pieces_B[which_B] > 1, 1, work.counts_B)
        return ScheduledTokens(
            work.entry_B, work.rows_B, work.starts_B + place_B, counts_B, work.samples_B, work.begins_B & (place_B == 0)
        )

    def take(self, which_B: Ints | Bools) -> ScheduledTokens:
        """These entries, in this order."""
        return ScheduledTokens(
            self.entry_B[which_B],
            self.rows_B[which_B],
            self.starts_B[which_B],
            self.counts_B[which_B],
            self.samples_B[which_B],
            self.begins_B[which_B],
        )


class PromptTargets(NamedTuple):
    """A piece of a prompt whose logits are wanted."""

    entry: int
    num_logprobs: int
    target_ids: list[int]


def spread(work: ScheduledTokens, num_decodes: int) -> tuple[Ints, Ints, Ints]:
    """For every token of the step its row and its position; and where each sequence ends on the token axis."""
    if num_decodes == len(work.rows_B):
        return work.rows_B, work.starts_B, np.arange(1, num_decodes + 1, dtype=np.int64)
    query_ends_B = np.cumsum(work.counts_B)
    shift_B = work.starts_B - (query_ends_B - work.counts_B)
    position_T = np.arange(query_ends_B[-1], dtype=np.int64) + np.repeat(shift_B, work.counts_B)
    return np.repeat(work.rows_B, work.counts_B), position_T, query_ends_B


class PromptPart(Struct, frozen=True):
    """Prompt tokens whose log-probabilities were asked for and whose predecessors are computed in this step.

    Their logits are rows first_logit : first_logit + len(target_ids) of `PreparedStep.logits_rows_P`. A prompt that is
    cut has several of these, in the order of its tokens.
    """

    entry: int  # index into the schedule's lists
    num_logprobs: int  # alternatives asked for; -1 all
    first_logit: int
    target_ids: list[int]  # the prompt tokens themselves


def prompt_parts(asked: Sequence[PromptTargets], num_sampled: int) -> tuple[PromptPart, ...]:
    """Their logits come one after another, behind the sampled ones."""
    parts = []
    for entry, num_logprobs, targets in asked:
        parts.append(PromptPart(entry, num_logprobs, num_sampled, targets))
        num_sampled += len(targets)
    return tuple(parts)


class GraphSize(NamedTuple):
    """A graph that has room for a part of a step, or for the whole (engine/capture.py). full: it holds the whole
    forward pass of so many decodes; else what is between its graph breaks. exchanges: full, with the exchanges with
    other ranks, which are left out otherwise where there are any."""

    full: bool
    rows: int  # that the part is padded to
    exchanges: bool = False


Graphs = Sequence[GraphSize | None]


class Chooser(Protocol):
    def __call__(self, counts: Sequence[int], decodes: Sequence[bool]) -> Graphs:
        """Of each part the graph that is to have it. counts: its tokens; decodes: whether each is of another
        sequence."""
        ...


class Verified(NamedTuple):
    """The sequences of a step that verifies drafts. starts: where each begins on the token axis, and the end; rows: of
    the batch; room: places in the cache that each has behind its tokens at least."""

    starts: Ints
    rows: Ints
    room: int


class PreparedStep(Struct, frozen=True):
    """inputs: one per part; their tokens one after another are those of the step. A part may have none. graphs: of each
    part the one that it is laid out for; None: it runs eager.

    logits_rows_P: rows of all parts' hidden states, one after another. The first S are to be sampled; the rest belong
    to `prompt_parts`.
    """

    inputs: tuple[StepInput, ...]
    graphs: Graphs
    logits_rows_P: torch.Tensor  # int64
    num_entries: int  # of the schedule
    entries_S: list[int]  # schedule entry of each sampled sequence
    rows_S: Ints  # its row of the batch
    positions_S: Ints  # position of the token to be sampled, counted from the start of the prompt
    prompt_parts: tuple[PromptPart, ...]
    device_rows_S: torch.Tensor | None = None  # rows_S on the device, where it is wanted there
    # Of the entries that have any, each of which is sampled once more than it has drafts.
    drafts: dict[int, list[int]] | None = None
    rows_B: tuple[Ints, ...] = ()  # of each part the rows of the batch; not of a step that only counts on
    verified: Verified | None = None  # where that is known

    @property
    def num_sampled(self) -> int:
        return len(self.entries_S)

    @property
    def samples_all(self) -> bool:
        """Every token of the step is sampled, in order: all decode."""
        return len(self.inputs) == 1 and len(self.entries_S) == self.inputs[0].num_tokens


def drafts_before(prepared: PreparedStep) -> list[list[int]]:
    """For every token to be sampled the drafts between it and the last known one."""
    return [drafts[:count] for _, run, drafts in runs(prepared, prepared.entries_S) for count in range(len(run))]


def runs(prepared: PreparedStep, values: list[V]) -> Iterator[tuple[int, list[V], list[int]]]:
    """For every sampled entry: where its samples begin, those of `values` (one per sample), and its drafts."""
    first = 0
    while first < len(values):
        drafts = (prepared.drafts or {}).get(prepared.entries_S[first], [])
        yield first, values[first : first + 1 + len(drafts)], drafts
        first += 1 + len(drafts)
