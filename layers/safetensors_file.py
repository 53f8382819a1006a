"""One .safetensors file, mapped into memory: the header is checked once, tensors are views of the map.

Format: 8 bytes little-endian length of the header, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes
(https://github.com/huggingface/safetensors, section Format).
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from layers.identity import MAX_HEADER_BYTES, CheckpointError, check_open, opened, read_at
from layers.safetensors_header import HeaderError, TensorEntry, parse_header

RELEASED_AT_ONCE = 64 << 20  # bytes


class SafetensorsFile:
    """entries: every tensor of the file, by key. It stays open: what it was when it was opened can be read as long as
    this object lives, also when another file has taken its name.

    Raises CheckpointError if the file is missing, cut short or corrupt, or not the one that is `known`."""

    def __init__(self, path: Path, known: tuple[int, int, int, str] | None = None) -> None:
        """known: what it was at the start (layers/identity.py); None: whatever it is."""
        self.path = path
        self._known = known
        self._lock = threading.Lock()  # of the descriptor: a reading that was given up may still be under way
        self._released: tuple[int, int, int] | None = None  # where that begins and ends, and how many bytes of it
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                entries = self._parse(file, size)
                # A private writable map: torch takes no read-only buffers. Nothing writes to it.
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
                self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
                self._keep(os.dup(file.fileno()))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        self.check()
        self.entries = entries

    def _parse(self, file: BinaryIO, size: int) -> dict[str, TensorEntry]:
        """`entries`. file: from its beginning."""
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(f"{self.path}: not a safetensors file, or cut short ({size} bytes)")
        try:
            return parse_header(file.read(length), 8 + length, size)
        except HeaderError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def _keep(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    def check(self) -> None:
        """Raise CheckpointError, naming what differs, when the file is not what it was at the start."""
        if self._known is not None:
            check_open(self._descriptor, self.path, self._known)

    def fetch(self, name: str, index: int | None = None) -> Tensor:
        """A copy of the tensor, or of its part `index` along the first dimension. Raises CheckpointError, also for a
        file that was changed or cut short meanwhile."""
        entry = self.entries[name]
        shape, start, count = entry.shape, entry.start, entry.num_bytes
        if index is not None:
            shape, count = shape[1:], count // shape[0]
            start += index * count
        if not count:
            return torch.empty(shape, dtype=entry.dtype)
        return torch.frombuffer(self._read_again(start, count), dtype=torch.uint8).view(entry.dtype).view(shape)

    def _read_again(self, start: int, count: int) -> bytearray:
        with self._lock:
            try:
                return self._read(start, count)
            except CheckpointError:
                self._reopen()
                return self._read(start, count)

    def _read(self, start: int, count: int) -> bytearray:
        data = read_at(self._descriptor, self.path, start, count)
        self.check()  # after reading: whatever was written before has moved the time of change
        return data

    def _reopen(self) -> None:
        """The open file is of no use (any more): perhaps that which has its name now is, after a network file
        system's pause."""
        with opened(self.path) as descriptor:
            if self._known is not None:
                check_open(descriptor, self.path, self._known)
            kept = os.dup(descriptor)
        self._close()
        self._keep(kept)

    def view(self, name: str) -> Tensor:
        """The tensor's bytes as they lie in the file; valid while this object lives. Not to be written to."""
        entry = self.entries[name]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = self._bytes[entry.start : entry.start + entry.num_bytes]
        # Offsets need not be multiples of the element size.
        raw = raw if entry.start % entry.dtype.itemsize == 0 else raw.clone()
        return raw.view(entry.dtype).view(entry.shape)

    def release(self, name: str) -> None:
        """Let go of the memory that reading this tensor brought in (it stays in the system's file cache): with that of
        others, as all cores that run this process are told each time. What is still read comes in again."""
        entry = self.entries[name]
        start, end, count = entry.start, entry.start + entry.num_bytes, entry.num_bytes
        with self._lock:
            if self._released is not None:
                first, last, before = self._released
                start, end, count = min(start, first), max(end, last), count + before
            self._released = start, end, count
        if count >= RELEASED_AT_ONCE:
            self.release_all()

    def release_all(self) -> None:
        """Whatever `release` has not let go of yet."""
        with self._lock:
            released, self._released = self._released, None
        if released is not None:
            start = -(-released[0] // mmap.PAGESIZE) * mmap.PAGESIZE
            end = released[1] // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
