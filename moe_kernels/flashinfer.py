"""Experts by FlashInfer's fused mixture of experts (`cutlass_fused_moe`, 0.6.18 to 0.7.2), in bfloat16 or with FP8
weights in 128x128 blocks. It sorts tokens by itself, so rows that arrive sorted go in as tokens with one expert each.

Its first matrix has the rows of up before those of gate: weights are kept that way.

Legend: S slots, D hidden size, F expert width, T tokens, K experts per token, R rows arrived, C rows per padded slot,
B = ceil(D / 128), N = ceil(F / 128).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layers.optional import load
from moe_kernels.backends import PIP
from moe_kernels.choice import dequantize_rows
from moe_kernels.expert_storage import ExpertWeights
from moe_kernels.fp8_experts import Fp8Experts
from moe_kernels.layout import ExpertBatch, Layout, TokenBatch
from moe_kernels.matrix import ScaledMatrix, WeightFormat, dequantize


class FlashInferExperts(ExpertWeights):
    """Raises ImportError that names the line to type where it is not installed."""

    def __init__(
        self, num_slots: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device, form: WeightFormat
    ) -> None:
        self._library: Any = load("flashinfer.fused_moe", PIP["flashinfer"])
        self.num_slots, self.format, self._dtype = num_slots, form, dtype
        self._scaled: Fp8Experts | None = None
        if form is WeightFormat.FP8:
            # Up goes where gate is elsewhere.
            self._scaled = Fp8Experts(num_slots, hidden, width, dtype, device, _no_product)
        else:
            self._up_gate_S2FD = torch.empty(num_slots, 2 * width, hidden, dtype=dtype, device=device)
            self._down_SDF = torch.empty(num_slots, hidden, width, dtype=dtype, device=device)

    def storage(self, slot: int) -> tuple[Tensor, ...]:
        if self._scaled is not None:
            return self._scaled.storage(slot)
        return self._up_gate_S2FD[slot], self._down_SDF[slot]

    def fill(self, slot: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        if self._scaled is not None:
            self._scaled.fill(slot, up_FD, gate_FD, down_DF)
            return
        for ours, given in zip(self.read(slot), (gate_FD, up_FD, down_DF), strict=True):
            ours.copy_(given)

    def fill_scaled(self, slot: int, gate_FD: ScaledMatrix, up_FD: ScaledMatrix, down_DF: ScaledMatrix) -> None:
        if self._scaled is not None:
            self._scaled.fill_scaled(slot, up_FD, gate_FD, down_DF)
            return
        self.fill(slot, *(dequantize(matrix, torch.float32) for matrix in (gate_FD, up_FD, down_DF)))

    def clear(self, slot: int) -> None:
        for tensor in self.storage(slot):
            tensor.view(torch.uint8).zero_()

    def read(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        if self._scaled is not None:
            up, gate, down = self._scaled.read(slot)
            return gate, up, down
        up_FD, gate_FD = self._up_gate_S2FD[slot].chunk(2)
        return gate_FD, up_FD, self._down_SDF[slot]

    def run_tokens(self, batch: TokenBatch) -> Tensor:
        slot_TK = batch.slot_TK - batch.first_slot
        here_TK = (slot_TK >= 0) & (slot_TK < self.num_slots)
        if batch.rows_PD is not None:  # every choice a token of its own
            token_P = here_TK.nonzero()[:, 0]
            slot_P1 = slot_TK[here_TK].unsqueeze(1)
            return self._run(batch.x_TD[token_P], slot_P1, torch.ones_like(slot_P1, dtype=torch.float32))
        weight_TK = torch.where(here_TK, batch.weight_TK, 0.0)
        return self._run(batch.x_TD, torch.where(here_TK, slot_TK, 0), weight_TK).to(batch.sum_dtype)

    def run_rows(self, batch: ExpertBatch) -> Tensor:
        x, shape = batch.x, batch.x.shape
        if batch.scale is not None:
            x = dequantize_rows(x, batch.scale, self._dtype)
        x_RD = x.reshape(-1, shape[-1])
        row_R = torch.arange(x_RD.shape[0], device=x.device)
        if batch.layout is Layout.PADDED:
            slot_R = row_R // max(1, shape[1])
            # Rows that do not count may hold anything; what they become does not matter.
        else:
            slot_R = torch.searchsorted(batch.rows_S.long().cumsum(0), row_R, right=True).clamp_max(self.num_slots - 1)
        ones_R1 = torch.ones(x_RD.shape[0], 1, dtype=torch.float32, device=x.device)
        return self._run(x_RD, slot_R[:, None], ones_R1).view(shape)

    def _run(self, x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """[T, D] in the dtype of the rows."""
        options: dict[str, Any] = {}
        if self._scaled is not None:
            first, second = self._scaled.gate_up_S2FD, self._scaled.down_SDF
            scales = [self._scaled.gate_up_scale_S2NB, self._scaled.down_scale_SBN]
            options = {"use_deepseek_fp8_block_scale": True}
        else:
            first, second, scales = self._up_gate_S2FD, self._down_SDF, []
        # Sums in an order of their own (use_fused_finalize) would differ from run to run, and a replayed request with
        # them.
        out_TD = torch.empty(x_TD.shape, dtype=self._dtype, device=x_TD.device)
        self._library.cutlass_fused_moe(
            x_TD.contiguous(), slot_TK.to(torch.int32), weight_TK, first, second, self._dtype, quant_scales=scales,
            output=out_TD, use_fused_finalize=False, **options,
        )  # fmt: skip
        return out_TD


def _no_product(batch: ExpertBatch, *matrices: Tensor) -> Tensor:
    raise AssertionError("FlashInferExperts multiplies by itself")
