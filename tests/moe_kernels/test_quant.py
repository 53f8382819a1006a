"""Rows in FP8 with a scale per block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import ExpertBatch, Layout, dequantize_rows, quantize_rows, run_experts


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    hidden=st.integers(1, 400),
    exponent=st.integers(-20, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_value_is_within_a_sixteenth_or_a_step_of_its_block(
    rows: int, hidden: int, exponent: int, dtype: torch.dtype
) -> None:
    x_RD = (torch.randn(rows, hidden, generator=torch.Generator().manual_seed(hidden)) * 2.0**exponent).to(dtype)
    value_RD, scale_RB = quantize_rows(x_RD)
    assert value_RD.dtype == torch.float8_e4m3fn and scale_RB.shape == (rows, -(-hidden // 128))
    back_RD = dequantize_rows(value_RD, scale_RB, torch.float32)
    step_RD = scale_RB.repeat_interleave(128, 1)[:, :hidden] * 2**-9  # the smallest subnormal of the format
    assert ((back_RD - x_RD.float()).abs() <= x_RD.float().abs() / 16 + step_RD).all()


def test_zeros_and_what_is_not_finite() -> None:
    x_RD = torch.zeros(3, 256)
    x_RD[1, 200], x_RD[2, 0] = float("nan"), float("inf")
    back_RD = dequantize_rows(*quantize_rows(x_RD), torch.float32)
    assert torch.equal(back_RD[0], x_RD[0])
    assert back_RD[1, 200].isnan() and not back_RD[1, :128].any() and back_RD[2, 0].isnan()


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
@torch.inference_mode()
def test_experts_on_rows_in_fp8(layout: Layout) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up_S2FD, down_SDF = torch.randn(3, 64, 160, generator=generator), torch.randn(3, 160, 32, generator=generator)
    shape = (12, 160) if layout is Layout.RAGGED else (3, 4, 160)
    value, scale = quantize_rows(torch.randn(12, 160, generator=generator))
    value, scale = value.view(shape), scale.view(*shape[:-1], 2)
    rows_S = torch.tensor([4, 4, 4], dtype=torch.int32)
    plain = ExpertBatch(layout, dequantize_rows(value, scale, torch.float32), rows_S)
    y = run_experts(ExpertBatch(layout, value, rows_S, scale), gate_up_S2FD, down_SDF)
    assert torch.equal(y, run_experts(plain, gate_up_S2FD, down_SDF))
