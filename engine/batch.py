"""The persistent batch: the only place where a schedule's lists become tensors.

It keeps, for every row, the tokens of its sequence and the table of its KV blocks. Only the device thread touches it,
so the token that a row samples in step n stands here when step n+1 is prepared, though the scheduler, which made step
n+1 in the meantime, has not seen it. With feedback (engine/feedback.py) it stands on the device, and the host does not
know it.

A step may be laid out in parts, which the device computes in turn (dbo/split.py says where it is cut).

Legend: T tokens of the step, B sequences, N blocks per sequence, P rows whose logits are wanted, S sequences sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dbo.split import Cut, cut
from engine.device import make_upload
from engine.drafts import num_new
from engine.feedback import Feedback
from engine.prepared import Ints, PreparedStep, PromptPart, Work, runs
from engine.schedule import NewRow, Schedule
from engine.steady import SteadyDecodes
from layers.step import StateInput, StepInput, TableInput


class _Asked(NamedTuple):
    """A piece of a prompt whose logits are wanted."""

    entry: int
    num_logprobs: int
    target_ids: list[int]


class _Fill(NamedTuple):
    """Tokens of a part that are on the device only: those of these rows, for these places (None: the first)."""

    token_ids_T: torch.Tensor
    rows_F: torch.Tensor
    places_F: torch.Tensor | None


class _Part(NamedTuple):
    """One part of a step. logits_P: `step.logits_rows_P` on the host."""

    step: StepInput
    entries_S: Ints
    rows_S: Ints
    positions_S: Ints
    logits_P: Ints
    asked: list[_Asked]

    @property
    def num_sampled(self) -> int:
        return len(self.entries_S)


class Batch:
    """max_model_len bounds a sequence, its sampled tokens included. Memory: 4 bytes per row and position.

    context_cost: of a token's work, for cutting steps (dbo/split.py).
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        context_cost: float = 0.0,
        feedback: Feedback | None = None,
        num_tables: int = 1,
        has_state: bool = False,
    ) -> None:
        """num_tables, has_state: token groups of the cache, and whether there are state groups. feedback: sampled
        tokens stay on the device; None: the host has each before the next step."""
        self._has_state = has_state
        self._feedback = feedback
        self._fills: list[_Fill] = []
        self._stated = np.zeros(max_num_seqs, dtype=np.int64)  # tokens of each row that came with it
        self._context_cost = context_cost
        self._block_size = block_size
        # Tokens of a step, and what a row has besides.
        self._upload = make_upload(device, 8 * max_num_seqs + 4 * max_model_len)
        # One more column: the last step of a full sequence still writes the token that it samples.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        columns = -(-max_model_len // block_size)
        self._tables = [np.zeros((max_num_seqs, columns), dtype=np.int64) for _ in range(num_tables)]
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._known = np.zeros(max_num_seqs, dtype=np.int64)  # tokens of each row written so far
        self._asking: dict[int, tuple[int, int]] = {}  # rows that want prompt_logprobs -> prompt_len, how many
        self._steady: SteadyDecodes | None = None  # the last step, where the next one may follow from it

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """int32 [max_num_seqs, max_model_len + 1]; row r holds `known[r]` valid tokens (with feedback those that
        came with it)."""
        self._settle()
        return self._token_ids

    @property
    def known(self) -> Ints:
        """int64 [max_num_seqs]: how many tokens of each row are known, sampled ones included."""
        self._settle()
        return self._known

    def apply(self, schedule: Schedule, num_parts: int = 1) -> PreparedStep:
        """Take over the schedule's rows and blocks, and lay its work out as tensors, in so many parts (zero tokens are
        fine). On a CPU, what it returns may be read until the next call."""
        if num_parts == 1 and self._steady is not None and self._steady.goes_on_with(schedule):
            return self._steady.next()
        self._settle()
        self._steady = None
        for row in schedule.freed_rows:
            self._free(row)
        for new in schedule.new_rows:
            self._place(new)
        for row, blocks in schedule.new_blocks:
            start = int(self._num_blocks[row])
            end = start + len(blocks[0])
            for table, added in zip(self._tables, blocks, strict=True):
                table[row, start:end] = added
            self._num_blocks[row] = end
        self._fills.clear()
        prepared = self._layout(schedule, num_parts)
        self._upload.send()
        if self._feedback is not None:
            for fill in self._fills:
                self._feedback.fill(fill.token_ids_T, fill.rows_F, fill.places_F)
        if (
            prepared.num_sampled
            and prepared.samples_all
            and self._upload.in_place
            and self._feedback is None
            and not prepared.prompt_parts
            and len(self._tables) == 1
            and not self._has_state
            and prepared.drafts is None
        ):
            self._steady = SteadyDecodes(prepared, schedule)
        return prepared

    def keep_sampled(self, prepared: PreparedStep, token_ids_S: torch.Tensor) -> None:
        """The sampled tokens (int64 [S], on the device) are where the next step finds them."""
        if self._feedback is None:
            self.note_sampled(prepared, token_ids_S.numpy())
            return
        assert prepared.device_rows_S is not None
        self._feedback.keep(prepared.device_rows_S, token_ids_S)
        self._known[prepared.rows_S] = prepared.positions_S + 1

    def note_sampled(self, prepared: PreparedStep, token_ids_S: Ints) -> None:
        """Write the sampled tokens (int64 [S]) behind their sequences on the host."""
        if self._steady is not None and self._steady.note(prepared, token_ids_S):
            return
        self._token_ids[prepared.rows_S, prepared.positions_S] = token_ids_S
        if prepared.drafts is None:
            self._known[prepared.rows_S] = prepared.positions_S + 1
            return
        for first, sampled, drafts in runs(prepared, token_ids_S.tolist()):
            self._known[prepared.rows_S[first]] = prepared.positions_S[first] + num_new(sampled, drafts)

    def _settle(self) -> None:
        if self._steady is not None:
            self._steady.write(self._token_ids, self._known)

    def _free(self, row: int) -> None:
        for table in self._tables:
            table[row, : self._num_blocks[row]] = 0
        self._num_blocks[row] = 0
        self._known[row] = self._stated[row] = 0
        self._asking.pop(row, None)

    def _place(self, new: NewRow) -> None:
        self._free(new.row)
        length = len(new.token_ids)
        self._token_ids[new.row, :length] = new.token_ids
        self._known[new.row] = self._stated[new.row] = length
        if new.params.prompt_logprobs is not None:
            self._asking[new.row] = (new.prompt_len, new.params.prompt_logprobs)

    def _layout(self, schedule: Schedule, num_parts: int) -> PreparedStep:
        num_entries = len(schedule.rows)
        whole = Work(
            np.arange(num_entries),
            np.array(schedule.rows, dtype=np.int64),
            np.array(schedule.starts, dtype=np.int64),
            np.array(schedule.counts, dtype=np.int64),
            np.array(schedule.samples, dtype=bool),
            np.ones(num_entries, dtype=bool),
        )
        self._drafts_E = np.array([len(drafts) for drafts in schedule.drafts], dtype=np.int64)
        for row, start, count, drafts in zip(
            schedule.rows, schedule.starts, schedule.counts, schedule.drafts, strict=False
        ):
            if drafts:
                self._token_ids[row, start + 1 : start + count] = drafts
        self._records_2E = np.array([schedule.state_reads, schedule.state_writes], dtype=np.int64)
        if num_parts == 1:
            part = self._part(whole)
            step = part.step
            asked = _prompt_parts(part.asked, part.num_sampled)
            entries_S, rows_S, positions_S = part.entries_S, part.rows_S, part.positions_S
            there = self._rows_on_device(rows_S)
            sampled = entries_S.tolist(), rows_S, positions_S
            return PreparedStep((step,), step.logits_rows_P, num_entries, *sampled, asked, there, _drafts_of(schedule))
        cuts = cut(schedule.starts, schedule.counts, num_parts, self._context_cost)
        if schedule.drafts:  # they are sampled together
            cuts = [Cut(one.entry, 0) if one.tokens and schedule.drafts[one.entry] else one for one in cuts]
        bounds = [Cut(0, 0), *cuts, Cut(num_entries, 0)]
        return self._join([self._part(whole.between(first, last)) for first, last in pairwise(bounds)], schedule)

    def _join(self, parts: list[_Part], schedule: Schedule) -> PreparedStep:
        first_T = np.cumsum([0, *(part.step.num_tokens for part in parts[:-1])])
        sampled = [part.logits_P[: part.num_sampled] + first for part, first in zip(parts, first_T, strict=True)]
        prompts = [part.logits_P[part.num_sampled :] + first for part, first in zip(parts, first_T, strict=True)]
        entries_S = np.concatenate([part.entries_S for part in parts])
        rows_S = np.concatenate([part.rows_S for part in parts])
        return PreparedStep(
            tuple(part.step for part in parts),
            self._tensor(np.concatenate(sampled + prompts)),
            len(schedule.rows),
            entries_S.tolist(),
            rows_S,
            np.concatenate([part.positions_S for part in parts]),
            _prompt_parts([one for part in parts for one in part.asked], len(entries_S)),
            self._rows_on_device(rows_S),
            _drafts_of(schedule),
        )

    def _part(self, work: Work) -> _Part:
        work, num_decodes = work.ordered()
        rows_B, starts_B = work.rows_B, work.starts_B
        ends_B = starts_B + work.counts_B
        guessed_B = self._drafts_E[work.entry_B] if len(self._drafts_E) else 0
        assert (ends_B <= self._known[rows_B] + guessed_B).all(), "a schedule computes tokens that are not known yet"
        row_T, position_T, query_ends_B = _spread(rows_B, starts_B, work.counts_B, num_decodes)
        columns_T, offsets_T = np.divmod(position_T, self._block_size)
        num_columns = int(-(-ends_B.max() // self._block_size)) if len(rows_B) else 0
        first, *more = [
            TableInput(
                self._tensor(table[row_T, columns_T] * self._block_size + offsets_T),
                self._tensor(np.maximum(table[rows_B, :num_columns], 0)),
            )
            for table in self._tables
        ]
        sampled_S, behind_S = self._sampled(work)
        asked, logits_P = self._ask(work, ends_B, query_ends_B, query_ends_B[sampled_S] - 1 - behind_S)
        step = StepInput(
            token_ids_T=self._tensor(self._token_ids[row_T, position_T].astype(np.int64)),
            positions_T=self._tensor(position_T),
            slots_T=first.slots_T,
            query_starts=(0, *query_ends_B.tolist()),
            kv_lens=tuple(ends_B.tolist()),
            kv_lens_B=self._tensor(ends_B),
            block_table_BN=first.block_table_BN,
            num_decodes=num_decodes,
            block_size=self._block_size,
            logits_rows_P=self._tensor(logits_P),
            more_tables=tuple(more),
            state=self._state(work),
        )
        if self._feedback is not None:
            self._feed(step.token_ids_T, rows_B[:num_decodes], starts_B[:num_decodes])
        positions_S = ends_B[sampled_S] - behind_S
        return _Part(step, work.entry_B[sampled_S], rows_B[sampled_S], positions_S, logits_P, asked)

    def _sampled(self, work: Work) -> tuple[Ints, Ints]:
        """For every token to be sampled its place in the work, and how many of that place's are sampled behind it."""
        places = np.flatnonzero(work.samples_B)
        if not len(self._drafts_E):
            return places, np.zeros(len(places), dtype=np.int64)
        more = self._drafts_E[work.entry_B[places]]
        behind = [np.arange(count, -1, -1) for count in more.tolist()]
        return np.repeat(places, more + 1), np.concatenate([*behind, np.zeros(0, dtype=np.int64)])

    def _state(self, work: Work) -> StateInput | None:
        """A sequence that is cut begins its second part with what the first one has left in the record that it
        writes."""
        if not self._has_state:
            return None
        reads_B, writes_B = self._records_2E[:, work.entry_B]
        return StateInput(self._tensor(np.where(work.begins_B, reads_B, writes_B)), self._tensor(writes_B))

    def _feed(self, token_ids_T: torch.Tensor, rows_B: Ints, starts_B: Ints) -> None:
        """Of the entries of one token, those that no NewRow has stated come from the device: what is sampled is
        computed alone."""
        places_F = np.flatnonzero(starts_B >= self._stated[rows_B])
        if not len(places_F):
            return
        first = len(places_F) == int(places_F[-1]) + 1
        places = None if first else self._tensor(places_F)
        self._fills.append(_Fill(token_ids_T, self._tensor(rows_B[places_F]), places))

    def _rows_on_device(self, rows_S: Ints) -> torch.Tensor | None:
        return None if self._feedback is None else self._tensor(rows_S)

    def _ask(self, work: Work, ends_B: Ints, query_ends_B: Ints, last_S: Ints) -> tuple[list[_Asked], Ints]:
        """The prompts whose logits are wanted, and all rows of the hidden state to make logits of."""
        if not self._asking:
            return [], last_S
        asked: list[_Asked] = []
        pieces = [last_S]
        for index, row in enumerate(work.rows_B.tolist()):
            if row not in self._asking:
                continue
            prompt_len, num_logprobs = self._asking[row]
            start, end = int(work.starts_B[index]), int(ends_B[index])
            count = min(end, prompt_len - 1) - start  # the last prompt token predicts output, not prompt
            if count <= 0:
                continue
            first_T = int(query_ends_B[index]) - (end - start)
            targets = self._token_ids[row, start + 1 : start + 1 + count].tolist()
            asked.append(_Asked(int(work.entry_B[index]), num_logprobs, targets))
            pieces.append(np.arange(first_T, first_T + count, dtype=np.int64))
        return asked, np.concatenate(pieces)

    def _tensor(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return self._upload.tensor(array)


def _drafts_of(schedule: Schedule) -> dict[int, list[int]] | None:
    return {entry: drafts for entry, drafts in enumerate(schedule.drafts) if drafts} or None


def _prompt_parts(asked: Sequence[_Asked], num_sampled: int) -> tuple[PromptPart, ...]:
    """Their logits come one after another, behind the sampled ones."""
    parts = []
    for entry, num_logprobs, targets in asked:
        parts.append(PromptPart(entry, num_logprobs, num_sampled, targets))
        num_sampled += len(targets)
    return tuple(parts)


def _spread(rows_B: Ints, starts_B: Ints, counts_B: Ints, num_decodes: int) -> tuple[Ints, Ints, Ints]:
    """For every token of the step its row and its position; and where each sequence ends on the token axis."""
    if num_decodes == len(rows_B):
        return rows_B, starts_B, np.arange(1, len(rows_B) + 1, dtype=np.int64)
    query_ends_B = np.cumsum(counts_B)
    shift_B = starts_B - (query_ends_B - counts_B)
    position_T = np.arange(query_ends_B[-1], dtype=np.int64) + np.repeat(shift_B, counts_B)
    return np.repeat(rows_B, counts_B), position_T, query_ends_B
