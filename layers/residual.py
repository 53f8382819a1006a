"""Adding to the residual stream, and keeping it elsewhere.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from native import rows


def keep(residual_TD: Tensor, kept_TD: Tensor, layer: Tensor, number: int) -> None:
    """kept, which outlives this process (cache/residuals.py), becomes the residual stream, and layer (int64 []) number;
    it is -1 while kept is written."""
    if rows.can_run(residual_TD):
        rows.keep(residual_TD, kept_TD, layer, number)
        return
    layer.fill_(-1)
    kept_TD.copy_(residual_TD)
    layer.fill_(number)


def add(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """y += x, in place; y."""
    return rows.add(y_TD, x_TD) if rows.can_run(y_TD) else y_TD.add_(x_TD)


def copy(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """y = x, in place; y."""
    return rows.copy(y_TD, x_TD) if rows.can_run(y_TD) else y_TD.copy_(x_TD)
