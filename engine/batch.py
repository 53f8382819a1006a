"""The persistent batch: the only place where a schedule's lists become tensors.

It keeps, for every row, the tokens of its sequence and the table of its KV blocks. Only the device thread touches it,
so the token that a row samples in step n stands here when step n+1 is prepared, though the scheduler, which made step
n+1 in the meantime, has not seen it.

Legend: T tokens of the step, B sequences, N blocks per sequence, P rows whose logits are wanted, S sequences sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.schedule import NewRow, Schedule
from layers.step import StepInput

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens whose log-probabilities were asked for and whose predecessors are computed in this step.

    Their logits are rows first_logit : first_logit + len(target_ids) of `StepInput.logits_rows_P`.
    """

    entry: int  # index into the schedule's lists
    num_logprobs: int  # alternatives asked for; -1 all
    first_logit: int
    target_ids: list[int]  # the prompt tokens themselves


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """The first S of `input.logits_rows_P` are to be sampled; the rest belong to `prompt_parts`."""

    input: StepInput
    num_entries: int  # of the schedule
    entries_S: list[int]  # schedule entry of each sampled sequence
    rows_S: Ints  # its row of the batch
    positions_S: Ints  # position of the token to be sampled, counted from the start of the prompt
    prompt_parts: tuple[PromptPart, ...]

    @property
    def num_sampled(self) -> int:
        return len(self.entries_S)


class Batch:
    """max_model_len bounds a sequence, its sampled tokens included. Memory: 4 bytes per row and position."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        # One more column: the last step of a full sequence still writes the token that it samples.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._known = np.zeros(max_num_seqs, dtype=np.int64)  # tokens of each row written so far
        self._asking: dict[int, tuple[int, int]] = {}  # rows that want prompt_logprobs -> prompt_len, how many

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """int32 [max_num_seqs, max_model_len + 1]; row r holds `known[r]` valid tokens."""
        return self._token_ids

    @property
    def known(self) -> Ints:
        """int64 [max_num_seqs]: how many tokens of each row are known, sampled ones included."""
        return self._known

    def apply(self, schedule: Schedule) -> PreparedStep:
        """Take over the schedule's rows and blocks, and lay its work out as tensors (zero tokens are fine)."""
        for row in schedule.freed_rows:
            self._free(row)
        for new in schedule.new_rows:
            self._place(new)
        for row, blocks in schedule.new_blocks:
            start = int(self._num_blocks[row])
            self._block_table[row, start : start + len(blocks)] = blocks
            self._num_blocks[row] = start + len(blocks)
        return self._layout(schedule)

    def note_sampled(self, prepared: PreparedStep, token_ids_S: Ints) -> None:
        """Write the sampled tokens (int64 [S]) behind their sequences, where the next step finds them."""
        self._token_ids[prepared.rows_S, prepared.positions_S] = token_ids_S
        self._known[prepared.rows_S] = prepared.positions_S + 1

    def _free(self, row: int) -> None:
        self._block_table[row, : self._num_blocks[row]] = 0
        self._num_blocks[row] = 0
        self._known[row] = 0
        self._asking.pop(row, None)

    def _place(self, new: NewRow) -> None:
        self._free(new.row)
        length = len(new.token_ids)
        self._token_ids[new.row, :length] = new.token_ids
        self._known[new.row] = length
        if new.params.prompt_logprobs is not None:
            self._asking[new.row] = (new.prompt_len, new.params.prompt_logprobs)

    def _layout(self, schedule: Schedule) -> PreparedStep:
        num_entries = len(schedule.rows)
        rows_B = np.array(schedule.rows, dtype=np.int64)
        starts_B = np.array(schedule.starts, dtype=np.int64)
        counts_B = np.array(schedule.counts, dtype=np.int64)
        samples_B = np.array(schedule.samples, dtype=bool)
        one_B = counts_B == 1
        num_decodes = int(np.count_nonzero(one_B))
        entry_B: Ints | None = None  # None: the schedule's own order
        if not one_B[:num_decodes].all():
            entry_B = np.argsort(~one_B, kind="stable")
            rows_B, starts_B, counts_B, samples_B = (a[entry_B] for a in (rows_B, starts_B, counts_B, samples_B))
        ends_B = starts_B + counts_B
        assert (ends_B <= self._known[rows_B]).all(), "a schedule computes tokens that are not known yet"

        row_T, position_T, query_ends_B = _spread(rows_B, starts_B, counts_B, num_decodes)
        slots_T = self._block_table[row_T, position_T // self._block_size] * self._block_size
        slots_T += position_T % self._block_size
        num_columns = int(-(-ends_B.max() // self._block_size)) if num_entries else 0
        sampled = np.flatnonzero(samples_B)
        last_S = query_ends_B[sampled] - 1
        entries_S = sampled if entry_B is None else entry_B[sampled]
        parts, logits_rows_P = self._prompt_parts(rows_B, starts_B, ends_B, query_ends_B, entry_B, last_S)
        kv_lens = ends_B.tolist()
        step = StepInput(
            token_ids_T=self._tensor(self._token_ids[row_T, position_T].astype(np.int64)),
            positions_T=self._tensor(position_T),
            slots_T=self._tensor(slots_T),
            query_starts=(0, *query_ends_B.tolist()),
            kv_lens=tuple(kv_lens),
            kv_lens_B=self._tensor(ends_B),
            block_table_BN=self._tensor(self._block_table[rows_B, :num_columns]),
            num_decodes=num_decodes,
            block_size=self._block_size,
            logits_rows_P=self._tensor(logits_rows_P),
        )
        return PreparedStep(step, num_entries, entries_S.tolist(), rows_B[sampled], ends_B[sampled], parts)

    def _prompt_parts(
        self, rows_B: Ints, starts_B: Ints, ends_B: Ints, query_ends_B: Ints, entry_B: Ints | None, last_S: Ints
    ) -> tuple[tuple[PromptPart, ...], Ints]:
        """The parts of prompts whose logits are wanted, and all rows of the hidden state to make logits of."""
        if not self._asking:
            return (), last_S
        parts: list[PromptPart] = []
        pieces = [last_S]
        first_logit = len(last_S)
        for index, row in enumerate(rows_B.tolist()):
            if row not in self._asking:
                continue
            prompt_len, num_logprobs = self._asking[row]
            start, end = int(starts_B[index]), int(ends_B[index])
            count = min(end, prompt_len - 1) - start  # the last prompt token predicts output, not prompt
            if count <= 0:
                continue
            first_T = int(query_ends_B[index]) - (end - start)
            targets = self._token_ids[row, start + 1 : start + 1 + count].tolist()
            entry = index if entry_B is None else int(entry_B[index])
            parts.append(PromptPart(entry, num_logprobs, first_logit, targets))
            pieces.append(np.arange(first_T, first_T + count, dtype=np.int64))
            first_logit += count
        return tuple(parts), np.concatenate(pieces)

    def _tensor(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _spread(rows_B: Ints, starts_B: Ints, counts_B: Ints, num_decodes: int) -> tuple[Ints, Ints, Ints]:
    """For every token of the step its row and its position; and where each sequence ends on the token axis."""
    if num_decodes == len(rows_B):
        return rows_B, starts_B, np.arange(1, len(rows_B) + 1, dtype=np.int64)
    query_ends_B = np.cumsum(counts_B)
    shift_B = starts_B - (query_ends_B - counts_B)
    position_T = np.arange(query_ends_B[-1], dtype=np.int64) + np.repeat(shift_B, counts_B)
    return np.repeat(rows_B, counts_B), position_T, query_ends_B
