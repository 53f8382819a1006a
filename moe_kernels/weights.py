"""The weights of a rank's experts in one layer, and the arithmetic on them. The native kernels' form where they can run,
torch's otherwise.

Legend: S slots, D hidden size, F expert width, T tokens, R rows arrived, C rows per padded slot.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moe_kernels.choice import permute_some, run_experts, sum_rows
from moe_kernels.layout import ExpertBatch, TokenBatch
from moe_kernels.matrix import ScaledMatrix, WeightFormat, dequantize
from moe_kernels.packed import PackedExperts, can_pack


class ExpertWeights(Protocol):
    """Experts of rows in `dtype`, in S slots."""

    num_slots: int
    format: WeightFormat

    def storage(self, slot: int) -> tuple[Tensor, ...]:
        """Every tensor that makes up the expert of one slot, as contiguous views in the form in which it is kept: what a
        move to another rank's slot copies."""
        ...

    def fill(self, slot: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        """Put an expert into a slot; of any float dtype, converted (8 bits: rounded to the nearest)."""
        ...

    def fill_scaled(self, slot: int, gate_FD: ScaledMatrix, up_FD: ScaledMatrix, down_DF: ScaledMatrix) -> None:
        """The same from 8-bit weights, kept as they are where the format is the same."""
        ...

    def clear(self, slot: int) -> None:
        """Make a slot's weights zero."""
        ...

    def read(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """(gate [F, D], up [F, D], down [D, F]) of one slot in the rows' dtype; a copy or a view."""
        ...

    def run_rows(self, batch: ExpertBatch) -> Tensor:
        """Each slot's expert on its rows; the result has the layout of batch.x. PADDED: rows past a slot's count hold
        anything."""
        ...

    def run_tokens(self, batch: TokenBatch) -> Tensor:
        """[T, D]: the weighted sum of each token's experts that are here, summed in float32."""
        ...


def expert_weights(
    num_slots: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device, form: WeightFormat
) -> ExpertWeights:
    """Uninitialised. Where the native kernels cannot run, weights are kept in dtype whatever the form."""
    if can_pack(dtype, device):
        return PackedExperts(num_slots, hidden, width, dtype, form)
    return PlainExperts(num_slots, hidden, width, dtype, device)


class PlainExperts:
    """gate_up_S2FD [S, 2F, D] (gate rows first) and down_SDF [S, D, F], as torch multiplies them."""

    format = WeightFormat.PLAIN

    def __init__(self, num_slots: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self.gate_up_S2FD = torch.empty(num_slots, 2 * width, hidden, dtype=dtype, device=device)
        self.down_SDF = torch.empty(num_slots, hidden, width, dtype=dtype, device=device)

    def storage(self, slot: int) -> tuple[Tensor, ...]:
        return self.gate_up_S2FD[slot], self.down_SDF[slot]

    def fill(self, slot: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        for ours, given in zip(self.read(slot), (gate_FD, up_FD, down_DF), strict=True):
            ours.copy_(given)

    def fill_scaled(self, slot: int, gate_FD: ScaledMatrix, up_FD: ScaledMatrix, down_DF: ScaledMatrix) -> None:
        self.fill(slot, *(dequantize(matrix, torch.float32) for matrix in (gate_FD, up_FD, down_DF)))

    def clear(self, slot: int) -> None:
        for ours in self.storage(slot):
            ours.zero_()

    def read(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        gate_FD, up_FD = self.gate_up_S2FD[slot].chunk(2)
        return gate_FD, up_FD, self.down_SDF[slot]

    def run_rows(self, batch: ExpertBatch) -> Tensor:
        return run_experts(batch, self.gate_up_S2FD, self.down_SDF)

    def run_tokens(self, batch: TokenBatch) -> Tensor:
        rows, bags = permute_some(batch.x_TD, batch.slot_TK, batch.weight_TK, batch.first_slot, self.num_slots)
        return sum_rows(self.run_rows(rows), bags).to(batch.sum_dtype)
