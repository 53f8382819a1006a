"""Permutation and FP8 rows in Triton under whatever shapes and numbers hypothesis finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_inputs import routing
from triton_support import running

from moe_kernels import quant, tokens
from moe_kernels.triton import permute as triton_permute
from moe_kernels.triton import quant as triton_quant

pytestmark = pytest.mark.triton


@settings(max_examples=10, deadline=None)
@given(
    num_tokens=st.integers(0, 40), num_slots=st.integers(1, 9), first=st.integers(0, 8), seed=st.integers(0, 99),
    size=st.sampled_from([1, 7, 64]),
)  # fmt: skip
def test_tokens_and_back(num_tokens: int, num_slots: int, first: int, seed: int, size: int) -> None:
    """The pairs that are here, in the order of slots and tokens; and their weighted sums."""
    slot_TK, weight_TK = routing(num_tokens, 4, 9, seed)
    generator = torch.Generator().manual_seed(seed)
    x_TD, y_ND = (torch.randn(n, size, generator=generator) for n in (num_tokens, num_tokens * 4))
    expected, expected_N = tokens.take_rows(x_TD, slot_TK, first, num_slots)
    want = tokens.sum_pairs(y_ND, expected_N, weight_TK, torch.empty(num_tokens, size))
    with running(triton_permute):
        batch, row_N = triton_permute.take_rows(x_TD, slot_TK, first, num_slots)
        out = triton_permute.sum_pairs(y_ND, row_N, weight_TK, torch.empty(num_tokens, size))
    count = int(expected.rows_S.sum())
    assert torch.equal(batch.rows_S, expected.rows_S) and torch.equal(row_N, expected_N)
    assert torch.equal(batch.x[:count], expected.x[:count])
    torch.testing.assert_close(out, want)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 20), size=st.sampled_from([5, 128, 300]), exponent=st.integers(-30, 30), seed=st.integers(0, 99)
)
def test_fp8_rows_have_the_bits_of_torch(rows: int, size: int, exponent: int, seed: int) -> None:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    with running(triton_quant):
        value, scale = triton_quant.quantize_rows(x)
    expected = quant.quantize_rows(x)
    assert torch.equal(value.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])
