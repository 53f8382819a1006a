"""How many tokens each logical expert received: what the balancer plans from. And how many rows each rank computed:
whether that came true.

Legend: L MoE layers, E logical experts, T tokens of a step, K experts per token, S slots of a rank, N steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Ids that one layer may hold back before they are counted: 512 KiB of int64.
_MAX_PENDING_IDS = 1 << 16


class ExpertLoad:
    """Tokens per logical expert and layer since the last reset, of the tokens that this rank routed.

    Recording keeps a reference to the routing result and counts many steps at once later, so that it costs a step
    next to nothing. The tensors handed to it must not be written to afterwards. Not safe to share between threads.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self._counts_LE = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._pending: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._num_pending = [0] * num_layers

    def record(self, layer: int, expert_TK: Tensor) -> None:
        """Count the ids of one step; expert_TK: int64 [T, K], 0 <= id < E."""
        self._pending[layer].append(expert_TK)
        self._num_pending[layer] += expert_TK.numel()
        if self._num_pending[layer] > _MAX_PENDING_IDS:
            self._fold(layer)

    def recorder(self, layer: int) -> Callable[[Tensor], None]:
        """`record` of one layer: what an MoE layer is handed."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}; it must be 0 to {self.num_layers - 1}")
        return functools.partial(self.record, layer)

    def window(self) -> npt.NDArray[np.int64]:
        """Counts since the last reset, int64 [L, E] (a copy)."""
        if len(set(self._num_pending)) == 1:
            self._fold_all()
        else:
            for layer in range(self.num_layers):
                self._fold(layer)
        return self._counts_LE.copy()

    def reset(self) -> None:
        """Begin a new window."""
        for pending in self._pending:
            pending.clear()
        self._num_pending = [0] * self.num_layers
        self._counts_LE[:] = 0

    def _fold_all(self) -> None:
        """The usual case, every layer has seen the same tokens: a few operations for all layers together."""
        pieces = [ids_TK for pending in self._pending for ids_TK in pending]
        if not pieces:
            return
        ids_LN = torch.cat(pieces).view(self.num_layers, -1)
        ids_LN += torch.arange(self.num_layers, device=ids_LN.device).mul_(self.num_experts).unsqueeze(1)
        # numpy's is several times faster than torch's on a CPU.
        counts = (
            np.bincount(ids_LN.flatten().numpy(), minlength=self._counts_LE.size)
            if ids_LN.is_cpu
            else (torch.bincount(ids_LN.flatten(), minlength=self._counts_LE.size).cpu().numpy())
        )
        self._counts_LE += counts.reshape(self._counts_LE.shape)
        for pending in self._pending:
            pending.clear()
        self._num_pending = [0] * self.num_layers

    def _fold(self, layer: int) -> None:
        pending = self._pending[layer]
        if pending:
            ids = torch.cat([ids.flatten() for ids in pending])
            self._counts_LE[layer] += torch.bincount(ids, minlength=self.num_experts).cpu().numpy()
            pending.clear()
            self._num_pending[layer] = 0


class RowLoad:
    """Rows that arrived at the experts of this rank, by step and layer. As cheap as ExpertLoad, and by the same
    means."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._step = self._mark = 0
        self._rows: list[Tensor] = []
        self._places: list[int] = []  # step * L + layer of each

    def record(self, layer: int, rows_S: Tensor) -> None:
        """rows_S: int32 [S], the rows of each slot; not to be written to afterwards. Several of a step and layer add
        up."""
        self._rows.append(rows_S)
        self._places.append(self._step * self.num_layers + layer)

    def recorder(self, layer: int) -> Callable[[Tensor], None]:
        """`record` of one layer: what an MoE layer is handed."""
        return functools.partial(self.record, layer)

    def end_step(self, counts: bool = True) -> None:
        """counts: False: it had no tokens on any rank; it is forgotten."""
        if counts:
            self._step += 1
            self._mark = len(self._rows)
        else:
            del self._rows[self._mark :], self._places[self._mark :]

    def take(self) -> npt.NDArray[np.int64]:
        """int64 [N, L]: rows of each step that has ended since the last call; a step that was broken off is
        forgotten."""
        self.end_step(counts=False)
        size = self._step * self.num_layers
        counts = torch.stack(self._rows).sum(1).cpu().numpy() if self._rows else np.zeros(0, dtype=np.int64)
        if len(counts) != size:  # several of a step and layer, or none
            counts = np.bincount(self._places, weights=counts, minlength=size).astype(np.int64)
        counts_NL: npt.NDArray[np.int64] = counts.reshape(self._step, self.num_layers)
        self._step = self._mark = 0
        self._rows, self._places = [], []
        return counts_NL
