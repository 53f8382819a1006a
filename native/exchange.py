"""Few tokens between ranks in native kernels (native/src/exchange.cpp), each stage of an exchange in one call: of ranks
that map each other's memory (ep/backends/shm.py), over the same staging buffers and words, and of ranks that send each
other messages (ep/backends/linked.py). What changes from exchange to exchange is not in the calls, so they can be
recorded on a tape (native/tape.py).

Legend: T tokens of this rank, N of all ranks, D hidden size, K experts per token, P choices of slots here, E experts, G
ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from native.features import Isa, isa
from native.library import function
from native.links import LinkSockets

MAX_RANKS = 64
SPIN_NS = 50_000  # a wait that is longer is the caller's, if others want the core; over links it sleeps first
LATE_DISPATCH, LATE_COMBINE, TOO_MANY = range(3)  # why a recorded exchange stops
_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class PeerMemory(NamedTuple):
    """Addresses. leaving, going: staging buffers at the peer, for this rank's tokens and for rows of the peer's tokens
    (over links: here, from where they are sent); arriving, coming: those here. *_out: the peer's word that this rank
    sets, *_in: the one here that the peer sets. asleep: the peer's word that says whether it sleeps. Links need none of
    those at the peer."""

    leaving: int
    going: int
    arriving: int
    coming: int
    dispatch_out: int
    combine_out: int
    dispatch_in: int
    combine_in: int
    asleep: int


class Linked(NamedTuple):
    """What an exchange over links needs besides. box: of the peers' tokens; the next one is of their results."""

    sockets: LinkSockets
    box: int


class _Peer(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in PeerMemory._fields]


class _State(ctypes.Structure):
    """ExchangeState of exchange.cpp."""

    _fields_ = (
        *((name, _NUMBER) for name in ("number", "arrived", "late")),
        ("counts", _NUMBER * MAX_RANKS),
        ("rows", _NUMBER * MAX_RANKS),
    )

    number: int
    arrived: int
    late: int
    counts: ctypes.Array[ctypes.c_int64]
    rows: ctypes.Array[ctypes.c_int64]


class _Lane(ctypes.Structure):
    """ExchangeLane of exchange.cpp."""

    _fields_ = (
        *((name, _NUMBER) for name in ("rank", "size", "slots", "dim", "x_type", "most", "spin_ns")),
        *((name, _POINTER) for name in ("peers", "state", "all_x", "all_slot", "all_weight", "links")),
        ("box", _NUMBER),
        ("own", _POINTER),
        ("base", _NUMBER),
        ("given", _POINTER),
    )


class _SlotCall(ctypes.Structure):
    """SlotCall of exchange.cpp."""

    _fields_ = (("buckets", _NUMBER), ("cuts", _POINTER), ("slots", _POINTER), ("cursor", _POINTER))


_LANE = ctypes.POINTER(_Lane)
_put = function("exchange_put", _LANE, _POINTER, _POINTER, _POINTER, _NUMBER, _NUMBER)
_await = function("exchange_await", _LANE, _INT)
_join = function("exchange_join", _LANE, _POINTER, _POINTER, _POINTER, _NUMBER)
_give_back = function("exchange_give_back", _LANE, _POINTER, _NUMBER, _INT)
_sum = function("exchange_sum", _LANE, _POINTER, _POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER, _INT)
_slots = function("exchange_slots", ctypes.POINTER(_SlotCall), _POINTER, _POINTER, _NUMBER, _NUMBER)


def can_run(dtype: torch.dtype, size: int) -> bool:
    """Whether rows of this dtype go between so many ranks here."""
    return dtype in _X_TYPES and size <= MAX_RANKS and isa() > Isa.NONE


def can_spread() -> bool:
    """Whether SpreadSlots runs here."""
    return isa() > Isa.NONE


