"""What the all-to-alls by collectives share: a lane's settings, and which rows belong to a token.

Legend: T tokens of this rank, D hidden size, M rows sent (at most one per token and rank).
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from ep.rows import make_rows
from moe_kernels import Bags, Layout

GroupT = TypeVar("GroupT")


class RowLane(Generic[GroupT]):
    """One lane. Every rank of the group makes its lanes, and uses them, in the same order."""

    layout = Layout.RAGGED

    def __init__(
        self, group: GroupT, num_slots: int, hidden_size: int, dtype: torch.dtype, rows: str = "plain"
    ) -> None:
        """dtype: of what experts give back; rows: how they travel to the experts (ep/rows.py)."""
        self._group = group
        self._num_slots = num_slots
        self._hidden_size, self._dtype = hidden_size, dtype
        self._rows = make_rows(rows, hidden_size, dtype)

    def close(self) -> None:
        """Nothing is held; the group is closed by its owner."""


def rank_bags(goes_TG: Tensor) -> Bags:
    """Which of the M rows belong to each token, in the order of ranks; rows lie by rank, then by token. goes_TG: bool,
    which ranks a token went to."""
    token_M = goes_TG.t().nonzero()[:, 1]
    copies_T = goes_TG.sum(1)
    ones_M = torch.ones(token_M.shape[0], device=goes_TG.device)
    return Bags(token_M.argsort(stable=True), ones_M, copies_T.cumsum(0).sub_(copies_T))
