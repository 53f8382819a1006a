"""Permutation, activation and expert matrices equal the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_inputs import routing
from torch import Tensor

from moe_kernels import ExpertBatch, Layout, permute, permute_some, reference, run_experts, silu_mul, unpermute


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(0, 9),
    top_k=st.integers(1, 4),
    num_slots=st.integers(1, 6),
    num_ranks=st.integers(1, 3),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_permute_and_back(
    num_tokens: int, top_k: int, num_slots: int, num_ranks: int, seed: int, dtype: torch.dtype
) -> None:
    top_k = min(top_k, num_slots * num_ranks)
    slot_TK, weight_TK = routing(num_tokens, top_k, num_slots * num_ranks, seed)
    x_TD = torch.randn(num_tokens, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for rank in range(num_ranks):
        local_TK = slot_TK - rank * num_slots
        x_RD, rows_S, pair_R = reference.permute(x_TD, local_TK, num_slots)
        results = [permute_some(x_TD, slot_TK.to(torch.int32), weight_TK, rank * num_slots, num_slots)]
        if num_ranks == 1:
            results.append(permute(x_TD, slot_TK, weight_TK, num_slots))
        for batch, bags in results:
            assert batch.layout is Layout.RAGGED
            assert torch.equal(batch.x, x_RD)
            assert batch.rows_S.dtype == torch.int32 and torch.equal(batch.rows_S, rows_S)
            y_RD = batch.x * 2 + 1
            ours = unpermute(y_RD, bags, torch.full_like(x_TD, float("nan")))
            torch.testing.assert_close(ours, reference.unpermute(y_RD, pair_R, weight_TK, torch.empty_like(x_TD)))


def test_a_broken_row_stays_with_its_token() -> None:
    slot_TK = torch.tensor([[0, 5], [1, 0], [4, 5]])
    batch, bags = permute_some(torch.ones(3, 2), slot_TK, torch.ones(3, 2), 0, 4)
    y_RD = batch.x.clone()
    y_RD[0] = float("nan")
    out_TD = unpermute(y_RD, bags, torch.empty(3, 2))
    assert out_TD.isnan().any(1).tolist() == [True, False, False]
    assert out_TD[1:].tolist() == [[2, 2], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 3, 14).to(dtype)
    torch.testing.assert_close(silu_mul(gate_up.clone()), reference.silu_mul(gate_up))


def expert_weights(num_slots: int, hidden: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(num_slots, 2 * width, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(num_slots, hidden, width, generator=generator) * width**-0.5
    return gate_up.to(dtype), down.to(dtype)


# 12 and 20 are multiples of 16 bytes in float32 only; 6 and 9 in neither.
@pytest.mark.parametrize(("hidden", "width"), [(16, 8), (12, 20), (6, 16), (16, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[3, 0, 5, 1], [0, 0, 0, 1], [0, 0, 0, 0], [40, 0, 0, 2], [1, 1, 0, 0]])
def test_ragged_experts(hidden: int, width: int, dtype: torch.dtype, rows: list[int]) -> None:
    weights = expert_weights(len(rows), hidden, width, dtype)
    x_RD = torch.randn(sum(rows), hidden, generator=torch.Generator().manual_seed(4)).to(dtype)
    batch = ExpertBatch(Layout.RAGGED, x_RD, torch.tensor(rows, dtype=torch.int32))
    y_RD = run_experts(batch, *weights)
    assert y_RD.dtype == dtype
    torch.testing.assert_close(y_RD, reference.experts(batch, *weights))
    if dtype is torch.bfloat16:
        exact = reference.experts(
            ExpertBatch(Layout.RAGGED, x_RD.double(), batch.rows_S), *(weight.double() for weight in weights)
        )
        torch.testing.assert_close(y_RD.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_experts_ignore_what_lies_past_the_count(dtype: torch.dtype) -> None:
    rows = [3, 0, 5, 1]
    weights = expert_weights(4, 16, 8, dtype)
    x_SCD = torch.full((4, 5, 16), float("nan"), dtype=dtype)
    for slot, count in enumerate(rows):
        x_SCD[slot, :count] = torch.randn(count, 16, generator=torch.Generator().manual_seed(slot)).to(dtype)
    batch = ExpertBatch(Layout.PADDED, x_SCD, torch.tensor(rows, dtype=torch.int32))
    y_SCD, expected_SCD = run_experts(batch, *weights), reference.experts(batch, *weights)
    for slot, count in enumerate(rows):
        torch.testing.assert_close(y_SCD[slot, :count], expected_SCD[slot, :count])


def test_padded_without_any_row() -> None:
    batch = ExpertBatch(Layout.PADDED, torch.empty(4, 0, 16), torch.zeros(4, dtype=torch.int32))
    assert run_experts(batch, *expert_weights(4, 16, 8, torch.float32)).shape == (4, 0, 16)
