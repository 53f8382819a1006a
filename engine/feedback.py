"""The token that each row has sampled last, where the next step takes it from without the host having seen it.

A step on a GPU is prepared and queued while the one before still runs. What the host then does not know of it is one
token of each row that sampled, which is never computed together with others: so it is enough to keep the last of each
row on the device, and to lay it into the next step's tokens there.

Legend: R rows of the batch, S sequences sampled, T tokens of a step, F of them taken from here.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Feedback:
    """Everything is queued on the device, in the order of the calls."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._last_R = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def keep(self, rows_S: Tensor, token_ids_S: Tensor) -> None:
        """int64 [S] both: what these rows have sampled."""
        self._last_R.index_copy_(0, rows_S, token_ids_S)

    def fill(self, token_ids_T: Tensor, rows_F: Tensor, places_F: Tensor | None) -> None:
        """Lay the last tokens of these rows to those places of the step, in place. None: they are the first."""
        if places_F is None:
            torch.index_select(self._last_R, 0, rows_F, out=token_ids_T[: rows_F.shape[0]])
        else:
            token_ids_T.index_copy_(0, places_F, self._last_R.index_select(0, rows_F))
