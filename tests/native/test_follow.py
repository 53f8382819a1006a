"""From a verification to the passes behind it: what the kernel writes is what follows from the tokens, one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.drafter import num_new
from native import Isa, best_isa
from native.drafts import follow

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
    follow(step, starts, rows_S, table_RN, BLOCK, places_S, following if passes else None)
    for s, count in enumerate(counts):
        first = int(starts[s])
        drawn, drafts = drawn_T[first : first + count].tolist(), given_T[first + 1 : first + count].tolist()
        place = first + num_new(drawn, drafts) - 1
        assert places_S[s] == place
        blocks = table_RN[rows_S[s]]
        for number in range(passes):
            position = int(positions_T[place]) + 1 + number
            slot = int(blocks[position // BLOCK]) * BLOCK + position % BLOCK
            assert [int(part[number * num + s]) for part in following[:3]] == [position, slot, position + 1]
            used = position // BLOCK + 1
            assert torch.equal(following[3][s, :used], blocks[:used])
