"""A rank's cache in memory that outlives the rank: what it has computed of its sequences can be taken over by another.

The first process of a machine makes two files in memory for each rank and keeps them. A rank takes the older one and
lays in it its cache (`CacheMemory`), and which blocks each row of its batch has (`CacheRows`); the other one holds what
the process before it has left, until `forget_former`. Whoever takes over a sequence of a rank that was lost finds it in
either by its number (`FormerCache`), and reads its rows by pread(2): a file that shrinks meanwhile is read short, and a
mapping of it would end the process.

The file: HEADER_BYTES of header, the arrays of CacheRows, then the fields of the cache in the order of
`spec.places_of`. A rank that has ended cannot have written half a row that counts: rows of the cache count as far as
tokens were released, or as far as an earlier step has computed them.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache.memory import CacheMemory
from cache.rows import CacheRows
from cache.spec import CacheSizes, CacheSpec, places_of, token_groups

MAGIC = b"moesaic cache 1\n"
HEADER_BYTES = 4096
_HEADER = struct.Struct("<16sQQ32s")  # magic, life of the file (one more than the other's), process, layout
_ALIGNED = 4096


class Layout(NamedTuple):
    """What lies in such a file; all ranks of a server have the same. columns: of a row's table of blocks."""

    spec: CacheSpec
    sizes: CacheSizes
    num_rows: int
    columns: int

    @property
    def digest(self) -> bytes:
        return blake2b(repr(self).encode(), digest_size=32).digest()

    @property
    def num_tables(self) -> int:
        return len(token_groups(self.spec))

    @property
    def rows_bytes(self) -> int:
        return CacheRows.num_bytes(self.num_rows, self.columns, self.num_tables)

    def blocks_at(self, table: int, row: int) -> int:
        """Where that row of a table of blocks begins."""
        before = (table * self.num_rows + row) * self.columns
        return HEADER_BYTES + CacheRows.num_bytes(self.num_rows, 0, 0) + 8 * before

    def offsets(self) -> tuple[list[int], int]:
        """Where each of `places_of` begins, and the end of the last one."""
        offsets, end = [], HEADER_BYTES + _up(self.rows_bytes)
        for place in places_of(self.spec, self.sizes):
            offsets.append(end)
            end += _up(place.num_rows * place.field.num_bytes)
        return offsets, end


def can_outlive(spec: CacheSpec) -> bool:
    """Whether what such a cache has of a sequence is still there when a token more has been computed than was released:
    not of a window, which may have gone on, nor of a state."""
    return all(group.kind == "paged" for group in spec)


class SharedCache:
    """The memory of a rank that begins, in the older one of its files. Raises OSError."""

    def __init__(self, paths: Sequence[Path], layout: Layout, process: int) -> None:
        """paths: of the rank's files. process: engine.process.orphan.life_of this process."""
        files = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
        try:
            lives = [_read_header(file)[0] for file in files]
            own = lives.index(min(lives))
            offsets, size = layout.offsets()
            os.ftruncate(files[own], 0)  # what it held is gone, and its memory is the system's again
            os.ftruncate(files[own], size)
            self._map = mmap.mmap(files[own], size)
            self._map.madvise(mmap.MADV_HUGEPAGE)
            os.pwrite(files[own], _HEADER.pack(MAGIC, max(lives) + 1, process, layout.digest), 0)
        finally:
            for file in files:
                os.close(file)
        self._former = [path for place, path in enumerate(paths) if place != own]
        memory = np.frombuffer(self._map, dtype=np.uint8)
        self.rows = CacheRows(memory[HEADER_BYTES:], layout.num_rows, layout.columns, layout.num_tables)
        places = zip(places_of(layout.spec, layout.sizes), offsets, strict=True)
        tensors = [memory[start : start + place.num_rows * place.field.num_bytes] for place, start in places]
        self.fields: list[Tensor] = [torch.from_numpy(memory) for memory in tensors]  # bytes, as `places_of` has them

    def forget_former(self) -> None:
        """Give the system the memory of what the process before this one has left."""
        for path in self._former:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(file, 0)
            os.close(file)


