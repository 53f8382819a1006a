"""What packed experts keep: read back, moved between slots and ranks, quantised.

Legend: S slots, D hidden size, F expert width, R rows, B bytes.
"""

from __future__ import annotations

import pytest
import torch
from isas import ISAS
from packed_inputs import DTYPES, FP8, INT8, PLAIN, SIZES, matrices, packed, rounded

from moe_kernels import ExpertBatch, Layout, WeightFormat
from moe_kernels.matrix import dequantize, quantize
from moe_kernels.packed import PackedExperts

pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not there")


@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_packed_can_be_read_back(dtype: torch.dtype, hidden: int, width: int) -> None:
    for form in WeightFormat:
        ours = PackedExperts(2, hidden, width, dtype, form)
        given = matrices(hidden, width, dtype, 9)
        ours.clear(0)
        ours.fill(1, *given)
        if form is not PLAIN:
            given = tuple(rounded(*each).to(dtype) for each in zip(given, form.parts, strict=True))  # type: ignore[assignment]
        for slot, expected in enumerate(([torch.zeros_like(matrix) for matrix in given], given)):
            for read, matrix in zip(ours.read(slot), expected, strict=True):
                assert torch.equal(read, matrix)


def test_slots_of_many_pages_in_any_order() -> None:
    """Bringing memory in does not touch what is there already."""
    ours = PackedExperts(5, 1024, 400, torch.bfloat16, PLAIN)
    given = {slot: matrices(1024, 400, torch.bfloat16, slot) for slot in (1, 4, 0, 2, 3)}
    for slot, expert in given.items():
        ours.fill(slot, *expert)
    ours.clear(2)
    for slot, expert in given.items():
        for read, matrix in zip(ours.read(slot), expert, strict=True):
            assert torch.equal(read, matrix if slot != 2 else torch.zeros_like(matrix))


def test_a_slot_is_all_in_its_bytes() -> None:
    """What a move between ranks copies is enough."""
    for form in WeightFormat:
        here, _ = packed(3, 70, 33, torch.bfloat16, form)
        there = PackedExperts(2, 70, 33, torch.bfloat16, form)
        there.clear(1)
        for source, target in zip(here.storage(2), there.storage(0), strict=True):
            assert source.is_contiguous() and target.is_contiguous()
            target.copy_(source)
        x_RD = torch.randn(5, 70).bfloat16()
        rows_at_2 = ExpertBatch(Layout.RAGGED, x_RD, torch.tensor([0, 0, 5], dtype=torch.int32))
        rows_at_0 = ExpertBatch(Layout.RAGGED, x_RD, torch.tensor([5, 0], dtype=torch.int32))
        assert torch.equal(here.run_rows(rows_at_2), there.run_rows(rows_at_0))


@pytest.mark.parametrize("form", [FP8, INT8], ids=lambda form: form.value)
def test_quantised_weights_are_near(form: WeightFormat) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] = 0
    matrix = quantize(weight, form)
    error = (dequantize(matrix, torch.float32) - weight).abs()
    step = 2.0**-4 * weight.abs() if form is FP8 else 0.0
    assert (error <= step + weight.abs().max() / 250).all()
    assert (dequantize(matrix, torch.float32)[:128, :128] == 0).all()


def test_a_checkpoints_fp8_stays_as_it_is() -> None:
    ours = PackedExperts(1, 140, 130, torch.bfloat16, FP8)
    given = [quantize(matrix, FP8) for matrix in matrices(140, 130, torch.float32, 3)]
    ours.fill_scaled(0, *given)
    for read, matrix in zip(ours.read(0), given, strict=True):
        assert torch.equal(read, dequantize(matrix, torch.bfloat16))
    assert ours.packed_SB.numel() < 1.25 * 3 * 140 * 130 * 1.3
