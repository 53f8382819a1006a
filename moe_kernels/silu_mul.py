"""The activation between an expert's two matrices.

Legend: F expert width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2F] -> [..., F]: silu(first half) * second half, in gate_up's dtype. gate_up is overwritten."""
    width = gate_up.shape[-1] // 2
    return F.silu(gate_up.narrow(-1, 0, width), inplace=True).mul_(gate_up.narrow(-1, width, width))
