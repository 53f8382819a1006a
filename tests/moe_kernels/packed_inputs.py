"""Packed experts, and the same in float64, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import WeightFormat
from moe_kernels.matrix import HALVES, dequantize, dequantize_halves, quantize, quantize_halves
from moe_kernels.packed import PackedExperts
from moe_kernels.weights import PlainExperts

DTYPES = [torch.float32, torch.bfloat16]
PLAIN, FP8, INT8 = WeightFormat.PLAIN, WeightFormat.FP8, WeightFormat.INT8
CPU = torch.device("cpu")

# Whole panels; odd sizes; less than a panel; more than a block of scales; one.
SIZES = [(128, 64), (70, 33), (7, 5), (300, 150), (1, 1)]

Matrices = tuple[Tensor, Tensor, Tensor]


def matrices(hidden: int, width: int, dtype: torch.dtype, seed: int) -> Matrices:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    gate, up, down = (torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in shapes)
    return gate.to(dtype), up.to(dtype), down.to(dtype)


def rounded(matrix: Tensor, form: WeightFormat) -> Tensor:
    """What it is where it is kept so, float32."""
    if form is WeightFormat.BF16:
        return matrix.bfloat16().float()
    if form in HALVES:
        return dequantize_halves(quantize_halves(matrix, form), torch.float32)
    return dequantize(quantize(matrix, form), torch.float32)


def packed(
    num_slots: int, hidden: int, width: int, dtype: torch.dtype, form: WeightFormat = PLAIN
) -> tuple[PackedExperts, PlainExperts]:
    """The same experts twice; the second in float64, with the weights that the first has after its rounding."""
    ours = PackedExperts(num_slots, hidden, width, dtype, form)
    ours.packed_SB.fill_(0xFF)  # NaN wherever packing writes nothing
    exact = PlainExperts(num_slots, hidden, width, torch.float64, CPU)
    for slot in range(num_slots):
        given = matrices(hidden, width, dtype, slot)
        ours.fill(slot, *given)
        if form is not PLAIN:
            given = tuple(map(rounded, given, form.parts))  # type: ignore[assignment]
        exact.fill(slot, *given)
    return ours, exact