class FewTokens:
    """The stages of one lane's exchanges in which no rank has more than `most` tokens, of at most `top_k` experts each.

    number: of exchanges that have begun; the caller counts those that go another way. key: names the lane where a tape
    stops. first_slot: of this rank. memory: addresses of the number of tokens of all ranks (int64), the tokens, their
    slots, and the rows of choices that are here.
    """

    first_slot: int
    memory: tuple[int, int, int, int]

    def __init__(
        self,
        rank: int,
        num_slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        peers: Sequence[PeerMemory],
        most: int,
        top_k: int,
        linked: Linked | None = None,
        within: FewTokens | None = None,
    ) -> None:
        """peers: by rank; this rank's own is not looked at. linked: None: they map each other's memory. within: an
        exchange over links with other machines; these ranks share the slots that it counts as one rank's, and what
        arrives in it is what each of them brings here."""
        size = len(peers)
        self.most, self.top_k = most, top_k
        self._linked = linked  # which is not freed before this
        self._size, num_all = size, most * size
        self._state = _State()
        self._peers = (_Peer * size)(*[_Peer(*peer) for peer in peers])
        # Taken in as far as they are used.
        self._x_ND = torch.empty(num_all, hidden_size, dtype=dtype)
        self._slot_P = torch.empty(num_all * top_k, dtype=torch.int64)
        self._weight_P = torch.empty(num_all * top_k)
        self._y_PD = torch.empty(num_all * top_k, hidden_size, dtype=dtype)
        self._own_TD = torch.empty(most if linked else 0, hidden_size, dtype=dtype)
        links, box = (linked.sockets.address, linked.box) if linked else (None, 0)
        self._lane = _Lane(
            rank, size, num_slots, hidden_size, _X_TYPES[dtype], most, SPIN_NS, ctypes.addressof(self._peers),
            ctypes.addressof(self._state), *[x.data_ptr() for x in (self._x_ND, self._slot_P, self._weight_P)],
            links, box, self._own_TD.data_ptr(),
            *((within.first_slot, within.memory[0]) if within else (0, None)),
        )  # fmt: skip
        self.first_slot = (within.first_slot if within else 0) + rank * num_slots
        self._within = within
        arrived: int = self.key + _State.arrived.offset  # type: ignore[attr-defined]
        self.memory = arrived, self._x_ND.data_ptr(), self._slot_P.data_ptr(), self._y_PD.data_ptr()
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def key(self) -> int:
        return ctypes.addressof(self._state)

    @property
    def number(self) -> int:
        return self._state.number

    @number.setter
    def number(self, number: int) -> None:
        self._state.number = number

    def put(self, x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor) -> None:
        """The next exchange begins: all of it to every peer, or over links to each the tokens of its experts."""
        _put(self._lane, *self._brought(x_TD, slot_TK, weight_TK), *slot_TK.shape)

    def dispatched(self) -> list[int] | None:
        """How many tokens there are of each rank; None: not all have come yet."""
        _await(self._lane, 0)
        return None if self._state.late else self.counts

    @property
    def counts(self) -> list[int]:
        """What `dispatched` has found last."""
        return self._state.counts[: self._size]

    def note(self, counts: Sequence[int]) -> None:
        """What `dispatched` would have found, had it waited for longer."""
        self._state.counts[: self._size] = list(counts)

    def join(
        self, x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [N, D], slot [N, K], weight [N, K] of all ranks, one after another, and place for the rows of the choices
        that are here [P, D]: until the next call, and always in the same memory. num_tokens: N."""
        top_k = slot_TK.shape[1]
        _join(self._lane, *self._brought(x_TD, slot_TK, weight_TK), top_k)
        views = self._views.get((num_tokens, top_k))
        if views is None:
            num_pairs, shape = num_tokens * top_k, (num_tokens, top_k)
            views = (
                self._x_ND[:num_tokens],
                self._slot_P[:num_pairs].view(shape),
                self._weight_P[:num_pairs].view(shape),
            )
            self._views[num_tokens, top_k] = views
        return *views, self._y_PD[: sum(self._state.rows[: self._size])]

    def give_back(self, y_PD: Tensor, top_k: int) -> None:
        """To each peer the rows of its tokens' choices, or over links of its tokens."""
        _give_back(self._lane, self._address(y_PD), top_k, torch.get_num_threads())

    def returned(self) -> bool:
        """Whether all peers have given back."""
        _await(self._lane, 1)
        return not self._state.late

    def sum(self, slot_TK: Tensor, weight_TK: Tensor, y_PD: Tensor, out_TD: Tensor) -> None:
        """out = the weighted sum of each token's choices, in their order; over links in the order of ranks. y: what was
        given back, with the rows of those that are here."""
        _sum(
            self._lane, slot_TK.data_ptr(), weight_TK.data_ptr(), *slot_TK.shape, self._address(y_PD),
            out_TD.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

    def sum_within(self, slot_TK: Tensor, weight_TK: Tensor, y_PD: Tensor) -> None:
        """The same for an exchange within another one, which gives back the sums. slot, weight: as for `put`."""
        within, threads = self._within, torch.get_num_threads()
        assert within is not None
        _, slot, weight = self._brought(y_PD, slot_TK, weight_TK)
        sums = within.memory[3]
        _sum(self._lane, slot, weight, *slot_TK.shape, self._address(y_PD), sums, threads)
        _give_back(within._lane, sums, 0, threads)

    def _brought(self, x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor) -> tuple[int, int, int]:
        """Addresses. What has arrived in another exchange has them even if it is nothing now."""
        within = self._within
        if within is None:
            return x_TD.data_ptr(), slot_TK.data_ptr(), weight_TK.data_ptr()
        return within.memory[1], within.memory[2], within._weight_P.data_ptr()

    def _address(self, y_PD: Tensor) -> int:
        """Without rows it has none of its own, but a recorded call will have rows."""
        return y_PD.data_ptr() or self._y_PD.data_ptr()


class SpreadSlots:
    """Which slot computes a token's expert, where experts have several (ep.place.SlotTable has the meaning).

    cursor: int64 [1], which goes on in place; cut_EB, slot_EB2: int64, contiguous.
    """

    def __init__(
        self, cut_EB: npt.NDArray[np.int64], slot_EB2: npt.NDArray[np.int64], cursor: npt.NDArray[np.int64]
    ) -> None:
        self._arrays = cut_EB, slot_EB2, cursor
        self._call = _SlotCall(cut_EB.shape[1], *[array.ctypes.data for array in self._arrays])

    def __call__(self, expert_TK: Tensor) -> Tensor:
        expert_TK = expert_TK.contiguous()
        slot_TK = torch.empty(expert_TK.shape, dtype=torch.int64)
        _slots(self._call, expert_TK.data_ptr(), slot_TK.data_ptr(), *expert_TK.shape)
        return slot_TK
