"""What the device thread knows of every row of the batch: the tokens of its sequence and the tables of its KV blocks.

Legend: B sequences of a step, S sequences sampled, P rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache.rows import CacheRows
from engine.prepared import Ints, PromptTargets, ScheduledTokens
from engine.schedule import NewRow, Schedule


class BatchTable:
    """token_ids: int32 [rows, max_model_len + 1]; row r holds known[r] valid ones, sampled ones included (where those
    stay on a device, only the ones that came with it). stated: tokens of each row that came with it. tables: of each
    token group of the cache, int64 [rows, columns]; num_blocks: of each row; rows: where they lie."""

    def __init__(self, max_model_len: int, rows: CacheRows) -> None:
        num_rows = len(rows.placed)
        # One more column: the last step of a full sequence still writes the token that it samples.
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
        self.known = np.zeros(num_rows, dtype=np.int64)
        self.tables, self.num_blocks, self.stated, self._rows = rows.tables, rows.num_blocks, rows.stated, rows
        self._asking: dict[int, tuple[int, int]] = {}  # rows that want prompt_logprobs -> prompt_len, how many

    def take_over(self, schedule: Schedule) -> None:
        """Its rows and blocks."""
        for row in schedule.freed_rows:
            self._free(row)
        for new in schedule.new_rows:
            self._place(new)
        self.take_blocks(schedule.new_blocks)

    def take_blocks(self, new_blocks: Sequence[tuple[int, list[list[int]]]]) -> None:
        for row, blocks in new_blocks:
            start = int(self.num_blocks[row])
            end = start + len(blocks[0])
            for table, added in zip(self.tables, blocks, strict=True):
                table[row, start:end] = added
            self.num_blocks[row] = end

    def room(self, rows_B: Ints, block_size: int) -> Ints:
        """Positions for which each row has blocks."""
        return self.num_blocks[rows_B] * block_size

    def stays_of(self, rows_B: Ints | Sequence[int]) -> Ints:
        """Whose these rows are."""
        return self._rows.placed[rows_B]

    def begin(self, schedule: Schedule) -> None:
        """That step begins: what is before its entries has been computed, not what is before their later parts."""
        self._rows.computed[schedule.rows] = schedule.starts

    def begin_states(self, schedule: Schedule) -> None:
        """That step begins, which writes these records."""
        self._rows.begin_states(schedule.state_writes)

    def end_states(self, schedule: Schedule) -> None:
        """It is over, and all that it has computed is whole. A state stands before the step's drafts."""
        if schedule.state_writes and len(self._rows.owners):
            ends_E = np.add(schedule.starts, schedule.counts)
            if schedule.drafts:
                ends_E -= np.array([len(drafts) for drafts in schedule.drafts])
            self._rows.end_states(schedule.state_writes, self._rows.placed[schedule.rows], ends_E)

    def _free(self, row: int) -> None:
        self._rows.placed[row] = 0  # first: whoever reads this table from outside may do so at any time
        for table in self.tables:
            table[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0
        self.known[row] = self.stated[row] = 0
        self._asking.pop(row, None)

    def _place(self, new: NewRow) -> None:
        self._free(new.row)
        length = len(new.token_ids)
        self.token_ids[new.row, :length] = new.token_ids
        self.known[new.row] = self.stated[new.row] = length
        if new.params.prompt_logprobs is not None:
            self._asking[new.row] = (new.prompt_len, new.params.prompt_logprobs)
        self._rows.computed[new.row] = 0
        self._rows.placed[new.row] = new.stay

    def ask(self, work: ScheduledTokens, query_ends_B: Ints, last_S: Ints) -> tuple[list[PromptTargets], Ints]:
        """The prompts whose logits are wanted, and all rows of the hidden state to make logits of, int64 [P]: first
        last_S."""
        if not self._asking:
            return [], last_S
        asked: list[PromptTargets] = []
        pieces = [last_S]
        for index, row in enumerate(work.rows_B.tolist()):
            if row not in self._asking:
                continue
            prompt_len, num_logprobs = self._asking[row]
            start, length = int(work.starts_B[index]), int(work.counts_B[index])
            count = min(start + length, prompt_len - 1) - start  # the last prompt token predicts output, not prompt
            if count <= 0:
                continue
            first_T = int(query_ends_B[index]) - length
            targets = self.token_ids[row, start + 1 : start + 1 + count].tolist()
            asked.append(PromptTargets(int(work.entry_B[index]), num_logprobs, targets))
            pieces.append(np.arange(first_T, first_T + count, dtype=np.int64))
        return asked, np.concatenate(pieces)
