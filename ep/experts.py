"""The experts that live in the slots of one rank, in one MoE layer.

Legend: S slots of this rank, R rows arrived, C rows per padded slot, D hidden size, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_kernels import ExpertBatch, run_experts


class Experts(nn.Module):
    """gate_up_S2FD [S, 2F, D] (gate rows first) and down_SDF [S, D, F]; uninitialised until loaded."""

    def __init__(
        self,
        num_slots: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        gate_up = torch.empty(num_slots, 2 * intermediate_size, hidden_size, dtype=dtype, device=device)
        down = torch.empty(num_slots, hidden_size, intermediate_size, dtype=dtype, device=device)
        self.gate_up_S2FD = nn.Parameter(gate_up, requires_grad=False)
        self.down_SDF = nn.Parameter(down, requires_grad=False)

    @property
    def num_slots(self) -> int:
        return self.gate_up_S2FD.shape[0]

    def forward(self, batch: ExpertBatch) -> Tensor:
        """Each slot's expert on its rows; the result has the layout of batch.x (RAGGED [R, D], PADDED [S, C, D])."""
        return run_experts(batch, self.gate_up_S2FD, self.down_SDF)

    def slot_views(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """(gate [F, D], up [F, D], down [D, F]) of one slot: views for the loader to write into."""
        gate, up = self.gate_up_S2FD[slot].chunk(2)
        return gate, up, self.down_SDF[slot]

    def slot_storage(self, slot: int) -> tuple[Tensor, ...]:
        """Every tensor that makes up the expert of one slot, as contiguous views in the form in which it is kept: what a
        move to another rank's slot copies."""
        return self.gate_up_S2FD[slot], self.down_SDF[slot]
