"""The symmetric heap of ep/transport/heap.py in the memory of GPUs that reach each other's (NVLink), by nvshmem4py.

Legend: K experts per token, n rows.

The algorithm is that of ep/backends/shm.py; here are the heap, its signals, and what is done to slots and weights on a
device. A put is a copy into a peer's memory, queued on the current stream; the signal is queued behind it. The host
waits for signals, within a bound: so it learns of a peer that is gone, and how many rows have come. A CUDA graph cannot
hold that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ep.backends.shm import ShmAllToAll
from ep.device import CurrentStream, await_true
from ep.transport.device_group import DeviceGroup
from ep.transport.shm_staging import Array, Fields, StagingBuffer
from layers.optional import load

INSTALL = "pip install 'moesaic[nvshmem]' (nvshmem4py)"
_WORDS = 64  # signals that a heap has
_NUMBER = 0xFFFFFFFF
_LINE = 64


def start(group: DeviceGroup) -> Any:
    """nvshmem.core, started between the ranks of the group: once, because a process has one NVSHMEM."""
    return group.once("nvshmem", lambda: _start(group))


def _start(group: DeviceGroup) -> Any:
    core: Any = load("nvshmem.core", INSTALL)
    unique_id = group.comm.bcast(core.get_unique_id() if group.rank == 0 else None, 0)
    device = _cuda().Device()
    device.set_current()
    core.init(device=device, uid=unique_id, rank=group.rank, nranks=group.size, initializer_method="uid")
    group.at_end(core.finalize)
    return core


def symmetric(group: DeviceGroup, core: Any, num_bytes: int) -> Tensor:
    """Zeros, as bytes, at the same address on all ranks."""
    own: Tensor = core.bytetensor((num_bytes,), dtype=torch.uint8)
    own.zero_()
    group.confirm()
    group.comm.barrier()  # no rank writes to a peer that has not cleared its own yet
    return own


def _cuda() -> Any:
    """cuda.core. Release 0.4 of it, which nvshmem4py 0.1.3 wants, has everything one package deeper."""
    module = load("cuda.core", INSTALL)
    return module if "Device" in vars(module) else load("cuda.core.experimental", INSTALL)


class NvshmemHeap:
    """SymmetricHeap: every piece is an allocation of its own."""

    def __init__(self, group: DeviceGroup, core: Any) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._core = core
        self._used = 0
        self._pieces: dict[int, list[Tensor]] = {}  # offset -> the piece on each rank

    def reserve(self, num_bytes: int) -> int:
        offset = self._used
        num_bytes = -(-num_bytes // _LINE) * _LINE
        self._used += num_bytes
        own = symmetric(self._group, self._core, num_bytes)
        self._pieces[offset] = [
            own if rank == self.rank else self._core.get_peer_tensor(own, rank) for rank in range(self.size)
        ]
        return offset

    def window(self, rank: int, offset: int, num_bytes: int) -> Tensor:
        base = max(start for start in self._pieces if start <= offset)
        return self._pieces[base][rank][offset - base : offset - base + num_bytes]


class NvshmemSignals:
    """Signals over such a heap: a table of words by signal and sender, which the host reads as a whole while it
    waits."""

    def __init__(self, heap: NvshmemHeap, group: DeviceGroup, core: Any) -> None:
        self._group = group
        self._core = core
        self._size = heap.size
        self._num_words = 0
        offset = heap.reserve(_WORDS * heap.size * 8)
        self._own = heap.window(heap.rank, offset, _WORDS * heap.size * 8).view(torch.int64)
        self._buffer = _cuda().Buffer
        self._stream = CurrentStream()

    def reserve(self) -> int:
        word, self._num_words = self._num_words, self._num_words + 1
        if self._num_words > _WORDS:
            raise ValueError(f"the heap has room for {_WORDS} signals; one more is asked for")
        return word

    def send(self, peer: int, word: int, number: int, value: int = 0) -> None:
        self._group.check()
        # The same address on all ranks, so this rank's own names the peer's.
        address = self._own.data_ptr() + 8 * (word * self._size + self._group.rank)
        signal = self._buffer.from_handle(address, 8)
        content = value << 32 | number & _NUMBER
        self._core.signal_op(signal, content, self._core.SignalOp.SIGNAL_SET, peer, self._stream)

    def wait(self, word: int, peers: Sequence[int], number: int) -> list[int]:
        row_G = self._own[word * self._size : (word + 1) * self._size]
        words: list[int] = []

        def missing() -> tuple[int, ...]:
            return tuple(peer for peer in peers if (words[peer] - number) & 1 << 31)

        def arrived() -> bool:
            words[:] = row_G.tolist()
            return not missing()

        await_true(arrived, self._group.timeout, self._group.closed, self._group.left, missing)
        return [words[peer] >> 32 for peer in peers]


class DeviceStagingBuffer(StagingBuffer):
    """Slots and weights as tensors."""

    def views(self, count: int, top_k: int) -> Fields:
        slots, weights, end = self._sections(count, top_k)
        return (
            self.rows(count),
            self._bytes[slots:weights].view(torch.int64).view(count, top_k),
            self._bytes[weights:end].view(torch.float32).view(count, top_k),
        )


class DeviceOps:
    """Slots and weights stay on the device."""

    reads_peers = False

    def buffer(self, window: Tensor, hidden_size: int, dtype: torch.dtype) -> StagingBuffer:
        return DeviceStagingBuffer(window, hidden_size, dtype)

    def array(self, x: Tensor) -> Array:
        return x

    def tensor(self, array: Array) -> Tensor:
        tensor: Tensor = array
        return tensor

    def join(self, arrays: Sequence[Array]) -> Array:
        return torch.cat(list(arrays))

    def choose(self, slot_TK: Array, num_slots: int, size: int) -> list[Array]:
        goes_TG = torch.zeros(slot_TK.shape[0], size, dtype=torch.bool, device=slot_TK.device)
        goes_TG.scatter_(1, slot_TK.div(num_slots, rounding_mode="floor"), True)
        return [goes_TG[:, rank].nonzero().flatten() for rank in range(size)]

    def count(self, slot_TK: Array, num_slots: int, size: int) -> list[int]:
        rank_P = slot_TK.flatten().div(num_slots, rounding_mode="floor")
        counts: list[int] = torch.bincount(rank_P, minlength=size).tolist()
        return counts

    def count_here(self, slot_NK: Array, first_slot: int, num_slots: int, counts: Sequence[int]) -> list[int]:
        here_NK = (slot_NK >= first_slot) & (slot_NK < first_slot + num_slots)
        parts = torch.split(here_NK, list(counts))
        here: list[int] = torch.stack([part.sum() for part in parts]).tolist()
        return here


def nvshmem_lanes(
    group: DeviceGroup, num_slots: int, hidden_size: int, dtype: torch.dtype, num_lanes: int, rows: str
) -> list[ShmAllToAll]:
    """rows: how they travel to the experts (ep/rows.py). One rank alone will do, to try it out."""
    core = start(group)
    heap = NvshmemHeap(group, core)
    signals = NvshmemSignals(heap, group, core)
    ops = DeviceOps()
    return [ShmAllToAll(heap, signals, num_slots, hidden_size, dtype, rows=rows, ops=ops) for _ in range(num_lanes)]
