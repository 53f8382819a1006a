"""How many slots each layer should have when memory allows a given sum: more where experts are uneven, fewer elsewhere.

Legend: L MoE layers, G ranks, S slots of a rank in a layer, E logical experts.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from eplb.balance import Floats, checked_load


def layer_slots(
    load_LE: npt.ArrayLike,
    num_ranks: int,
    total_slots: int,
    min_copies: int = 1,
) -> tuple[int, ...]:
    """Slots per rank of each layer, their sum at most `total_slots` (an average of total_slots / L).

    Every layer gets what its experts need; each further slot goes to the layer where it lowers the bound on the fullest
    rank's load most, as a part of the layer's load (eplb.bounds); when no bound falls any more, to the layer whose
    largest copy is heaviest. No layer gets more than all experts on every rank. Raises ValueError, naming the smallest
    sum that does, when the experts do not fit.
    """
    load = checked_load(load_LE)
    num_layers, num_experts = load.shape
    least = -(-num_experts * min_copies // num_ranks)
    most = max(least, num_experts)
    if total_slots < least * num_layers:
        raise ValueError(
            f"total slots is {total_slots}; {num_layers} layers of {num_experts} experts on {num_ranks} rank(s) need "
            f"at least {least * num_layers} ({least} a layer)"
        )
    part = load / np.maximum(load.sum(1, keepdims=True), 1e-300) * num_ranks
    layers = [_Layer(row, num_ranks, least, min_copies) for row in part]
    heap = [(*layer.gain(), index) for index, layer in enumerate(layers) if layer.slots < most]
    heapq.heapify(heap)
    for _ in range(total_slots - least * num_layers):
        if not heap:
            break
        *_, index = heapq.heappop(heap)
        layers[index].grow()
        if layers[index].slots < most:
            heapq.heappush(heap, (*layers[index].gain(), index))
    return tuple(layer.slots for layer in layers)


class _Layer:
    """Loads in units of the mean rank load; copies given by Adams' divisor method, one at a time, as eplb.bounds
    does."""

    def __init__(self, part_E: Floats, num_ranks: int, slots: int, min_copies: int) -> None:
        self.slots = slots
        self._ranks = num_ranks
        self._heap = [(-w / min_copies, float(w), min_copies) for w in part_E.tolist()]
        heapq.heapify(self._heap)
        self._give(slots * num_ranks - min_copies * len(part_E))
        self._next: list[tuple[float, float, int]] = []
        self._look()

    def gain(self) -> tuple[float, float]:
        """(minus what one more slot per rank takes off the bound, minus the heaviest copy): the least is served
        first."""
        now, then = -self._heap[0][0], -self._next[0][0]
        return -(max(1.0, now) - max(1.0, then)), -now

    def grow(self) -> None:
        self._heap = self._next
        self.slots += 1
        self._look()

    def _look(self) -> None:
        kept = self._heap.copy()
        self._give(self._ranks)
        self._next, self._heap = self._heap, kept

    def _give(self, copies: int) -> None:
        for _ in range(copies):
            _, weight, count = self._heap[0]
            if count >= self._ranks:
                return
            heapq.heapreplace(self._heap, (-weight / (count + 1), weight, count + 1))
