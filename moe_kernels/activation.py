"""What stands between an expert's two matrices, as a value."""

from __future__ import annotations

import math

import torch
from msgspec import Struct
from torch import Tensor

from moe_kernels.silu_mul import silu_mul


class Activation(Struct, frozen=True):
    """gate * sigmoid(alpha * gate) * (up + offset), of gates of at most `limit` and ups between -limit and limit. As it
    stands it is silu(gate) * up; gpt-oss has (1.702, 7, 1)."""

    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[..., 2F] -> [..., F], gates first, in gate_up's dtype. gate_up may be overwritten."""
        if self == SILU:
            return silu_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.offset)


SILU = Activation()


class ExpertKind(Struct, frozen=True):
    """How experts compute, beside their sizes. biased: both matrices have a bias."""

    activation: Activation = SILU
    biased: bool = False


GATED = ExpertKind()
