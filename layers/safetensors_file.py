"""One .safetensors file, mapped into memory: the header is checked once, tensors are views of the map.

Format: 8 bytes little-endian length of the header, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes
(https://github.com/huggingface/safetensors, section Format).
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_HEADER_BYTES = 100 << 20  # the format's own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line with the file or key, and what is wrong."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file
    num_bytes: int


class SafetensorsFile:
    """entries: every tensor of the file, by key. Raises CheckpointError if the file is missing, cut short or corrupt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(8)
                length = int.from_bytes(head, "little")
                if len(head) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
                    raise CheckpointError(f"{path}: not a safetensors file, or cut short ({size} bytes)")
                header = file.read(length)
                # A private writable map: torch takes no read-only buffers. Nobody writes to it.
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            raw = json.loads(header)
            raw.pop("__metadata__", None)
            self.entries = {name: self._entry(name, entry, 8 + length, size) for name, entry in raw.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: corrupt safetensors header: {error!r}") from None

    def _entry(self, name: str, raw: dict[str, object], data: int, size: int) -> TensorEntry:
        dtype = DTYPES.get(str(raw["dtype"]))
        if dtype is None:
            raise CheckpointError(f"{self.path}: {name}: unknown dtype {raw['dtype']!r}")
        shape, offsets = raw["shape"], raw["data_offsets"]
        if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
            raise CheckpointError(f"{self.path}: {name}: corrupt entry in the safetensors header")
        start, end = (int(offset) for offset in offsets)
        dims = tuple(int(n) for n in shape)
        if start < 0 or end - start != math.prod(dims) * dtype.itemsize:
            raise CheckpointError(f"{self.path}: {name}: {end - start} bytes do not hold shape {list(dims)}")
        if data + end > size:
            raise CheckpointError(f"{self.path}: {name}: file is cut short ({size} bytes, {data + end} needed)")
        return TensorEntry(dtype, dims, data + start, end - start)

    def view(self, name: str) -> Tensor:
        """The tensor's bytes as they lie in the file; valid while this object lives. Not to be written to."""
        entry = self.entries[name]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start)
        # Offsets need not be multiples of the element size.
        raw = raw if entry.start % entry.dtype.itemsize == 0 else raw.clone()
        return raw.view(entry.dtype).view(entry.shape)

    def release(self, name: str) -> None:
        """Let go of the memory that reading this tensor brought in (it stays in the system's file cache)."""
        entry = self.entries[name]
        start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (entry.start + entry.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
