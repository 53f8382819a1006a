"""Root-mean-square normalisation, with the roundings of Hugging Face transformers.

Legend: T tokens, D the normalised dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import choice
from layers.linear import parameter
from native import rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, times weight. Shapes [..., D] and anything that broadcasts to it.

    The quotient is computed in float32 and rounded to x's dtype before the weight is applied: giving the weight to
    F.rms_norm rounds once less and differs from the originals in bfloat16.
    """
    if choice.on_gpu(x.device):
        norm: Callable[..., Tensor] = choice.triton_implementation("layers.triton.norm", "rms_norm")
        return norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)


def rms_norm_in_place(x_TD: Tensor, weight_D: Tensor, eps: float) -> None:
    """x becomes its `rms_norm`. Rows of x [T, D] may be apart."""
    if rows.can_run(x_TD):
        rows.rms_norm_in_place(x_TD, weight_D, eps)
    else:
        x_TD.copy_(rms_norm(x_TD, weight_D, eps))


class RMSNorm(nn.Module):
    """weight [D]."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter((size,), dtype, device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2 and x.stride(1) == 1 and rows.can_run(x):
            return rows.rms_norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """Add x to the residual stream *in place*, and return the norm of the sum."""
        if rows.can_run(residual_TD):
            return rows.add_rms_norm(x_TD, residual_TD, self.weight, self.eps)
        if choice.on_gpu(x_TD.device):
            add: Callable[..., Tensor] = choice.triton_implementation("layers.triton.norm", "add_rms_norm")
            return add(x_TD, residual_TD, self.weight, self.eps)
        return rms_norm(residual_TD.add_(x_TD), self.weight, self.eps)
