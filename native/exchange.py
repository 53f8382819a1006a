"""Few tokens between ranks that map each other's memory, in native kernels (native/src/exchange.cpp): each stage of an
exchange of ep/backends/shm.py in one call, over the same staging buffers and words.

Legend: T tokens of this rank, N of all ranks, D hidden size, K experts per token, P choices of slots here, G ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from native.features import Isa, isa
from native.library import function

MAX_RANKS = 64
SPIN_NS = 50_000  # a wait that is longer is the caller's
_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class PeerMemory(NamedTuple):
    """Addresses. leaving, going: staging buffers at the peer, for this rank's tokens and for rows of the peer's tokens;
    arriving, coming: those here. *_out: the peer's word that this rank sets, *_in: the one here that the peer sets.
    asleep: the peer's word that says whether it sleeps."""

    leaving: int
    going: int
    arriving: int
    coming: int
    dispatch_out: int
    combine_out: int
    dispatch_in: int
    combine_in: int
    asleep: int


class _Peer(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in PeerMemory._fields]


class _Lane(ctypes.Structure):
    _fields_ = [
        ("rank", _NUMBER),
        ("size", _NUMBER),
        ("slots", _NUMBER),
        ("dim", _NUMBER),
        ("x_type", _NUMBER),
        ("peers", _POINTER),
    ]


_LANE = ctypes.POINTER(_Lane)
_put = function("exchange_put", _LANE, _POINTER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER)
_await = function("exchange_await", _LANE, _INT, _NUMBER, _NUMBER, _POINTER)
_join = function("exchange_join", _LANE, _POINTER, _POINTER, _POINTER, _NUMBER, *[_POINTER] * 5)
_give_back = function("exchange_give_back", _LANE, _POINTER, _POINTER, _NUMBER)
_sum = function("exchange_sum", _LANE, _POINTER, _POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER, _INT)


def can_run(dtype: torch.dtype, size: int) -> bool:
    """Whether rows of this dtype go between so many ranks here."""
    return dtype in _X_TYPES and size <= MAX_RANKS and isa() > Isa.NONE


class FewTokens:
    """The stages of one lane's exchanges in which no rank has more than `most` tokens. The caller counts the exchanges
    and knows which are such."""

    def __init__(
        self, rank: int, num_slots: int, hidden_size: int, dtype: torch.dtype, peers: Sequence[PeerMemory], most: int
    ) -> None:
        """peers: by rank; this rank's own is not looked at."""
        size = len(peers)
        self.most = most
        self._rank, self._size = rank, size
        self._peers = (_Peer * size)(*[_Peer(*peer) for peer in peers])
        self._lane = _Lane(rank, size, num_slots, hidden_size, _X_TYPES[dtype], ctypes.addressof(self._peers))
        self._values, self._rows = (ctypes.c_int64 * (size + 1))(), (ctypes.c_int64 * size)()
        self._x_ND = torch.empty(most * size, hidden_size, dtype=dtype)
        self._joined: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def put(self, x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor, number: int) -> None:
        """To every peer, all of it."""
        _put(self._lane, x_TD.data_ptr(), slot_TK.data_ptr(), weight_TK.data_ptr(), *slot_TK.shape, number)

    def dispatched(self, number: int, num_tokens: int) -> list[int] | None:
        """How many tokens there are of each rank, this one's `num_tokens` among them; None: not all have come yet."""
        _await(self._lane, 0, number, SPIN_NS, self._values)
        if not self._values[self._size]:
            return None
        self._values[self._rank] = num_tokens
        return self._values[: self._size]

    def join(
        self, x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """x [N, D], slot [N, K], weight [N, K] of all ranks, one after another, until the next call; and how
        many choices of each rank's tokens are of slots here."""
        num_tokens, top_k = sum(counts), slot_TK.shape[1]
        joined = self._joined.get((num_tokens, top_k))
        if joined is None:
            slot_NK = torch.empty(num_tokens, top_k, dtype=torch.int64)
            joined = self._x_ND[:num_tokens], slot_NK, torch.empty(num_tokens, top_k)
            self._joined[num_tokens, top_k] = joined
        x_ND, slot_NK, weight_NK = joined
        self._values[: self._size] = list(counts)
        _join(
            self._lane, x_TD.data_ptr(), slot_TK.data_ptr(), weight_TK.data_ptr(), top_k, self._values,
            x_ND.data_ptr(), slot_NK.data_ptr(), weight_NK.data_ptr(), self._rows,
        )  # fmt: skip
        return x_ND, slot_NK, weight_NK, self._rows[:]

    def give_back(self, y_PD: Tensor, rows: Sequence[int], number: int) -> None:
        """To each peer the rows of its tokens' choices."""
        self._rows[:] = list(rows)
        _give_back(self._lane, y_PD.data_ptr(), self._rows, number)

    def returned(self, number: int) -> bool:
        """Whether all peers have given back."""
        _await(self._lane, 1, number, SPIN_NS, self._values)
        return bool(self._values[self._size])

    def sum(self, slot_TK: Tensor, weight_TK: Tensor, own_PD: Tensor, out_TD: Tensor) -> None:
        """out = the weighted sum of each token's choices, in their order. own: the rows of those that are here."""
        _sum(
            self._lane, slot_TK.data_ptr(), weight_TK.data_ptr(), *slot_TK.shape, own_PD.data_ptr(),
            out_TD.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
