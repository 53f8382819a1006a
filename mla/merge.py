"""Joining attention over parts of the keys: each part gives its result and the log of its sum of exponentials.

Legend: any leading shape, Y width of a result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out_Y: Tensor, lse: Tensor, more_Y: Tensor, more_lse: Tensor) -> None:
    """Fold a further part into (out, lse), in place. out, lse, more_lse: float32 [...]; out, more: [..., Y].

    A part without visible keys has lse -inf and any finite result; at most one of the two may be such a part.
    """
    total = torch.logaddexp(lse, more_lse)
    out_Y.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(more_Y.float(), (more_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)
