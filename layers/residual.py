"""Keeping the residual stream where it outlives this process (cache/residuals.py).

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from native import rows


def keep(residual_TD: Tensor, kept_TD: Tensor, layer: Tensor, number: int) -> None:
    """kept becomes the residual stream, and layer (int64 []) number; it is -1 while kept is written."""
    if rows.can_run(residual_TD):
        rows.keep(residual_TD, kept_TD, layer, number)
        return
    layer.fill_(-1)
    kept_TD.copy_(residual_TD)
    layer.fill_(number)
