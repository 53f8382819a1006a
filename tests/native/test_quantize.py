"""Weights of 8 and 4 bits by the native kernel are those of torch, to the bit, on every instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from isas import EVERY_ISA
from torch import Tensor

from moe_kernels.matrix import WeightFormat, dequantize_halves, quantize, quantize_halves
from native import Isa, isa, limit_isa
from native import quantize as native_quantize

pytestmark = pytest.mark.store

FORMS = [WeightFormat.FP8, WeightFormat.INT8]


@pytest.fixture(params=EVERY_ISA)
def level(request: pytest.FixtureRequest) -> Iterator[Isa]:
    before = isa()
    yield limit_isa(request.param)
    limit_isa(before)
    torch.set_num_threads(1)


def bits(weight: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    matrix = quantize(weight, form)
    return matrix.weight_OI.view(torch.uint8), matrix.scale


def by_torch(weight: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    before = isa()
    limit_isa(Isa.NONE)
    try:
        assert not native_quantize.can_run(weight)
        return bits(weight, form)
    finally:
        limit_isa(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_bits_of_torch(level: Isa, form: WeightFormat, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for num_outputs, num_inputs in ((128, 256), (1, 1), (5, 130), (257, 96), (40, 127), (300, 384)):
        for size in (1.0, 1e-3, 1e30, 1e-36):
            weight = (torch.randn(num_outputs, num_inputs, generator=generator) * size).to(dtype)
            weight[0, 0] = 0
            found, expected = bits(weight, form), by_torch(weight, form)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_every_number_of_bfloat16(level: Isa, form: WeightFormat) -> None:
    """Beside a largest one that makes the scale a round number, so that all ties occur."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= 448)]
    rows = torch.zeros(-(-len(numbers) // 96), 128, dtype=torch.bfloat16)
    for row, part in zip(rows, numbers.split(96), strict=True):
        row[: len(part)] = part
    rows[:, 127] = 448 if form is WeightFormat.FP8 else 508
    found, expected = bits(rows, form), by_torch(rows, form)
    assert torch.equal(found[1], expected[1]) and torch.equal(found[0], expected[0])


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_lie_apart(level: Isa, form: WeightFormat) -> None:
    """As those of one half of a fused matrix; and with more threads."""
    whole = torch.randn(260, 300, generator=torch.Generator().manual_seed(5)).bfloat16()
    part = whole[:, :200]
    assert native_quantize.can_run(part) and not native_quantize.can_run(whole.t())
    expected = by_torch(part, form)
    torch.set_num_threads(3)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(bits(part, form), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [WeightFormat.INT4, WeightFormat.MXFP4])
def test_4_bits_are_those_of_torch(level: Isa, form: WeightFormat, dtype: torch.dtype) -> None:
    """But for scales that lose the same, as nearly as the order of a sum matters."""
    generator = torch.Generator().manual_seed(3)
    for num_outputs, num_inputs in ((128, 256), (1, 1), (5, 130), (40, 127), (45, 384)):  # the last: cut within a row
        for size in (1.0, 1e-3, 1e-6, 1e4, 3e5):  # the last: INT4's scales are the largest of float16
            weight = (torch.randn(num_outputs, num_inputs, generator=generator) * size).to(dtype)
            weight[0, :32] = 0
            found = quantize_halves(weight, form)
            before = isa()
            limit_isa(Isa.NONE)
            expected = quantize_halves(weight, form)
            limit_isa(before)
            same_OG = found.scale_OG == expected.scale_OG
            assert same_OG.float().mean() > 0.95 or num_outputs == 1 or size > 1e5
            same_OI = same_OG.repeat_interleave(16, 1)
            assert torch.equal(found.codes[same_OI], expected.codes[same_OI])
            lost, least = (
                (dequantize_halves(matrix, torch.float32) - weight.float()).square().sum().item()
                for matrix in (found, expected)
            )
            assert lost <= least * (1 + 1e-4) + 1e-30
            largest = weight.abs().max().item()
            assert lost <= weight.numel() * (largest / 7) ** 2


@pytest.mark.parametrize("form", [*FORMS, WeightFormat.INT4, WeightFormat.MXFP4])
def test_what_is_no_number_is_seen(level: Isa, form: WeightFormat) -> None:
    """The scale of its group is none either, so that no output looks well."""
    weight = torch.randn(40, 384, generator=torch.Generator().manual_seed(6)).bfloat16()
    weight[7, 133] = torch.nan
    if form in FORMS:
        scale = quantize(weight, form).scale
        row, column = (7, 1) if form is WeightFormat.INT8 else (0, 1)
    else:
        scale = quantize_halves(weight, form).scale_OG.float()
        row, column = 7, 133 // 32
    assert scale[row, column].isnan() and scale.isnan().sum() == 1
