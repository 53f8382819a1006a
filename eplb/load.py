"""How many tokens each logical expert received: what the balancer plans from.

Legend: L MoE layers, E logical experts, T tokens of a step, K experts per token.
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
        for layer in range(self.num_layers):
            self._fold(layer)
        return self._counts_LE.copy()

    def reset(self) -> None:
        """Begin a new window."""
        for pending in self._pending:
            pending.clear()
        self._num_pending = [0] * self.num_layers
        self._counts_LE[:] = 0

    def _fold(self, layer: int) -> None:
        pending = self._pending[layer]
        if pending:
            ids = torch.cat([ids.flatten() for ids in pending])
            self._counts_LE[layer] += torch.bincount(ids, minlength=self.num_experts).cpu().numpy()
            pending.clear()
            self._num_pending[layer] = 0
