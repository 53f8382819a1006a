"""From the expert that a router chose to the slot that computes it.

Legend: T tokens, K experts per token, E logical experts, M replicas of an expert at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eplb.placement import Placement

_HASH_BITS = 16
_HASHES = 1 << _HASH_BITS
_GOLDEN = 40503  # 2**16 / golden ratio, odd: consecutive multiples spread evenly over the 16-bit range at any length


class SlotTable:
    """Logical expert -> slot among the living ranks (the rank's place among them * S + slot) of one MoE layer.

    A Placement numbers its ranks once and for all; the groups that exchange consist of the living only. Here, and only
    here, the one becomes the other.

    An expert with replicas is spread over them by share: a hash of the token's place in the stream of this rank's tokens
    is compared with 16-bit cumulative thresholds. The hashes walk on from call to call, so that even steps of one token
    use every replica in its share. `rank` only makes ranks begin at different places.
    """

    def __init__(
        self, placement: Placement, layer: int, rank: int = 0, device: torch.device | str | None = None
    ) -> None:
        slots = _among_living(placement, layer)
        num_replicas = max(len(pairs) for pairs in slots)
        first_E = [pairs[0][0] for pairs in slots]
        self.num_replicas = num_replicas
        self._is_identity = num_replicas == 1 and first_E == list(range(placement.num_experts))
        self._first_E = torch.tensor(first_E, dtype=torch.int64, device=device)
        slots_EM = [
            [slot for slot, _ in pairs] + [first] * (num_replicas - len(pairs))
            for pairs, first in zip(slots, first_E, strict=True)
        ]
        self._slots = torch.tensor(slots_EM, dtype=torch.int64, device=device).flatten()
        self._thresholds_EM = torch.tensor([_thresholds(pairs, num_replicas) for pairs in slots], device=device)
        self._hash = torch.empty(0, dtype=torch.int64, device=device)
        self._cursor = (rank * 7919 + layer * 104729) % _HASHES

    def __call__(self, expert_TK: Tensor) -> Tensor:
        """int64 [T, K] logical experts -> int64 [T, K] slots. The input itself where both numbers are the same."""
        if self._is_identity:
            return expert_TK
        if self.num_replicas == 1:
            return self._first_E[expert_TK]
        hash_T11 = self._next_hashes(expert_TK.shape[0]).view(-1, 1, 1)
        replica_TK = (hash_T11 >= self._thresholds_EM[expert_TK]).sum(-1)
        return self._slots[replica_TK.add_(expert_TK, alpha=self.num_replicas)]

    def _next_hashes(self, num_tokens: int) -> Tensor:
        start = self._cursor
        if start + num_tokens > self._hash.shape[0]:
            # One period of the sequence, and as many more as the longest step needs to run on past its end.
            index = torch.arange(_HASHES + num_tokens, device=self._hash.device)
            self._hash = (index * _GOLDEN) % _HASHES
        self._cursor = (start + num_tokens) % _HASHES
        return self._hash[start : start + num_tokens]


def _among_living(placement: Placement, layer: int) -> list[list[tuple[int, float]]]:
    """Placement.slots_of, the slots of the living ranks numbered without gaps."""
    size = placement.slots_per_rank
    place = {rank: index for index, rank in enumerate(rank for rank, alive in enumerate(placement.alive) if alive)}
    return [
        [(place[slot // size] * size + slot % size, share) for slot, share in pairs]
        for pairs in placement.slots_of(layer)
    ]


def _thresholds(pairs: list[tuple[int, float]], num_replicas: int) -> list[int]:
    """Replica m of an expert takes the hashes from threshold m - 1 up to threshold m. M - 1 of them: the last replica's
    is never reached."""
    total = sum(share for _, share in pairs)
    thresholds, running = [], 0.0
    for _, share in pairs[:-1]:
        running += share
        thresholds.append(round(_HASHES * running / total))
    # The last replica, and those that an expert does not have: no hash is that high.
    return thresholds + [_HASHES] * (num_replicas - len(pairs))
