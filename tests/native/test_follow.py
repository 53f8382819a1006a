"""From a verification to the passes behind it: what the kernel writes is what follows from the tokens, one by one. And
how a verification is laid out: as numpy does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schedule import NewRow, Schedule
from engine.speculation.drafter import num_new
from engine.step_buffers import StepBuffers
from engine.step_memory import Limits
from front.params import SamplingParams
from native import Isa, best_isa
from native.drafts import BatchRows, follow

pytestmark = pytest.mark.skipif(best_isa() == Isa.NONE, reason="the native kernels were not built")
BLOCK, COLUMNS = 4, 12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 4), st.integers(0, 1000))
def test_any_runs(counts: list[int], passes: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    num, total = len(counts), sum(counts)
    table_RN = torch.randperm((num + 1) * COLUMNS, generator=gen).view(num + 1, COLUMNS)
    rows_S = torch.randperm(num + 1, generator=gen)[:num].contiguous()
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    begins_S = torch.randint(0, (COLUMNS - 3) * BLOCK, (num,), generator=gen)
    drawn_T, given_T = torch.randint(0, 2, (2, total), generator=gen)
    positions_T = torch.cat([begins_S[s] + torch.arange(count) for s, count in enumerate(counts)])
    places_S = torch.full((num,), -1)
    following = *torch.full((3, passes * num), -1), torch.full((num, COLUMNS), -1)
    step = drawn_T.contiguous(), given_T.contiguous(), positions_T
    token_ids, known = np.full((num + 1, COLUMNS * BLOCK + 1), -1, dtype=np.int32), np.zeros(num + 1, dtype=np.int64)
    batch = BatchRows(token_ids, known, known, [table_RN.numpy()], BLOCK, COLUMNS * BLOCK)
    follow(batch, step, starts, rows_S, table_RN, BLOCK, places_S, following if passes else None)
    for s, count in enumerate(counts):
        first = int(starts[s])
        drawn, drafts = drawn_T[first : first + count].tolist(), given_T[first + 1 : first + count].tolist()
        place = first + num_new(drawn, drafts) - 1
        assert places_S[s] == place
        begin, end = int(begins_S[s]) + 1, int(positions_T[place]) + 2
        assert token_ids[rows_S[s], begin:end].tolist() == drawn[: end - begin] and known[rows_S[s]] == end
        assert (token_ids[rows_S[s], end:] == -1).all()
        blocks = table_RN[rows_S[s]]
        for number in range(passes):
            position = int(positions_T[place]) + 1 + number
            slot = int(blocks[position // BLOCK]) * BLOCK + position % BLOCK
            assert [int(part[number * num + s]) for part in following[:3]] == [position, slot, position + 1]
            used = position // BLOCK + 1
            assert torch.equal(following[3][s, :used], blocks[:used])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=4), st.integers(1, 2))
def test_a_verification_is_laid_out_as_numpy_does_it(sequences: list[tuple[int, int]], num_tables: int) -> None:
    found = []
    for natively in (True, False):
        limits = Limits(5, 64, COLUMNS * BLOCK, BLOCK, num_tables, max_drafts=20)
        buffers = StepBuffers(limits, torch.device("cpu"))
        assert buffers.batch is not None
        if not natively:
            buffers.batch = None
        schedule = Schedule(0)
        for row, (length, num_drafts) in enumerate(sequences):
            tokens, params = [row + at for at in range(length)], SamplingParams(max_tokens=9)
            schedule.new_rows.append(NewRow(row, row, tokens, length, params, 0, ()))
            blocks = [[row * COLUMNS + at * table for at in range(9)] for table in range(1, num_tables + 1)]
            schedule.new_blocks.append((row, blocks))
            schedule.drafts.append([100 * row + at for at in range(num_drafts)])
        schedule.rows = list(range(len(sequences)))
        schedule.starts, schedule.samples = [length - 1 for length, _ in sequences], [True] * len(sequences)
        schedule.counts = [1 + num_drafts for _, num_drafts in sequences]
        prepared = buffers.fill(schedule)
        found.append((prepared, buffers))
    (ours, here), (theirs, there) = found
    (step,), (expected,) = ours.inputs, theirs.inputs
    names = ("token_ids_T", "positions_T", "slots_T", "kv_lens_B", "block_table_BN", "logits_rows_P")
    assert all(torch.equal(getattr(step, name), getattr(expected, name)) for name in names)
    assert (step.query_starts, step.kv_lens) == (expected.query_starts, expected.kv_lens)
    for one, other in zip(step.more_tables, expected.more_tables, strict=True):
        assert torch.equal(one.slots_T, other.slots_T) and torch.equal(one.block_table_BN, other.block_table_BN)
    assert (ours.entries_S, ours.drafts) == (theirs.entries_S, theirs.drafts)
    assert (ours.rows_S == theirs.rows_S).all() and (ours.positions_S == theirs.positions_S).all()
    assert (here.rows.token_ids == there.rows.token_ids).all()
    if ours.verified is not None:
        assert ours.verified.rows.tolist() == schedule.rows
        assert np.diff(ours.verified.starts).tolist() == schedule.counts
        assert ours.verified.room == min(9 * BLOCK - length - drafts for length, drafts in sequences)
