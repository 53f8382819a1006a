"""What one step computes, as plain integers: made by the scheduler, turned into tensors by engine/step_buffers.py.

A *row* is a place in the persistent batch (0 <= row < max_num_seqs), held by a request from its admission until it
finishes or is preempted. A step may be scheduled while the one before still runs: the token that a row samples in
step n is then the input of step n+1 before the scheduler has seen it, so the batch, not the schedule, carries it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:  # so that benchmarks/gpu_check.py runs where there is torch and nothing else
    from engine.recovery.resumed_step import ResumedStep
    from engine.sampling.processors import RequestProcessors
    from engine.structured.guide import Guide
    from front.params import SamplingParams


class NewRow(Struct, frozen=True):
    """A request takes a row (first time, or again after a preemption, with all the tokens known by then)."""

    row: int
    request_id: int
    token_ids: list[int]  # a copy: prompt, then output so far
    prompt_len: int
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    guide: Guide | None = None  # of its grammar
    processors: RequestProcessors | None = None  # of its logits
    stay: int = 0  # of the request in the row (cache/rows.py)


class Schedule(Struct):
    """Lists of equal length describe the work: row rows[i] computes tokens starts[i] : starts[i] + counts[i] of its
    sequence; if samples[i], its last hidden state is sampled. Rows with counts 1 that sample come first. With drafts
    (engine/speculation/drafter.py) the last len(drafts[i]) of those tokens are guesses, and the states from the last
    known token on are sampled.

    Order of application: freed rows, new rows, new blocks, work. prompt_logprobs rows need logits of all their tokens.
    """

    step_id: int
    freed_rows: list[int] = []
    new_rows: list[NewRow] = []
    new_blocks: list[tuple[int, list[list[int]]]] = []  # (row, per group what its table gets)
    rows: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    samples: list[bool] = []
    drafts: list[list[int]] = []  # behind the last known token; [] where no entry has any
    warm: list[bool] = []  # whether the layer that drafts knows the tokens before; []: all
    draft_depth: int = 0  # drafts that follow the step, as the ranks have agreed; 0: the layer that drafts is left out
    state_reads: list[int] = []  # records (cache/records.py); [] where a model has no state
    state_writes: list[int] = []
    state_kept: list[int] = []  # inputs in the record that is read, which come first
    most_tokens: int = 0  # of any rank in this step, as the ranks have agreed
    agreed_step: int = 0  # its number among all ranks
    resumed: ResumedStep | None = None  # None: it begins at the embedding

    @property
    def num_drafts(self) -> int:
        return sum(map(len, self.drafts))

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)
