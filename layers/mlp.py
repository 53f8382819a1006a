"""The gated feed-forward layer: down(silu(gate(x)) * up(x)).

Legend: T tokens, D hidden size, F width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import choice
from layers.linear import Linear, MergedLinear, parameter
from native import rows
from native.linear import linear


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(first half) * second half: [T, F]."""
    if rows.can_run(gate_up_T2F):
        return rows.silu_mul(gate_up_T2F)
    if choice.on_gpu(gate_up_T2F.device):
        fused: Callable[[Tensor], Tensor] = choice.triton_implementation("layers.triton.silu_mul", "silu_mul")
        return fused(gate_up_T2F)
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)


def sigmoid_gate(x_TF: Tensor, gate_T: Tensor) -> Tensor:
    """x * sigmoid(gate), in place; x. gate [T, F], or [T, 1]: a number for each token."""
    if rows.can_run(x_TF) and x_TF.is_contiguous() and gate_T.is_contiguous():
        return rows.sigmoid_gate(x_TF, gate_T)
    return x_TF.mul_(torch.sigmoid(gate_T))


class GatedMLP(nn.Module):
    """gate_up: rows of gate_proj, then of up_proj, [2F, D]; down [D, F]."""

    exchanges = False  # with other ranks

    def __init__(
        self, hidden_size: int, width: int, dtype: torch.dtype, device: torch.device, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = MergedLinear(hidden_size, {"gate_proj": width, "up_proj": width}, bias, dtype, device)
        self.down = Linear(width, hidden_size, bias, dtype, device)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.down(silu_mul(self.gate_up(x_TD)))
        return out_TD

    def steps(self, x_TD: Tensor, lane: int = 0) -> Generator[None, None, Tensor]:
        """The same as a sublayer, which never waits."""
        yield from ()
        out_TD: Tensor = self(x_TD)
        return out_TD


class WeightedMLP(GatedMLP):
    """The same, times sigmoid(gate(x)), a number for each token. gate [1, D]."""

    def __init__(
        self, hidden_size: int, width: int, dtype: torch.dtype, device: torch.device, bias: bool = False
    ) -> None:
        super().__init__(hidden_size, width, dtype, device, bias)
        self.gate = parameter((1, hidden_size), dtype, device)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD = super().forward(x_TD)
        return sigmoid_gate(out_TD, linear(x_TD, self.gate))
