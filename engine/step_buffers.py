"""The inputs of steps: the only place where a schedule's lists become tensors.

The buffers keep, for every row, the tokens of its sequence and the tables of its KV blocks (engine/batch_table.py).
`fill` lays a schedule out in the memory that steps are read from (engine/step_memory.py), or, where the same sequences
go on, only counts on what lies there. Only the device thread touches them, so the token that a row samples in step n
(`write_tokens`) stands here when step n+1 is laid out, though the scheduler, which made step n+1 in the meantime, has
not seen it. With `on_device` it stands on the device, and the host does not know it: what the host then lacks is one
token of each row that sampled, which is never computed together with others, so it is enough to keep the last one of
each row there.

A step may be laid out in parts, which the device computes in turn (dbo/split.py says where it is cut).

A new input of a step is a field of StepInput (layers/step.py) and one here: its padding in `lane`, its numbers in
`_part`, its tensor in `_input`.

Legend: T tokens of the step, B sequences, N blocks per sequence, P rows whose logits are wanted, S sequences sampled,
R rows of the batch, F rows whose token comes from the device.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from cache.residuals import Residuals, no_residuals
from cache.rows import CacheRows
from dbo.split import Cut, cut
from engine.batch_table import BatchTable
from engine.prepared import (
    Chooser,
    Graphs,
    GraphSize,
    Ints,
    PreparedStep,
    ScheduledTokens,
    prompt_parts,
    runs,
    spread,
)
from engine.schedule import Schedule
from engine.speculation.decode_buffers import DecodeBuffers
from engine.speculation.drafter import num_new
from engine.step_memory import Limits, StepMemory
from engine.step_parts import KV_LENS, POSITIONS, READS, SLOTS, TOKEN_IDS, WRITES, Run, StepPart, state_runs
from layers.step import StateInput, StepInput, TableInput


class StepBuffers(DecodeBuffers):
    """Memory on the host: 4 bytes per row and position."""

    def __init__(
        self,
        limits: Limits,
        device: torch.device,
        context_cost: float = 0.0,
        on_device: bool = False,
        rows: CacheRows | None = None,
        residuals: Residuals | None = None,
    ) -> None:
        """context_cost: of a token's work, for cutting steps (dbo/split.py). on_device: sampled tokens stay on the
        device; else the host has each before the next step is laid out. rows: as DecodeBuffers has it. residuals: is
        told of which tokens it is; None: nobody wants to know."""
        super().__init__(limits, device, rows)
        self._residuals = residuals or no_residuals()
        self._context_cost = context_cost
        self._last_R: Tensor | None = None
        if on_device:
            self._last_R = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        self._fed: list[tuple[Tensor, Tensor, Tensor]] = []  # token ids, rows whose last ones, and their places
        self._run: Run | None = None
        self._nothing: PreparedStep | None = None  # a step without tokens, which is always the same

    @property
    def rows(self) -> BatchTable:
        """Up to date."""
        self._flush()
        return self._rows

    # ---- steps ----

    def fill(self, schedule: Schedule, num_ubatches: int = 1, choose: Chooser | None = None) -> PreparedStep:
        """Take over the schedule's rows and blocks, and lay its work out, in so many parts (zero tokens are fine). What
        it returns may be read until the next call. choose: says which graphs parts are laid out for."""
        self._rows.begin_states(schedule)
        run = self._run
        if run is not None and num_ubatches == 1 and self._goes_on(run, schedule):
            graphs = _chosen(choose, [len(run.rows)], [True])
            if graphs == run.prepared.graphs:
                return self._advance(run, schedule)
        self._flush()
        self._run = None
        self._rows.take_over(schedule)
        self._residuals.clear()
        if not schedule.rows and num_ubatches == 1:
            self._fed.clear()
            if self._nothing is None or self._nothing.graphs != _chosen(choose, [0], [True]):
                self._nothing = self._lay_out(schedule, 1, choose)
            return self._nothing
        if num_ubatches == 1 and self._only_verifies(schedule):
            graphs = _chosen(choose, [schedule.num_tokens], [True])
            if graphs[0] is None or graphs[0].rows == schedule.num_tokens:
                prepared = self.verify(schedule, graphs)
                self._tell(prepared, schedule)
                return prepared
        self._rows.begin(schedule)
        prepared = self._lay_out(schedule, num_ubatches, choose)
        if num_ubatches == 1:
            self._tell(prepared, schedule)
        for index in range(num_ubatches):
            self.lane(index).send()
        self._feed()
        return prepared

    def _tell(self, prepared: PreparedStep, schedule: Schedule) -> None:
        """Whoever keeps the residual stream, which tokens are the step's."""
        residuals, num_tokens = self._residuals, schedule.num_tokens
        if num_tokens > residuals.num_tokens:
            return
        if prepared.verified is not None:  # entry by entry, each with its known token first
            firsts = [0, *accumulate(schedule.counts)][:-1]
            residuals.begin(self._rows.stays_of(schedule.rows), schedule.starts, 1, firsts)
            return
        (step,), (rows_B,) = prepared.inputs, prepared.rows_B
        counts_B = np.diff(step.query_starts)
        pieces_4B = np.array([rows_B, np.array(step.kv_lens) - counts_B, counts_B, step.query_starts[:-1]])
        if schedule.drafts:  # they come behind the first piece of their row
            pieces_4B = pieces_4B[:, np.sort(np.unique(rows_B, return_index=True)[1])]
        residuals.begin(self._rows.stays_of(pieces_4B[0]), *pieces_4B[1:])

    def computed(self, schedule: Schedule) -> None:
        """The step's forward pass is over, and what it has heard of other ranks was whole."""
        self._rows.end_states(schedule)

    def write_tokens(self, prepared: PreparedStep, token_ids_S: Tensor) -> None:
        """The sampled tokens (int64 [S], on the device) are where the next step finds them."""
        tokens_S = None if self._last_R is not None else token_ids_S.numpy()
        if self._last_R is not None:
            assert prepared.device_rows_S is not None
            self._last_R.index_copy_(0, prepared.device_rows_S, token_ids_S)
        if self._run is not None and self._run.prepared is prepared:
            self._run.write(tokens_S)
            return
        rows_S, positions_S = prepared.rows_S, prepared.positions_S
        if tokens_S is not None:
            self._rows.token_ids[rows_S, positions_S] = tokens_S
        if prepared.drafts is None:
            self._rows.known[rows_S] = positions_S + 1
            return
        for first, drawn, drafts in runs(prepared, token_ids_S.tolist()):
            self._rows.known[rows_S[first]] = positions_S[first] + num_new(drawn, drafts)

    def _only_verifies(self, schedule: Schedule) -> bool:
        """Whether all entries decode, and some have drafts."""
        if not schedule.drafts or self.limits.has_state or self._last_R is not None:
            return False
        return schedule.num_tokens == len(schedule.rows) + schedule.num_drafts and all(schedule.samples)

    # ---- the same sequences go on ----

    def _goes_on(self, run: Run, schedule: Schedule) -> bool:
        """Whether that schedule computes the next token of each, and nothing else."""
        same = run.written and schedule.rows == run.rows and schedule.starts == run.ends
        more = schedule.freed_rows or schedule.new_rows or schedule.drafts or any(schedule.state_kept)
        return same and not more

    def _advance(self, run: Run, schedule: Schedule) -> PreparedStep:
        """Most steps are such steps, and to lay one out in full takes thirty operations on small arrays. Each comes
        from memory anew, because the forward pass has just swept every cache with weights."""
        last, place, memory = run.prepared, run.place, self.lane(0)
        (step,) = last.inputs
        num = len(run.rows)
        np.add(place.counters_FB, 1, out=place.counters_FB)
        ends_B = run.lens_B.copy()
        run.ends = ends_B.tolist()
        run.left -= 1
        self._residuals.advance()
        if schedule.new_blocks:
            self._rows.take_blocks(schedule.new_blocks)
        if run.left < 0:
            self._flush()
            self._enter_blocks(run)
        # Blocks may have come long before the first of their tokens.
        if schedule.new_blocks or run.tables[0].shape[1] * self._block_size < max(run.ends):
            run.tables = self._write_tables(memory, place, last.rows_S, max(run.ends))
        if self.limits.has_state:
            place.sequences_FB[[READS, WRITES], :num] = schedule.state_reads, schedule.state_writes
        memory.send()
        if self._last_R is not None:
            assert last.device_rows_S is not None
            torch.index_select(self._last_R, 0, last.device_rows_S, out=place.token_tensors[TOKEN_IDS])
        following = self._input(place, run.tables, step.query_starts, run.ends, num, step.logits_rows_P)
        run.written = False
        rows_S, there = last.rows_S, last.device_rows_S
        run.prepared = PreparedStep(
            (following,), last.graphs, step.logits_rows_P, num, last.entries_S, rows_S, ends_B, (), there
        )
        return run.prepared

    def _flush(self) -> None:
        """Bring the table of the batch up to date. It lies further off than what the next step reads."""
        run = self._run
        if run is not None and run.num_written:
            rows_B, count = run.prepared.rows_S, run.num_written
            if run.sampled:
                self._rows.token_ids[rows_B, run.first_B + np.arange(count)[:, None]] = run.sampled
            run.first_B = run.first_B + count
            self._rows.known[rows_B] = run.first_B
            run.num_written = 0
            run.sampled.clear()

    def _enter_blocks(self, run: Run) -> None:
        """The slots of sequences that have come to their next block do not follow from the last ones."""
        num = len(run.rows)
        tokens_FT, rows_B = run.place.tokens_FT[:, :num], run.prepared.rows_S
        columns_B, offsets_B = np.divmod(tokens_FT[POSITIONS], self._block_size)
        for index, table in enumerate(self._rows.tables):
            tokens_FT[SLOTS + index] = table[rows_B, columns_B] * self._block_size + offsets_B
        run.left = self._block_size - 1 - int(offsets_B.max())

    # ---- what graphs are captured with ----

    def widened(self, step: StepInput, lane: int) -> StepInput:
        """A step of that lane with tables of all columns, as later steps of its size may have."""
        first, *more = [table[: step.num_sequences] for table in self.lane(lane).tables]
        tables = [TableInput(old.slots_T, table) for old, table in zip(step.more_tables, more, strict=True)]
        return replace(step, block_table_BN=first, more_tables=tuple(tables))

    def scratch_step(self, lane: int, rows: int, full: bool) -> StepInput:
        """As many decodes that see nothing but the scratch block. full: kv_lens on the host are the most that may
        come: kernels take them as a bound, and the truth from kv_lens_B. Else the pass is captured without what reads
        sequences."""
        memory, limits = self.lane(lane), self.limits
        place = memory.scratch(rows, rows if full else 0)
        if full:
            tables = [table[:rows] for table in memory.tables]
            lens, lens_B = (limits.max_model_len,) * rows, place.sequence_tensors[KV_LENS]
        else:
            lens, lens_B = (1,) * rows, torch.ones(rows, dtype=torch.int64, device=self.device)
            tables = [lens_B[:, None] * block for block in limits.scratch]
        starts = tuple(range(rows + 1))
        step = self._input(place, tables, starts, lens, rows, place.token_tensors[POSITIONS][:0])
        if full or not limits.has_state:
            return replace(step, kv_lens_B=lens_B)
        return replace(step, kv_lens_B=lens_B, state=StateInput(lens_B * 0, lens_B * limits.scratch_record))

    # ---- a step in full ----

    def _lay_out(self, schedule: Schedule, num_ubatches: int, choose: Chooser | None) -> PreparedStep:
        num_entries = len(schedule.rows)
        whole = ScheduledTokens(
            np.arange(num_entries),
            np.array(schedule.rows, dtype=np.int64),
            np.array(schedule.starts, dtype=np.int64),
            np.array(schedule.counts, dtype=np.int64),
            np.array(schedule.samples, dtype=bool),
            np.ones(num_entries, dtype=bool),
        )
        self._drafts_E = np.array([len(drafts) for drafts in schedule.drafts], dtype=np.int64)
        for entry, drafts in enumerate(schedule.drafts):
            first = schedule.starts[entry] + 1
            self._rows.token_ids[schedule.rows[entry], first : first + len(drafts)] = drafts
        records = schedule.state_reads, schedule.state_writes, schedule.state_kept or [0] * len(schedule.state_reads)
        self._records_3E = np.array(records, dtype=np.int64)
        self._has_runs = self.limits.has_state and (bool(schedule.drafts) or bool(self._records_3E[2].any()))
        works = [whole]
        if num_ubatches > 1:
            cuts = cut(schedule.starts, schedule.counts, num_ubatches, self._context_cost)
            if schedule.drafts:  # they are sampled together
                cuts = [Cut(one.entry, 0) if one.tokens and schedule.drafts[one.entry] else one for one in cuts]
            bounds = [Cut(0, 0), *cuts, Cut(num_entries, 0)]
            works = [whole.between(first, last) for first, last in pairwise(bounds)]
        works = [work.verified(self._drafts_E) for work in works]
        counts = [int(work.counts_B.sum()) for work in works]
        decodes = [len(w.counts_B) == count and not self._has_runs for w, count in zip(works, counts, strict=True)]
        graphs = _chosen(choose, counts, decodes)
        self._fed.clear()
        parts = [
            self._part(self.lane(index), work, graph)
            for index, (work, graph) in enumerate(zip(works, graphs, strict=True))
        ]
        prepared = self._join(parts, graphs, schedule)
        if prepared.num_sampled and prepared.samples_all and not prepared.prompt_parts and prepared.drafts is None:
            self._run = Run(prepared, parts[0], schedule.rows)
        return prepared

    def _join(self, parts: list[StepPart], graphs: Graphs, schedule: Schedule) -> PreparedStep:
        memory = self.lane(0)
        if len(parts) == 1:
            (part,) = parts
            entries_S, rows_S, positions_S, logits_rows_P = part[2], part[3], part[4], part.step.logits_rows_P
        else:
            first_T = np.cumsum([0, *(part.step.num_tokens for part in parts[:-1])])
            logits = [part.logits_P + first for part, first in zip(parts, first_T, strict=True)]
            drawn = [rows_P[: len(part.rows_S)] for part, rows_P in zip(parts, logits, strict=True)]
            prompts = [rows_P[len(part.rows_S) :] for part, rows_P in zip(parts, logits, strict=True)]
            logits_rows_P = memory.more(np.concatenate(drawn + prompts))
            entries_S, rows_S, positions_S = (np.concatenate([part[i] for part in parts]) for i in (2, 3, 4))
        return PreparedStep(
            tuple(part.step for part in parts),
            graphs,
            logits_rows_P,
            len(schedule.rows),
            entries_S.tolist(),
            rows_S,
            positions_S,
            prompt_parts([one for part in parts for one in part.asked], len(entries_S)),
            None if self._last_R is None else memory.more(rows_S),
            {entry: drafts for entry, drafts in enumerate(schedule.drafts) if drafts} or None,
            tuple(part.rows_B for part in parts),
        )

    def _part(self, memory: StepMemory, work: ScheduledTokens, graph: GraphSize | None) -> StepPart:
        work, num_decodes = work.ordered()
        rows_B, starts_B = work.rows_B, work.starts_B
        ends_B = starts_B + work.counts_B
        guessed_B = self._drafts_E[work.entry_B] if len(self._drafts_E) else 0  # tokens that are drafts
        assert (ends_B <= self._rows.known[rows_B] + guessed_B).all(), (
            "a schedule computes tokens that are not known yet"
        )
        row_T, position_T, query_ends_B = spread(work, num_decodes)
        num_tokens, num_sequences = len(row_T), len(rows_B)
        place = memory.place(num_tokens, num_sequences, 0 if graph is None else graph.rows)
        tokens_FT, sequences_FB = place.tokens_FT[:, :num_tokens], place.sequences_FB[:, :num_sequences]
        columns_T, offsets_T = np.divmod(position_T, self._block_size)
        tokens_FT[TOKEN_IDS] = self._rows.token_ids[row_T, position_T]
        tokens_FT[POSITIONS] = position_T
        for index, table in enumerate(self._rows.tables):
            tokens_FT[SLOTS + index] = table[row_T, columns_T] * self._block_size + offsets_T
        sequences_FB[KV_LENS] = ends_B
        if self.limits.has_state:
            # A sequence that is cut begins its second part with what the first has left in the record that it writes.
            reads_B, writes_B, _ = self._records_3E[:, work.entry_B]
            sequences_FB[READS], sequences_FB[WRITES] = np.where(work.begins_B, reads_B, writes_B), writes_B
        memory.pad(place)
        ends = ends_B.tolist()
        tables = self._write_tables(memory, place, rows_B, max(ends, default=0))
        sampled_S = np.flatnonzero(work.samples_B)
        asked, logits_P = self._rows.ask(work, query_ends_B, query_ends_B[sampled_S] - 1)
        starts = (0, *query_ends_B.tolist())
        step = self._input(place, tables, starts, ends, num_decodes, memory.more(logits_P))
        if self._has_runs:
            assert step.state is not None
            runs = state_runs(work, query_ends_B, self._records_3E, self._drafts_E)
            step = replace(step, state=step.state._replace(runs=runs))
        if self._last_R is not None:
            self._note_fed(memory, step.token_ids_T, rows_B[:num_decodes], starts_B[:num_decodes])
        entries_S = work.entry_B[sampled_S]
        return StepPart(step, place, entries_S, rows_B[sampled_S], ends_B[sampled_S], logits_P, asked, tables, rows_B)

    def _note_fed(self, memory: StepMemory, token_ids_T: Tensor, rows_B: Ints, starts_B: Ints) -> None:
        """Of the entries of one token, those that no NewRow has stated come from the device: what is sampled is
        computed alone."""
        places_F = np.flatnonzero(starts_B >= self._rows.stated[rows_B])
        if len(places_F):
            self._fed.append((token_ids_T, memory.more(rows_B[places_F]), memory.more(places_F)))

    def _feed(self) -> None:
        """Queued on the device, in the order of the calls."""
        for token_ids_T, rows_F, places_F in self._fed:
            assert self._last_R is not None
            last_F = self._last_R.index_select(0, rows_F)
            token_ids_T.index_copy_(0, places_F, last_F)


def _chosen(choose: Chooser | None, counts: list[int], decodes: list[bool]) -> Graphs:
    return [None] * len(counts) if choose is None else choose(counts, decodes)
