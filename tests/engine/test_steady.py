"""Decode steps that are laid out by counting on, against steps that are laid out in full."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.prepared import PreparedStep
from engine.schedule import NewRow, Schedule
from front.messages import SamplingParams

BLOCK = 4
MAX_LEN = 40
MAX_SEQS = 3
CPU = torch.device("cpu")


def new_row(row: int, tokens: list[int]) -> NewRow:
    return NewRow(row, row, list(tokens), len(tokens), SamplingParams(), seed=1, eos_token_ids=())


class Twins:
    """Two batches that see the same steps; the second never counts on, for somebody always looks at its table."""

    def __init__(self) -> None:
        self.batch = Batch(MAX_SEQS, MAX_LEN, BLOCK, CPU)
        self.plain = Batch(MAX_SEQS, MAX_LEN, BLOCK, CPU)
        self.lengths: dict[int, int] = {}
        self.num_blocks: dict[int, int] = {}
        self.num_steps = 0
        self.num_counted = 0

    def step(self, rows: list[int], new: list[NewRow], freed: list[int]) -> PreparedStep:
        schedule = Schedule(self.num_steps, freed_rows=freed, new_rows=new)
        self.num_steps += 1
        for row in freed:
            del self.lengths[row], self.num_blocks[row]
        for item in new:
            self.lengths[item.row], self.num_blocks[item.row] = len(item.token_ids), 0
        fresh = {item.row for item in new}
        for row in sorted(rows, key=lambda row: row in fresh):
            length = self.lengths[row]
            start = 0 if row in fresh else length - 1
            missing = -(-length // BLOCK) - self.num_blocks[row]
            if missing > 0:
                first = self.num_blocks[row] + 1
                schedule.new_blocks.append((row, [[100 * row + n for n in range(first, first + missing)]]))
                self.num_blocks[row] += missing
            schedule.rows.append(row)
            schedule.starts.append(start)
            schedule.counts.append(length - start)
            schedule.samples.append(True)
        self.plain._steady = None
        before = self.batch._steady
        prepared, full = self.batch.apply(schedule), self.plain.apply(schedule)
        self.num_counted += before is not None and self.batch._steady is before
        same(prepared, full)
        tokens = np.arange(len(rows), dtype=np.int64) + 10 * self.num_steps
        self.batch.note_sampled(prepared, tokens)
        self.plain.note_sampled(full, tokens)
        self.plain._settle()
        for row in rows:
            self.lengths[row] += 1
        return prepared

    def same_tables(self) -> None:
        assert self.batch.known.tolist() == self.plain.known.tolist()
        for row, known in enumerate(self.batch.known.tolist()):
            assert self.batch.token_ids[row, :known].tolist() == self.plain.token_ids[row, :known].tolist()


def same(prepared: PreparedStep, full: PreparedStep) -> None:
    (step,), (other,) = prepared.inputs, full.inputs
    for name in ("token_ids_T", "positions_T", "slots_T", "kv_lens_B", "block_table_BN", "logits_rows_P"):
        mine, theirs = getattr(step, name), getattr(other, name)
        assert mine.dtype is theirs.dtype and mine.is_contiguous() and mine.tolist() == theirs.tolist(), name
    for name in ("query_starts", "kv_lens", "num_decodes", "block_size"):
        assert getattr(step, name) == getattr(other, name), name
    assert prepared.num_entries == full.num_entries and prepared.entries_S == full.entries_S
    assert prepared.rows_S.tolist() == full.rows_S.tolist()
    assert prepared.positions_S.tolist() == full.positions_S.tolist()
    assert prepared.prompt_parts == full.prompt_parts == ()
    assert prepared.samples_all == full.samples_all


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_counting_on_gives_the_same_steps(data: st.DataObject) -> None:
    twins = Twins()
    twins.step([0, 1], [new_row(0, [1, 2, 3]), new_row(1, [4])], [])
    for _ in range(data.draw(st.integers(1, 25))):
        rows = sorted(twins.lengths)
        event = data.draw(st.sampled_from(["none"] * 6 + ["skip", "come", "go", "look", "return"]))
        new: list[NewRow] = []
        freed: list[int] = []
        if event == "skip" and len(rows) > 1:
            rows = rows[1:]
        elif event == "come" and len(rows) < MAX_SEQS:
            row = next(row for row in range(MAX_SEQS) if row not in rows)
            new = [new_row(row, list(range(50, 50 + data.draw(st.integers(1, 6)))))]
            rows.append(row)
        elif event == "go" and len(rows) > 1:
            freed = [rows.pop(0)]
        elif event == "look":
            twins.same_tables()
        elif event == "return" and rows:  # freed and taken again in one step
            freed, new = [rows[0]], [new_row(rows[0], [7, 8])]
        if max(twins.lengths.values()) >= MAX_LEN:
            break
        twins.step(rows, new, freed)
    twins.same_tables()


def test_most_steps_are_counted() -> None:
    twins = Twins()
    twins.step([0], [new_row(0, [1, 2, 3])], [])
    for _ in range(24):
        twins.step([0], [], [])
    assert twins.num_counted == 17  # of every four the one with a new block is laid out in full, and the first
    twins.same_tables()


def test_a_step_whose_tokens_never_came_is_not_counted_on() -> None:
    """It failed, and the same rows are computed again."""
    batch = Batch(1, MAX_LEN, 16, CPU)
    schedule = Schedule(0, new_rows=[new_row(0, [1, 2, 3])], new_blocks=[(0, [[5]])])
    schedule.rows, schedule.starts, schedule.counts, schedule.samples = [0], [0], [3], [True]
    batch.note_sampled(batch.apply(schedule), np.array([7]))
    decode = Schedule(1, rows=[0], starts=[3], counts=[1], samples=[True])
    batch.apply(decode)
    (again,) = batch.apply(decode).inputs
    assert again.token_ids_T.tolist() == [7] and again.positions_T.tolist() == [3] and again.slots_T.tolist() == [83]
    batch.note_sampled(batch.apply(decode), np.array([8]))
    (following,) = batch.apply(Schedule(2, rows=[0], starts=[4], counts=[1], samples=[True])).inputs
    assert following.token_ids_T.tolist() == [8] and following.positions_T.tolist() == [4]
    batch.apply(Schedule(3, rows=[0], starts=[4], counts=[1], samples=[True]))
    assert batch.known.tolist() == [5] and batch.token_ids[0, :5].tolist() == [1, 2, 3, 7, 8]
