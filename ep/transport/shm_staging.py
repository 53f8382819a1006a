"""The staging buffers that ranks keep for each other (ep/backends/shm.py): what lies in one, and how more than one
holds is passed through it.

Legend: D hidden size, K experts per token, n rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ep.transport.heap import Signals

Ints = npt.NDArray[np.int64]
Array = Any  # slots, weights and numbers of tokens in the form's own kind: numpy's on the host, tensors on a device
Fields = tuple[Tensor, Array, Array]  # x [n, D], slot [n, K], weight [n, K]

SLOT_BYTES, WEIGHT_BYTES = 8, 4
SMALL_BYTES = 1 << 16  # copied without leaving the interpreter
NUM_VIEWS = 1024  # kept ready per staging buffer


class StagingBuffer:
    """Memory for rows of one sender: the hidden states, then the slots, then the weights."""

    def __init__(self, window: Tensor, hidden_size: int, dtype: torch.dtype) -> None:
        self._bytes = window
        self._memory: npt.NDArray[np.uint8] = window.numpy() if window.is_cpu else np.empty(0, dtype=np.uint8)
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._row_bytes = hidden_size * dtype.itemsize
        self._views: dict[tuple[int, int], Fields] = {}
        self._rows: dict[int, Tensor] = {}

    @property
    def address(self) -> int:
        """Where it lies in this process."""
        return self._bytes.data_ptr()

    def views(self, count: int, top_k: int) -> Fields:
        """The fields of `count` rows."""
        ready = self._views.get((count, top_k))
        if ready is None:
            slots, weights, end = self._sections(count, top_k)
            ready = (
                self.rows(count),
                self._memory[slots:weights].view(np.int64).reshape(count, top_k),
                self._memory[weights:end].view(np.float32).reshape(count, top_k),
            )
            if len(self._views) >= NUM_VIEWS:
                self._views.clear()
            self._views[count, top_k] = ready
        return ready

    def rows(self, count: int) -> Tensor:
        """The hidden states of `count` rows."""
        ready = self._rows.get(count)
        if ready is None:
            ready = self._bytes[: count * self._row_bytes].view(self._dtype).view(count, self._hidden_size)
            if len(self._rows) >= NUM_VIEWS:
                self._rows.clear()
            self._rows[count] = ready
        return ready

    def fill(self, fields: Fields) -> None:
        x, slot, weight = self.views(*fields[1].shape)
        x.copy_(fields[0])
        slot[:] = fields[1]
        weight[:] = fields[2]

    def copy(self, other: StagingBuffer, count: int, top_k: int) -> None:
        """The same `count` rows as another staging buffer has."""
        end = self._sections(count, top_k)[2]
        if end <= SMALL_BYTES:
            self._memory[:end] = other._memory[:end]
        else:
            self._bytes[:end].copy_(other._bytes[:end])

    def _sections(self, count: int, top_k: int) -> tuple[int, int, int]:
        """Where the slots begin, where the weights begin, and where they end."""
        slots = -(-count * self._row_bytes // SLOT_BYTES) * SLOT_BYTES
        weights = slots + count * top_k * SLOT_BYTES
        return slots, weights, weights + count * top_k * WEIGHT_BYTES


class RowOps(Protocol):
    """What the algorithm of ep/backends/shm.py does to slots and weights: on the host here, on a device in
    ep/backends/nvshmem.py."""

    reads_peers: bool  # reading a peer's memory costs no more than reading one's own

    def buffer(self, window: Tensor, hidden_size: int, dtype: torch.dtype) -> StagingBuffer: ...

    def array(self, x: Tensor) -> Array: ...

    def tensor(self, array: Array) -> Tensor: ...

    def join(self, arrays: Sequence[Array]) -> Array:
        """One after another, in new memory."""
        ...

    def choose(self, slot_TK: Array, num_slots: int, size: int) -> list[Array]:
        """For each rank the tokens that have a slot there."""
        ...

    def count(self, slot_TK: Array, num_slots: int, size: int) -> list[int]:
        """How many choices are of each rank's slots."""
        ...

    def count_here(self, slot_NK: Array, first_slot: int, num_slots: int, counts: Sequence[int]) -> list[int]:
        """How many choices are of these slots: of the first counts[0] tokens, of the next counts[1], ..."""
        ...


class HostOps:
    """numpy does so little in a fraction of torch's time."""

    reads_peers = True

    def buffer(self, window: Tensor, hidden_size: int, dtype: torch.dtype) -> StagingBuffer:
        return StagingBuffer(window, hidden_size, dtype)

    def array(self, x: Tensor) -> Array:
        return x.numpy()

    def tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array)

    def join(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate(arrays)

    def choose(self, slot_TK: Array, num_slots: int, size: int) -> list[Array]:
        num_tokens = slot_TK.shape[0]
        goes_TG = np.zeros((num_tokens, size), dtype=np.bool_)
        goes_TG[np.arange(num_tokens)[:, None], slot_TK // num_slots] = True
        return [np.flatnonzero(goes_TG[:, rank]) for rank in range(size)]

    def count(self, slot_TK: Array, num_slots: int, size: int) -> list[int]:
        counts: list[int] = np.bincount(slot_TK.ravel() // num_slots, minlength=size).tolist()
        return counts

    def count_here(self, slot_NK: Array, first_slot: int, num_slots: int, counts: Sequence[int]) -> list[int]:
        key_NK = slot_NK - first_slot
        here_NK = key_NK.view(np.uint64) < num_slots  # as unsigned, what is below is above too
        stops = list(itertools.accumulate(counts))
        return [int(np.count_nonzero(here_NK[stop - count : stop])) for stop, count in zip(stops, counts, strict=True)]


class Chunks:
    """What is longer than a staging buffer, after its first chunk."""

    def __init__(self, signals: Signals, peers: Sequence[int], size: int) -> None:
        self._signals = signals
        self._peers = peers
        self._full_word, self._free_word = signals.reserve(), signals.reserve()
        # Chunks so far: put at each rank, and taken from each rank.
        self._put = [0] * size
        self._taken = [0] * size

    def pass_on(
        self,
        coming: Sequence[int],
        going: Sequence[int],
        capacity: int,
        take: Callable[[int, int, int], None],
        put: Callable[[int, int, int], None],
    ) -> list[int]:
        """Take every chunk but the last from each peer, and put every chunk but the first at each peer.

        coming, going: rows from and to each rank; take, put: called with rank, first row, row past the last.
        Returns for each rank the first row of its last chunk, which is still in its staging buffer.
        """
        start = 0
        while True:
            stop = start + capacity
            senders = [peer for peer in self._peers if coming[peer] > stop]
            receivers = [peer for peer in self._peers if going[peer] > stop]
            if not senders and not receivers:
                return [max(0, count - 1) // capacity * capacity for count in coming]
            for peer in senders:
                take(peer, start, stop)
                self._taken[peer] += 1
                self._signals.send(peer, self._free_word, self._taken[peer])
            for peer in receivers:
                self._put[peer] += 1
                self._signals.wait(self._free_word, [peer], self._put[peer])
                put(peer, stop, min(stop + capacity, going[peer]))
                self._signals.send(peer, self._full_word, self._put[peer])
            for peer in senders:
                self._signals.wait(self._full_word, [peer], self._taken[peer])
            start = stop
