"""Experts multiplied by DeepGEMM (github.com/deepseek-ai/DeepGEMM, 2.x): FP8 with 1x128 scales of rows and 128x128 of
weights, or bfloat16. Ragged rows go to its contiguous or its psum layout, padded ones to its masked one. The names are
those that upstream 2.6 to 2.8 and sgl-deep-gemm 0.1.5 to 0.2.5 share.

Legend: R rows arrived, S slots, C rows per padded slot, D hidden size, F expert width, M rows of the aligned layout,
B = ceil(D / 128), N = ceil(F / 128).
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from layers.optional import load
from moe_kernels.backends import PIP
from moe_kernels.choice import dequantize_rows, quantize_rows, silu_mul, silu_mul_quantize
from moe_kernels.layout import ExpertBatch, Layout

EXPECTED_ROWS = 64  # of a slot: a hint for the size of tiles where only the device knows


class _Aligned(Struct, frozen=True):
    """Where ragged rows lie when every slot begins at a multiple of the alignment. from_row: int64 [M], to_row: int64
    [R]; layout: the library's grouped_layout."""

    from_row_M: Tensor
    to_row_R: Tensor
    layout: Tensor


class DeepGemm:
    """Raises ImportError that names the line to type where it is not installed. capability: of the GPU; psum: ragged
    rows in the psum layout, whose description is one number per slot."""

    def __init__(self, capability: tuple[int, int], psum: bool = False) -> None:
        self._library: Any = load("deep_gemm", PIP["deepgemm"])
        self._psum = psum
        # Blackwell's kernels take scales as exponents alone (UE8M0).
        self.power_of_two_scales = capability >= (10, 0)

    def run_experts_fp8(
        self,
        batch: ExpertBatch,
        gate_up_S2FD: Tensor,
        gate_up_scale_S2NB: Tensor,
        down_SDF: Tensor,
        down_scale_SBN: Tensor,
    ) -> Tensor:
        """As moe_kernels.triton.fp8_experts.run_experts_fp8: bfloat16 in the layout of batch.x."""
        if not batch.x.numel():
            return torch.empty_like(batch.x, dtype=torch.bfloat16)
        gate_up, down = (gate_up_S2FD, gate_up_scale_S2NB), (down_SDF, down_scale_SBN)
        x, scale = self._rows_fp8(batch)
        if batch.layout is Layout.PADDED:
            mid = self._masked_fp8((x, scale), gate_up, batch.rows_S)
            return self._masked_fp8(self._halfway(mid, batch.rows_S), down, batch.rows_S)
        aligned = self._align(batch)
        x, scale = x.view(torch.uint8)[aligned.from_row_M].view(x.dtype), scale[aligned.from_row_M]
        mid = self._contiguous_fp8((x, scale), gate_up, aligned.layout)
        return self._contiguous_fp8(self._halfway(mid, None), down, aligned.layout)[aligned.to_row_R]

    def run_experts(self, batch: ExpertBatch, gate_up_S2FD: Tensor, down_SDF: Tensor) -> Tensor:
        """As moe_kernels.grouped_gemm.run_experts, in bfloat16."""
        x, library = batch.x, self._library
        if not x.numel():
            return torch.empty_like(x, dtype=gate_up_S2FD.dtype)
        if batch.scale is not None:
            x = dequantize_rows(x, batch.scale, gate_up_S2FD.dtype)
        if batch.layout is Layout.PADDED:
            for weight, act in ((gate_up_S2FD, silu_mul), (down_SDF, _nothing)):
                out = x.new_empty(*x.shape[:2], weight.shape[1])
                expected = max(1, min(x.shape[1], EXPECTED_ROWS))
                library.m_grouped_bf16_gemm_nt_masked(x.contiguous(), weight, out, batch.rows_S, expected)
                x = act(out)
            return x
        aligned = self._align(batch)
        x = x[aligned.from_row_M]
        for weight, act in ((gate_up_S2FD, silu_mul), (down_SDF, _nothing)):
            out = x.new_empty(x.shape[0], weight.shape[1])
            library.m_grouped_bf16_gemm_nt_contiguous(
                x.contiguous(), weight, out, aligned.layout, use_psum_layout=self._psum
            )
            x = act(out)
        return x[aligned.to_row_R]

    def _rows_fp8(self, batch: ExpertBatch) -> tuple[Tensor, Tensor]:
        x, scale = batch.x, batch.scale
        if scale is not None and not self.power_of_two_scales:
            return x.contiguous(), scale
        if scale is not None:
            x = dequantize_rows(x, scale, torch.bfloat16)
        value, scale = self._quantize(x.reshape(-1, x.shape[-1]))
        return value.view(batch.x.shape), scale.view(*batch.x.shape[:-1], scale.shape[-1])

    def _quantize(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        if self.power_of_two_scales:
            value, scale = self._library.utils.math.per_token_cast_to_fp8(x_RD, use_ue8m0=True)
            return value, scale
        return quantize_rows(x_RD)

    def _halfway(self, gate_up: Tensor, rows_S: Tensor | None) -> tuple[Tensor, Tensor]:
        """What goes into the second product."""
        if not self.power_of_two_scales:
            return silu_mul_quantize(gate_up, rows_S)
        hidden = silu_mul(gate_up)
        value, scale = self._quantize(hidden.reshape(-1, hidden.shape[-1]))
        return value.view(hidden.shape), scale.view(*hidden.shape[:-1], scale.shape[-1])

    def _contiguous_fp8(self, x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], layout: Tensor) -> Tensor:
        out = x[0].new_empty(x[0].shape[0], weight[0].shape[1], dtype=torch.bfloat16)
        self._library.m_grouped_fp8_fp4_gemm_nt_contiguous(x, weight, out, layout, use_psum_layout=self._psum)
        return out

    def _masked_fp8(self, x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], rows_S: Tensor) -> Tensor:
        capacity = x[0].shape[1]
        out = x[0].new_empty(*x[0].shape[:2], weight[0].shape[1], dtype=torch.bfloat16)
        self._library.m_grouped_fp8_fp4_gemm_nt_masked(x, weight, out, rows_S, max(1, min(capacity, EXPECTED_ROWS)))
        return out

    def _align(self, batch: ExpertBatch) -> _Aligned:
        """Room for the worst case, so that nothing waits for the device."""
        size = self._library.get_mk_alignment_for_contiguous_layout()
        num_rows, num_slots = batch.x.shape[0], batch.rows_S.shape[0]
        room = -(-(num_rows + num_slots * (size - 1)) // size) * size
        rows_S = batch.rows_S.long()
        ends_S = rows_S.cumsum(0)
        aligned_ends_S = ((rows_S + size - 1) // size * size).cumsum(0)
        starts_S = ends_S - rows_S
        aligned_starts_S = aligned_ends_S - (rows_S + size - 1) // size * size
        place_M = torch.arange(room, device=rows_S.device)
        slot_M = torch.searchsorted(aligned_ends_S, place_M, right=True).clamp_max(num_slots - 1)
        offset_M = place_M - aligned_starts_S[slot_M]
        real_M = offset_M < rows_S[slot_M]
        from_row_M = torch.where(real_M, starts_S[slot_M] + offset_M, 0)
        row_R = torch.arange(num_rows, device=rows_S.device)
        slot_R = torch.searchsorted(ends_S, row_R, right=True).clamp_max(num_slots - 1)
        to_row_R = aligned_starts_S[slot_R] + row_R - starts_S[slot_R]
        layout = aligned_starts_S + rows_S if self._psum else torch.where(real_M, slot_M, -1)
        return _Aligned(from_row_M, to_row_R, layout.to(torch.int32))


def _nothing(x: Tensor) -> Tensor:
    return x
