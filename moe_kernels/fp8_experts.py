"""Experts kept in FP8 as they are multiplied: e4m3 with a scale for 128 x 128 weights (DeepSeek-V3, arXiv:2412.19437,
3.3).

Legend: S slots, D hidden size, F expert width, B = ceil(D / 128), N = ceil(F / 128).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_kernels.expert_storage import ExpertWeights
from moe_kernels.layout import ExpertBatch
from moe_kernels.matrix import ScaledMatrix, WeightFormat, dequantize, quantize
from moe_kernels.quant import BLOCK, num_blocks

# (rows, gate_up [S, 2F, D], its scales [S, 2N, B], down [S, D, F], its scales [S, B, N]) -> rows of the same layout.
# The blocks of gate come first.
Fp8Product = Callable[[ExpertBatch, Tensor, Tensor, Tensor, Tensor], Tensor]


class Fp8Experts(ExpertWeights):
    """Uninitialised. product: multiplies. power_of_two_scales: what is
    filled in has scales that are powers of two (Blackwell's matrix units know no others); other scales are rounded
    up."""

    format = WeightFormat.FP8

    def __init__(
        self,
        num_slots: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        product: Fp8Product,
        power_of_two_scales: bool = False,
    ) -> None:
        self.num_slots, self.dtype, self._product = num_slots, dtype, product
        self._width, self._round_scales = width, power_of_two_scales
        n, b = num_blocks(width), num_blocks(hidden)
        self.gate_up_S2FD = torch.empty(num_slots, 2 * width, hidden, dtype=torch.float8_e4m3fn, device=device)
        self.gate_up_scale_S2NB = torch.empty(num_slots, 2 * n, b, dtype=torch.float32, device=device)
        self.down_SDF = torch.empty(num_slots, hidden, width, dtype=torch.float8_e4m3fn, device=device)
        self.down_scale_SBN = torch.empty(num_slots, b, n, dtype=torch.float32, device=device)

    def storage(self, slot: int) -> tuple[Tensor, ...]:
        return tuple(
            tensor[slot] for tensor in (self.gate_up_S2FD, self.gate_up_scale_S2NB, self.down_SDF, self.down_scale_SBN)
        )

    def fill(self, slot: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        device = self.down_SDF.device
        parts = [quantize(part.to(device).float(), WeightFormat.FP8) for part in (gate_FD, up_FD, down_DF)]
        self.fill_scaled(slot, *parts)

    def fill_scaled(self, slot: int, gate_FD: ScaledMatrix, up_FD: ScaledMatrix, down_DF: ScaledMatrix) -> None:
        by_blocks = all(matrix.scale_rows == BLOCK for matrix in (gate_FD, up_FD, down_DF))
        if gate_FD.format is not WeightFormat.FP8 or not by_blocks:
            self.fill(slot, *(dequantize(matrix, torch.float32) for matrix in (gate_FD, up_FD, down_DF)))
            return
        for (weight, scale), matrix in zip(self._parts(slot), (gate_FD, up_FD, down_DF), strict=True):
            weight.copy_(matrix.weight_OI)
            scale.copy_(matrix.scale)
            if self._round_scales:
                _round_scales(weight, scale)

    def clear(self, slot: int) -> None:
        for tensor in self.storage(slot):
            tensor.view(torch.uint8).zero_()

    def read(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = (dequantize(ScaledMatrix(*part), self.dtype) for part in self._parts(slot))
        return gate, up, down

    def run_rows(self, batch: ExpertBatch) -> Tensor:
        matrices = self.gate_up_S2FD, self.gate_up_scale_S2NB, self.down_SDF, self.down_scale_SBN
        return self._product(batch, *matrices).to(self.dtype)

    def _parts(self, slot: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """(weights, scales) of gate, up and down: views."""
        gate_up, gate_up_scale, down, down_scale = self.storage(slot)
        n = num_blocks(self._width)
        return (
            (gate_up[: self._width], gate_up_scale[:n]),
            (gate_up[self._width :], gate_up_scale[n:]),
            (down, down_scale),
        )


def _round_scales(weight_OI: Tensor, scale: Tensor) -> None:
    """Scales up to the next power of two, weights by as much down; in place."""
    exact = dequantize(ScaledMatrix(weight_OI, scale), torch.float32)
    scale.copy_(torch.exp2(scale.log2().ceil()))
    unit = dequantize(
        ScaledMatrix(torch.ones_like(weight_OI, dtype=torch.float32).to(torch.float8_e4m3fn), scale), torch.float32
    )
    weight_OI.copy_((exact / unit).to(torch.float8_e4m3fn))
