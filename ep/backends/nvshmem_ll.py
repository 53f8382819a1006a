"""Low-latency expert parallelism over NVSHMEM: kernels pack rows and put them into other ranks' memory
(ep/backends/triton_put.py).

Legend: T tokens of this rank, D hidden size, K experts per token, S slots of a rank, G ranks, M most tokens of a rank,
C = G * M rows per slot, B blocks of a row, W choices that a message has room for.

The kernels are Triton's, with torch's functions of NVSHMEM for a device in them; memory is nvshmem4py's
(ep/backends/nvshmem.py). A dispatch is two kernels, one that sends and one that waits, and so is a combine. Rows arrive
padded, once per token and rank on the way, and nothing asks the host, so a CUDA graph can hold it. Ranks need not reach
each other's memory by NVLink: NVSHMEM goes by InfiniBand between nodes.

A wait ends after a number of looks. Who has not come by then is left out: results are then wrong, silently. `confirm`
looks for it after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from ep.backends.dispatchers import Confirm
from ep.backends.nvshmem import start, symmetric
from ep.device import beside, fetch, pinned
from ep.protocol import Arrived, Later, PeerLost, Pending, Routing
from ep.requirements import PUT_TOP_K
from ep.transport.device_group import DeviceGroup
from layers.optional import load
from moe_kernels import ExpertBatch, Layout
from moe_kernels.quant import num_blocks

FUNCTIONS = "torch.distributed._symmetric_memory._nvshmem_triton"
INSTALL = "pip install 'torch>=2.11' triton nvidia-nvshmem-cu13 (a CUDA build of torch, on a machine with a GPU)"
_LOOKS_PER_SECOND = 1_000_000  # one takes 0.3 to 0.7 us: a wait ends before the host's own does
_WARPS = 8
_PROGRAMS = 512


def _up(size: int) -> int:
    return -(-size // 16) * 16


class PutKernels:
    """What the lanes of a group share: the kernels, and who is lost."""

    def __init__(self, group: DeviceGroup) -> None:
        """Raises ValueError, which names what to install."""
        self.group = group
        self.core: Any = start(group)
        functions = vars(load(FUNCTIONS, INSTALL))
        self.triton: Any = load("ep.backends.triton_put", "pip install triton")
        if "putmem_signal_block" not in functions:
            raise ValueError(f"{FUNCTIONS} has no functions for this machine; to install them: {INSTALL}")
        self.put: Any = functions["putmem_signal_block"]
        # torch's own description of them says 5; the library's header says otherwise.
        self.signal_add = int(self.core.SignalOp.SIGNAL_ADD)
        try:
            self.send, self.give_back = (self.triton.bound(name, functions["requires_nvshmem"]) for name in _PUTTING)
        except RuntimeError as error:
            raise ValueError(f"{str(error).splitlines()[0]}; to install it: {INSTALL}") from error
        self.lost_G = torch.zeros(group.size, dtype=torch.int32, device=group.device)
        # Pinned, so that a copy engine writes them: kernels that wait may have taken all places where another could
        # run.
        self._all_lost_G = pinned(torch.ones(group.size, dtype=torch.int32), group.device)
        self.looks = max(1, int(group.timeout * _LOOKS_PER_SECOND))
        group.at_close(self._give_up)

    def _give_up(self) -> None:
        """Kernels that still wait end now; the next group wants the device."""
        with beside(self.lost_G.device), torch.inference_mode():  # on another thread than that which made the tensor
            self.lost_G.copy_(self._all_lost_G, non_blocking=True)


_PUTTING = ("send_rows_kernel", "return_rows_kernel")


def confirm(shared: PutKernels) -> Callable[[], Confirm]:
    """What is to be asked behind the exchanges of every step: has everybody come? PeerLost names those who have not."""

    def ask() -> Confirm:
        answer_G = fetch(shared.lost_G)

        def read() -> None:
            if shared.group.closed():
                raise PeerLost((), "the group was left during an exchange")
            lost = tuple(answer_G.nonzero().flatten().tolist())
            if lost:
                raise PeerLost(lost, f"rank {shared.group.rank} has left them out: their rows did not come")

        return read

    return ask


class _Way:
    """One direction of one lane, in symmetric memory: messages as they are sent [n, bytes], as they arrive [G, M,
    bytes], what ends a turn likewise [G, 2], and a word per sender."""

    def __init__(self, shared: PutKernels, num_staged: int, num_arriving: int, num_bytes: int) -> None:
        size, end = shared.group.size, shared.triton.END_BYTES
        pieces = (num_staged * num_bytes, num_arriving * num_bytes, size * end, size * end, size * 8)
        memory = symmetric(shared.group, shared.core, sum(_up(piece) for piece in pieces))
        self.num_bytes = num_bytes
        parts: tuple[Tensor, ...] = memory.split([_up(piece) for piece in pieces])  # type: ignore[no-untyped-call]
        self.stage, self.inbox = parts[:2]
        self.end, self.ends, self.word = (part.view(torch.int64) for part in parts[2:])


class NvshmemLowLatency:
    """One lane."""

    layout = Layout.PADDED

    def __init__(
        self, shared: PutKernels, num_slots: int, hidden_size: int, dtype: torch.dtype, max_tokens: int, fp8: bool
    ) -> None:
        """max_tokens: of a rank in one exchange; fp8: rows travel to the experts in 8 bits. Collective: ranks meet, and
        the kernels are compiled."""
        group, kernels = shared.group, shared.triton
        self._shared = shared
        self._num_slots, self._hidden_size, self._max_tokens, self._fp8 = num_slots, hidden_size, max_tokens, fp8
        self._dtype = dtype
        blocks = num_blocks(hidden_size)
        self._scales_at = kernels.ROW_AT + _up(hidden_size)
        row_bytes = hidden_size * dtype.itemsize
        message = _up(self._scales_at + 4 * blocks) if fp8 else _up(kernels.ROW_AT + row_bytes)
        places = group.size * max_tokens
        self._rows = (num_slots, places, hidden_size)
        self._there = _Way(shared, max_tokens * PUT_TOP_K, places, message)
        self._back = _Way(shared, places, places, _up(row_bytes))
        # Enough for all to run at once, and no more: most steps bring far fewer tokens than there is room for.
        self._programs = min(-(-max_tokens // 2), max(4, _PROGRAMS // group.size))
        self._turn = torch.tensor([1, 0], dtype=torch.int64, device=group.device)
        self._shape = {"D": hidden_size, "SIZE": 1 << (hidden_size - 1).bit_length(), "num_warps": _WARPS}
        self._format = {"BLOCKS": 1 << (blocks - 1).bit_length(), "SCALES_AT": self._scales_at, "FP8": fp8}
        self._meet()

    def _meet(self) -> None:
        """An exchange in which no rank waits: compiling takes each rank its own time."""
        shared = self._shared
        looks, shared.looks = shared.looks, 0
        x_TD = torch.zeros(1, self._hidden_size, dtype=self._dtype, device=shared.group.device)
        nowhere = Routing(
            torch.full((1, 1), -1, device=x_TD.device), torch.zeros(1, 1, dtype=torch.float32, device=x_TD.device)
        )
        try:
            arrived = self.dispatch(x_TD, nowhere).wait()
        except ImportError as error:  # torch asks for its own part of NVSHMEM when a kernel has been compiled
            raise ValueError(f"{str(error).splitlines()[0]}; to install it: {INSTALL}") from error
        y = torch.empty(self._rows, dtype=self._dtype, device=x_TD.device)
        self.combine(y, arrived.ticket, x_TD).wait()
        shared.group.confirm()
        shared.group.comm.barrier()
        shared.looks = looks
        shared.lost_G.zero_()

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        """At most `max_tokens` tokens, with at most PUT_TOP_K choices each."""
        (num_tokens, top_k), shared, way = routing.slot_TK.shape, self._shared, self._there
        assert num_tokens <= self._max_tokens, f"{num_tokens} tokens, but at most {self._max_tokens}"
        assert top_k <= PUT_TOP_K, f"{top_k} experts of a token, but at most {PUT_TOP_K}"
        slot_TK, weight_TK = routing.slot_TK.contiguous(), routing.weight_TK.contiguous()
        rows_S = torch.empty(self._num_slots, dtype=torch.int32, device=x_TD.device)
        shared.send[(num_tokens * top_k + shared.group.size,)](
            x_TD.contiguous(), slot_TK, weight_TK, rows_S, self._turn, way.stage, way.end, way.inbox, way.ends,
            way.word,
            num_tokens, top_k, self._num_slots, shared.group.rank, self._max_tokens, shared.signal_add,
            PUT=shared.put, SLOTS=1 << (self._num_slots - 1).bit_length(), TOKENS=64, BYTES=way.num_bytes,
            **self._shape, **self._format,
        )  # fmt: skip
        return Later(self.receive, rows_S, slot_TK)

    def receive(self, rows_S: Tensor, slot_TK: Tensor) -> Arrived:
        """The second half of a dispatch."""
        shared, way, device = self._shared, self._there, rows_S.device
        size, places = shared.group.size, shared.group.size * self._max_tokens
        shape = (self._num_slots, places)
        x = torch.empty(
            *shape, self._hidden_size, dtype=torch.float8_e4m3fn if self._fp8 else self._dtype, device=device
        )
        scale = None
        if self._fp8:
            scale = torch.empty(*self._rows[:2], num_blocks(self._hidden_size), dtype=torch.float32, device=device)
        count_G = torch.empty(size, dtype=torch.int32, device=device)
        place = torch.empty(places, PUT_TOP_K, dtype=torch.int32, device=device)
        weight = torch.empty(places, PUT_TOP_K, dtype=torch.float32, device=device)
        top_k = slot_TK.shape[1]
        shared.triton.take_rows_kernel[(size * self._programs,)](
            way.inbox, way.ends, way.word, shared.lost_G, self._turn,
            x.view(torch.uint8) if self._fp8 else x, weight if scale is None else scale, rows_S, count_G, place, weight,
            top_k, self._num_slots, shared.group.rank, size, self._max_tokens, shared.looks,
            BYTES=way.num_bytes, **self._shape, **self._format,
        )  # fmt: skip
        return Arrived(ExpertBatch(Layout.PADDED, x, rows_S, scale), _Ticket(slot_TK, count_G, place, weight))

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        assert isinstance(ticket, _Ticket) and y.dtype is self._dtype and out_TD.dtype is self._dtype
        shared, way, top_k = self._shared, self._back, ticket.slot_TK.shape[1]
        shared.give_back[(shared.group.size * (self._programs + 1),)](
            y.contiguous(), ticket.count_G, ticket.place, ticket.weight, self._turn, way.stage, way.end, way.inbox,
            way.ends, way.word,
            top_k, shared.group.rank, shared.group.size, self._max_tokens, shared.signal_add,
            PUT=shared.put, TOKENS=64, BYTES=way.num_bytes, **self._shape,
        )  # fmt: skip
        return Later(self.gather, ticket.slot_TK, out_TD)

    def gather(self, slot_TK: Tensor, out_TD: Tensor) -> Tensor:
        """The second half of a combine."""
        (num_tokens, top_k), shared, way = slot_TK.shape, self._shared, self._back
        assert out_TD.stride(1) == 1
        if num_tokens:
            shared.triton.sum_rows_kernel[(num_tokens,)](
                way.inbox, way.word, shared.lost_G, self._turn, slot_TK, out_TD, out_TD.stride(0),
                top_k, self._num_slots, shared.group.size, self._max_tokens, shared.looks,
                RANKS=1 << (shared.group.size - 1).bit_length(), BYTES=way.num_bytes, **self._shape,
            )  # fmt: skip
        return out_TD

    def close(self) -> None:
        """The group gives the memory back."""


class _Ticket(Struct, frozen=True):
    """count: tokens of each rank; place, weight [G * M, W]: rows of the batch that a message became."""

    slot_TK: Tensor
    count_G: Tensor
    place: Tensor
    weight: Tensor