class Found(NamedTuple):
    """A sequence in a former rank's file. life: of the file; a reader looks again when it has read."""

    path: Path
    life: int
    row: int
    num_tokens: int  # that are certainly computed


class FormerCache:
    """The sequences of ranks of this machine that have ended. paths: the files of a rank, [] where they are not here.
    alive: whether a process, by its life, has not ended: what it has may change."""

    def __init__(self, paths: Callable[[int], Sequence[Path]], layout: Layout, alive: Callable[[int], bool]) -> None:
        self._paths = paths
        self._layout = layout
        self._alive = alive

    def find(self, rank: int, sequence_id: int, num_released: int) -> Found | None:
        """sequence_id: what that rank called it. num_released: tokens that are computed as it has released what comes
        of them; 0: it has released none."""
        for path in self._paths(rank):
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                life, process, digest = _read_header(file)
                if not life or digest != self._layout.digest or self._alive(process):
                    continue
                size = CacheRows.num_bytes(self._layout.num_rows, 0, 0)
                raw = os.pread(file, size, HEADER_BYTES)
                if len(raw) < size:
                    continue
                rows = CacheRows(np.frombuffer(raw, dtype=np.uint8), self._layout.num_rows, 0, 0)
                row = rows.find(sequence_id)
                if row >= 0:
                    held = int(rows.num_blocks[row]) * self._layout.sizes.block_size
                    count = min(rows.certain(row, num_released), held)
                    return Found(path, life, row, count) if count else None
            finally:
                os.close(file)
        return None

    def read(self, found: Found, tables: Sequence[Sequence[int]], memory: CacheMemory) -> bool:
        """Write what was found to blocks of `memory`: tables[i][n] is where the n-th block of the i-th token group goes
        (negative: nowhere). False: it is not there any more, and nothing of these blocks counts."""
        try:
            file = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            offsets, _ = self._layout.offsets()
            block_size = self._layout.sizes.block_size
            num_blocks = -(-found.num_tokens // block_size)
            for place, start in zip(places_of(self._layout.spec, self._layout.sizes), offsets, strict=True):
                if place.table < 0:
                    continue
                size = place.field.num_bytes * block_size
                raw = os.pread(file, 8 * num_blocks, self._layout.blocks_at(place.table, found.row))
                if len(raw) < 8 * num_blocks:
                    return False
                source = np.frombuffer(raw, dtype=np.int64).tolist()
                target = memory.layers[place.layer][place.number].view(torch.uint8).view(-1).numpy()
                for first, count, to in _runs(source, tables[place.table][:num_blocks]):
                    there = target[to * size : (to + count) * size].data
                    if os.preadv(file, [there], start + first * size) != len(there):
                        return False
            return _read_header(file)[0] == found.life
        except OSError:
            return False
        finally:
            os.close(file)


def _runs(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first block there, how many, first block here) of blocks that follow each other in both."""
    runs: list[tuple[int, int, int]] = []
    for one, to in zip(source, target, strict=True):
        if to < 0:
            continue
        if runs:
            first, count, here = runs[-1]
            if (first + count, here + count) == (one, to):
                runs[-1] = first, count + 1, here
                continue
        runs.append((one, 1, to))
    return runs


def _read_header(file: int) -> tuple[int, int, bytes]:
    """Life (0: nothing is in it), process, digest of the layout."""
    raw = os.pread(file, _HEADER.size, 0)
    if len(raw) < _HEADER.size:
        return 0, 0, b""
    magic, life, process, digest = _HEADER.unpack(raw)
    return (int(life), int(process), bytes(digest)) if magic == MAGIC else (0, 0, b"")


def _up(number: int) -> int:
    return -(-number // _ALIGNED) * _ALIGNED
