"""Steps of nothing but decodes, of which several may be of one sequence: verifications of drafts, and passes of the
layer that drafts. engine/step_buffers.py lays out all other steps.

Legend: T tokens of the step, B sequences, S sequences that drafts are made for, P rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from cache.rows import CacheRows
from engine.batch_table import BatchTable
from engine.device import make_upload
from engine.prepared import Graphs, Ints, PreparedStep, Verified
from engine.schedule import Schedule
from engine.step_memory import Limits, Place, StepMemory
from engine.step_parts import KV_LENS, POSITIONS, READS, SLOTS, TOKEN_IDS, WRITES
from layers.step import StateInput, StepInput, TableInput
from native.drafts import BatchRows, LayOut, can_run


class Ahead(Struct, frozen=True):
    """`count` steps of the same `num` sequences, each a token further. They lie in one place (whole; None: there are
    none), and have the same tables."""

    whole: StepInput | None
    num: int
    count: int

    def step(self, number: int) -> StepInput:
        """The number-th of them."""
        whole, num = self.whole, self.num
        assert whole is not None
        first, end = number * num, (number + 1) * num
        state = whole.state
        return StepInput(
            whole.token_ids_T[first:end],
            whole.positions_T[first:end],
            whole.slots_T[first:end],
            tuple(range(num + 1)),
            whole.kv_lens[first:end],
            whole.kv_lens_B[first:end],
            whole.block_table_BN[:num],
            num,
            whole.block_size,
            whole.logits_rows_P,
            tuple(TableInput(one.slots_T[first:end], one.block_table_BN[:num]) for one in whole.more_tables),
            None if state is None else StateInput(state.reads_B[first:end], state.writes_B[first:end]),
        )


class _Verification(NamedTuple):
    """What all steps have in common that verify drafts with as many tokens. tables: by the columns that count."""

    lay_out: LayOut
    query_starts: tuple[int, ...]
    every_row: Tensor
    tables: dict[int, list[Tensor]]


class DecodeBuffers:
    """The memory of every lane, and what is known of the rows of the batch."""

    def __init__(self, limits: Limits, device: torch.device, rows: CacheRows | None = None) -> None:
        """rows: in which memory the tables of blocks lie; None: its own."""
        self.limits = limits
        self.device = device
        self._block_size = limits.block_size
        rows = rows or CacheRows.own(limits.max_num_seqs, limits.columns, limits.num_tables)
        self._rows = BatchTable(limits.max_model_len, rows)
        self.tables = [torch.from_numpy(table) for table in self._rows.tables]  # of each token group, of every row
        self._lanes: dict[int, StepMemory] = {}
        self._every_row = torch.arange(limits.max_decodes, device=device)
        # What kernels know of the batch; None: there are none.
        self.batch: BatchRows | None = None
        if device.type == "cpu" and can_run():
            table, most = self._rows, limits.max_model_len
            self.batch = BatchRows(
                table.token_ids, table.known, table.num_blocks, table.tables, limits.block_size, most
            )
        self._verifications: dict[int, _Verification] = {}  # by tokens

    def lane(self, index: int) -> StepMemory:
        """What the parts of that number are read from."""
        limits = self.limits
        if index < 0:  # of what drafts: as many drafts as a step may have, though the step has less room for tokens
            most = limits.max_num_seqs + limits.max_drafts
            limits = limits._replace(max_num_tokens=max(limits.max_num_tokens, most))
        tokens = 0, 0, *[block * self._block_size for block in limits.scratch]
        sequences = 1, *[0, limits.scratch_record] * limits.has_state
        if index not in self._lanes:
            upload = make_upload(self.device)
            self._lanes[index] = StepMemory(limits, tokens, sequences, POSITIONS, self.device, upload)
        return self._lanes[index]

    def decodes(
        self, lane: int, rows_T: Ints, positions_T: Ints, token_ids_T: Ints | int, logits_rows_P: Tensor | None = None
    ) -> StepInput:
        """A step in that lane of tokens that each attend for themselves, at places of sequences that have blocks
        there."""
        memory, num = self.lane(lane), len(rows_T)
        place = memory.place(num, num)
        tokens_FT = place.tokens_FT[:, :num]
        tokens_FT[TOKEN_IDS], tokens_FT[POSITIONS] = token_ids_T, positions_T
        columns_T, offsets_T = np.divmod(positions_T, self._block_size)
        for index, table in enumerate(self._rows.tables):
            tokens_FT[SLOTS + index] = table[rows_T, columns_T] * self._block_size + offsets_T
        place.sequences_FB[KV_LENS, :num] = positions_T + 1
        ends = (positions_T + 1).tolist()
        tables = self._write_tables(memory, place, rows_T, max(ends, default=0))
        memory.send()
        rows_P = place.token_tensors[POSITIONS][:0] if logits_rows_P is None else logits_rows_P
        return self._input(place, tables, tuple(range(num + 1)), ends, num, rows_P)

    def ahead(self, lane: int, rows_S: Ints, positions_S: Ints, count: int) -> Ahead:
        """So many steps of these sequences in that lane, as of `decodes`, each a token further; what the tokens are
        says who computes them."""
        num = len(rows_S)
        if not count:
            return Ahead(None, num, 0)
        positions_T = (positions_S + np.arange(count)[:, None]).ravel()
        return Ahead(self.decodes(lane, np.tile(rows_S, count), positions_T, 0), num, count)

    def fields(self, lane: int, num: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of so many decodes in that lane, which whoever computes them writes: positions, slots and kv_lens, and the
        block table, of a token group."""
        memory = self.lane(lane)
        place = memory.place(num, num)
        tokens = place.token_tensors
        return tokens[POSITIONS], tokens[SLOTS + group], place.sequence_tensors[KV_LENS], memory.tables[group]

    def verify(self, schedule: Schedule, graphs: Graphs) -> PreparedStep:
        """A step of one part of nothing but decodes, of which some have drafts, in a fraction of the time that steps
        take of whatever there may be. graphs: without padding."""
        num = schedule.num_tokens
        if self.batch is None:
            return self._verify_slowly(schedule, graphs)
        memory, drafts = self.lane(0), list(chain.from_iterable(schedule.drafts))
        place, there = memory.place(num, num), self._verifications.get(num)
        if there is None:
            lay_out = self.batch.layout(place.tokens_FT, place.sequences_FB[KV_LENS], memory.tables)
            there = _Verification(lay_out, tuple(range(num + 1)), self._every_row[:num], {})
            self._verifications[num] = there
        rows_T, behind_T, starts, rows_S, columns, room = there.lay_out(
            schedule.rows, schedule.starts, schedule.counts, drafts, num
        )
        assert columns >= 0, "a schedule computes tokens that are not known yet"
        tables = there.tables.get(columns)
        if tables is None:
            tables = there.tables[columns] = [table[:num, :columns] for table in memory.tables]
        step = self._input(place, tables, there.query_starts, behind_T.tolist(), num, there.every_row)
        return self._verifying(schedule, graphs, step, rows_T, behind_T, Verified(starts, rows_S, room))

    def _verify_slowly(self, schedule: Schedule, graphs: Graphs) -> PreparedStep:
        """The same in numpy."""
        token_ids = self._rows.token_ids
        rows: list[int] = []
        positions: list[int] = []
        works = zip(schedule.rows, schedule.starts, schedule.counts, schedule.drafts, strict=True)
        for row, start, count, drafts in works:
            assert start < self._rows.known[row], "a schedule computes tokens that are not known yet"
            token_ids[row, start + 1 : start + count] = drafts
            rows += [row] * count
            positions += range(start, start + count)
        rows_T, positions_T = np.array(rows, dtype=np.int64), np.array(positions, dtype=np.int64)
        known = token_ids[rows_T, positions_T].astype(np.int64)
        step = self.decodes(0, rows_T, positions_T, known, self._every_row[: len(rows)])
        return self._verifying(schedule, graphs, step, rows_T, positions_T + 1, None)

    def _verifying(
        self,
        schedule: Schedule,
        graphs: Graphs,
        step: StepInput,
        rows_T: Ints,
        behind_T: Ints,
        verified: Verified | None,
    ) -> PreparedStep:
        entries = [entry for entry, count in enumerate(schedule.counts) for _ in range(count)]
        drafts_of = {entry: drafts for entry, drafts in enumerate(schedule.drafts) if drafts}
        return PreparedStep(
            (step,), graphs, step.logits_rows_P, len(schedule.rows), entries, rows_T, behind_T, (), None,
            drafts_of, (rows_T,), verified,
        )  # fmt: skip

    def _input(
        self,
        place: Place,
        tables: Sequence[Tensor],
        query_starts: tuple[int, ...],
        ends: Sequence[int],
        num_decodes: int,
        logits_rows_P: Tensor,
    ) -> StepInput:
        tokens, sequences = place.token_tensors, place.sequence_tensors
        return StepInput(
            tokens[TOKEN_IDS],
            tokens[POSITIONS],
            tokens[SLOTS],
            query_starts,
            tuple(ends),
            sequences[KV_LENS],
            tables[0],
            num_decodes,
            self._block_size,
            logits_rows_P,
            tuple(map(TableInput, tokens[SLOTS + 1 :], tables[1:])),
            StateInput(sequences[READS], sequences[WRITES]) if self.limits.has_state else None,
        )

    def _write_tables(self, memory: StepMemory, place: Place, rows_B: Ints, longest: int) -> Sequence[Tensor]:
        """Of each token group; a block behind a window is 0."""
        num_columns = -(-longest // self._block_size)
        return [
            memory.write_table(index, place, np.maximum(table[rows_B, :num_columns], 0))
            for index, table in enumerate(self._rows.tables)
        ]
