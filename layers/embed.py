"""The table of token embeddings.

Legend: T tokens, S of them, V vocabulary, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers.linear import parameter
from native import rows


class Embedding(nn.Module):
    """weight [V, D]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter((vocab_size, hidden_size), dtype, device)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """int64 [T], each 0 <= id < V, -> [T, D], a fresh tensor."""
        if rows.can_run(self.weight):
            return rows.gather(self.weight, token_ids_T.contiguous())
        return F.embedding(token_ids_T, self.weight)


def take_rows(x_TD: Tensor, rows_S: Tensor) -> Tensor:
    """Those of the tokens at rows_S, int64: [S, D]."""
    return rows.gather(x_TD.contiguous(), rows_S) if rows.can_run(x_TD) else x_TD[rows_S]
