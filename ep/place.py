"""From the expert that a router chose to the slot that computes it.

Legend: T tokens, K experts per token, L MoE layers, G ranks, S slots of a rank, E logical experts, B buckets of hashes,
P slots of a layer, U used slots, N pairs of layer and expert, R those with replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eplb.placement import Placement
from native.exchange import SpreadSlots, can_spread

Ints = npt.NDArray[np.int64]

_HASH_BITS = 16
_HASHES = 1 << _HASH_BITS
_GOLDEN = 40503  # 2**16 / golden ratio, odd: consecutive multiples spread evenly over the 16-bit range at any length


class _Hashes:
    """The 16-bit hashes of a stream of tokens, each as one of B buckets and the rest: its place in that bucket."""

    def __init__(self, num_buckets: int, device: torch.device | str | None) -> None:
        assert num_buckets & (num_buckets - 1) == 0
        self.num_buckets = num_buckets
        self._bucket = self._rest = torch.empty(0, 1, dtype=torch.int64, device=device)

    def at(self, start: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """bucket and rest, int64 [T, 1] each; 0 <= start < 2**16."""
        end = start + num_tokens
        if end > self._bucket.shape[0]:
            # One period of the sequence, and as many more as the longest step needs to run on past its end.
            index = torch.arange(_HASHES + num_tokens, device=self._bucket.device).unsqueeze(1)
            hashes = (index * _GOLDEN) % _HASHES
            width = _HASHES // self.num_buckets
            self._bucket, self._rest = hashes // width, hashes % width
        return self._bucket[start:end], self._rest[start:end]


class SlotTable:
    """Logical expert -> slot among the live ranks (the rank's place among them * S + slot) of one MoE layer.

    A Placement numbers its ranks once and for all; the groups that exchange consist of the live ones only. Here, and
    only here, the one becomes the other.

    An expert with replicas is spread over them by share, to 16 bits, by a hash of the token's place in the stream of
    this rank's tokens. The hashes walk on from call to call, so that even steps of one token use every replica in its
    share. `rank` only makes ranks begin at different places. Which hashes are whose is laid out by Walker's alias
    method, so that any number of replicas takes two lookups (_alias).
    """

    def __init__(
        self,
        placement: Placement,
        layer: int,
        rank: int = 0,
        device: torch.device | str | None = None,
        rows: _Rows | None = None,
        hashes: _Hashes | None = None,
    ) -> None:
        """rows, hashes: what `slot_tables` has worked out already."""
        if rows is None:
            rows = _rows(placement, [layer])[0]
        self.num_replicas = rows.num_replicas
        first_E = rows.slot_EB2[:, 0, 0]
        self._is_identity = self.num_replicas == 1 and np.array_equal(first_E, np.arange(placement.num_experts))
        self._first_E = torch.from_numpy(first_E).to(device) if self.num_replicas == 1 else None
        self._num_buckets = rows.cut_EB.shape[1]
        self._cuts = torch.from_numpy(rows.cut_EB.ravel()).to(device)
        self._slots = torch.from_numpy(rows.slot_EB2.ravel()).to(device)
        self._hashes = hashes or _Hashes(self._num_buckets, device)
        self._cursor = np.array([(rank * 7919 + layer * 104729) % _HASHES])
        self._native: SpreadSlots | None = None
        if device is None or torch.device(device).type == "cpu":
            self._native = SpreadSlots(rows.cut_EB, rows.slot_EB2, self._cursor) if can_spread() else None

    def __call__(self, expert_TK: Tensor) -> Tensor:
        """int64 [T, K] logical experts -> int64 [T, K] slots. The input itself where both numbers are the same."""
        if self._is_identity:
            return expert_TK
        if self._native is not None and expert_TK.is_cpu:
            return self._native(expert_TK)
        if self._first_E is not None:
            return self._first_E[expert_TK]
        num_tokens = expert_TK.shape[0]
        bucket_T1, rest_T1 = self._hashes.at(int(self._cursor[0]), num_tokens)
        self._cursor[0] = (self._cursor[0] + num_tokens) % _HASHES
        place_TK = torch.add(bucket_T1, expert_TK, alpha=self._num_buckets)
        other_TK = rest_T1 >= self._cuts.take(place_TK)
        return self._slots.take(torch.add(other_TK, place_TK, alpha=2))

    def folded(self, num_slots: int) -> SlotTable:
        """The same with the first `num_slots` slots in the place of all: expert after expert takes the next of them."""
        folded = copy.copy(self)
        folded._is_identity = False
        folded._slots = self._slots % num_slots
        if self._first_E is not None:
            folded._first_E = self._first_E % num_slots
        return folded

    def follow(self, before: SlotTable) -> None:
        """Go on in the stream of tokens where another table of this layer has come to. One that began anew every few
        steps would use the first few hashes only."""
        if before._num_buckets == self._num_buckets:
            self._hashes = before._hashes
        self._cursor[0] = before._cursor[0]


def slot_tables(placement: Placement, rank: int, device: torch.device | str | None = None) -> list[SlotTable]:
    """Those of all layers, at a fraction of the cost of one after the other."""
    layers = range(placement.num_layers)
    all_rows = _rows(placement, layers)
    hashes = _Hashes(all_rows[0].cut_EB.shape[1], device) if all_rows else None
    return [
        SlotTable(placement, layer, rank, device, rows, hashes) for layer, rows in zip(layers, all_rows, strict=True)
    ]


class _Rows(NamedTuple):
    """One layer. The hashes of an expert's bucket b whose rest is below cut_EB[e, b] go to slot_EB2[e, b, 0], the
    others to slot_EB2[e, b, 1]. num_replicas: slots with a share, of the expert that has most."""

    num_replicas: int
    cut_EB: Ints
    slot_EB2: Ints


def _rows(placement: Placement, layers: Sequence[int]) -> list[_Rows]:
    num_experts = placement.num_experts
    live = np.array(placement.alive, dtype=bool)
    # The slots of the live ranks, numbered without gaps.
    ids_LP = placement.slot_to_expert[list(layers)][:, live].reshape(len(layers), -1)
    share_LP = placement.share[list(layers)][:, live].reshape(len(layers), -1).astype(np.float64)
    layer_U, slot_U = np.nonzero(share_LP)  # a spare has no tokens
    key_U = layer_U * num_experts + ids_LP[layer_U, slot_U]
    order_U = np.argsort(key_U, kind="stable")
    key_U, slot_U, share_U = key_U[order_U], slot_U[order_U], share_LP[layer_U, slot_U][order_U]
    copies_N = np.bincount(key_U, minlength=len(layers) * num_experts)
    starts_N = np.cumsum(copies_N) - copies_N
    replica_U = np.arange(len(key_U)) - starts_N[key_U]
    first_N = slot_U[starts_N]
    most = int(copies_N.max(initial=1))
    num_buckets = 1 << (most - 1).bit_length()
    cut_NB = np.full((len(copies_N), num_buckets), _HASHES // num_buckets)
    slot_NB2 = np.empty((len(copies_N), num_buckets, 2), dtype=np.int64)
    slot_NB2[:] = first_N[:, None, None]

    several = copies_N > 1  # the few experts with replicas; the rest of it is about them
    used = several[key_U]
    where = (np.cumsum(several) - 1)[key_U[used]], replica_U[used]
    share_RB = np.zeros((int(several.sum()), num_buckets))
    share_RB[where] = share_U[used]
    slot_RB = np.repeat(first_N[several], num_buckets).reshape(share_RB.shape)
    slot_RB[where] = slot_U[used]
    running_RB = share_RB.cumsum(1)
    threshold_RB = np.rint(_HASHES * running_RB / running_RB[:, -1:]).astype(np.int64)
    cut_NB[several], other_RB = _alias(np.diff(threshold_RB, axis=1, prepend=0))
    slot_NB2[several] = np.stack([slot_RB, np.take_along_axis(slot_RB, other_RB, 1)], axis=2)
    shape = len(layers), num_experts, num_buckets
    most_L = copies_N.reshape(len(layers), num_experts).max(1, initial=1).tolist()
    return [_Rows(*row) for row in zip(most_L, cut_NB.reshape(shape), slot_NB2.reshape(*shape, 2), strict=True)]


def _alias(hashes_RB: Ints) -> tuple[Ints, Ints]:
    """cut and other, int64 [R, B] each: bucket b of a row is shared by replica b, which has its first cut[b] hashes,
    and by replica other[b]. Every replica then has as many hashes as it should; hashes_RB: those, 2**16 in each row.

    A. J. Walker, An efficient method for generating discrete random variables with general distributions, 1977: the
    emptiest bucket is filled up by the replica that has most left, and is done with; and so on.
    """
    num_rows, num_buckets = hashes_RB.shape
    width = _HASHES // num_buckets
    left_RB = hashes_RB.copy()
    cut_RB = np.full((num_rows, num_buckets), width)
    other_RB = np.broadcast_to(np.arange(num_buckets), (num_rows, num_buckets)).copy()
    row = np.arange(num_rows)
    while True:
        low = left_RB[row].argmin(1)
        short = left_RB[row, low] < width
        row, low = row[short], low[short]
        if not row.size:
            return cut_RB, other_RB
        high = left_RB[row].argmax(1)
        cut_RB[row, low] = left_RB[row, low]
        other_RB[row, low] = high
        left_RB[row, high] -= width - left_RB[row, low]
        left_RB[row, low] = width
