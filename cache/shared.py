"""A rank's cache in memory that outlives the rank: what it has computed of its sequences can be taken over by another.

The first process of a machine makes two files in memory for each rank and keeps them. A rank takes the older one and
lays in it its cache (`CacheMemory`), and which blocks each row of its batch has (`CacheRows`); the other one holds what
the process before it has left, until `forget_former`. Whoever takes over a sequence of a rank that was lost finds it in
either by its number (`FormerCache`), and reads its rows by pread(2): a file that shrinks meanwhile is read short, and a
mapping of it would end the process.

The file: HEADER_BYTES of header, the arrays of CacheRows, then the fields of the cache in the order of
`spec.places_of`. A rank that has ended cannot have written half a row that counts: rows of the cache count as far as
tokens were released, or as far as an earlier step has computed them; a state counts if its record says that it is
whole (cache/rows.py). What each kind of group has of a sequence is in cache/parts.py.
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

from cache.manager import Holding
from cache.memory import CacheMemory
from cache.parts import Move, parts_of, reach
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
        return CacheRows.num_bytes(self.num_rows, self.columns, self.num_tables, self.sizes.num_records)

    @property
    def small_bytes(self) -> int:
        """Of CacheRows without its tables."""
        return CacheRows.num_bytes(self.num_rows, 0, 0, self.sizes.num_records)

    def blocks_at(self, table: int, row: int) -> int:
        """Where that row of a table of blocks begins."""
        return HEADER_BYTES + self.small_bytes + 8 * (table * self.num_rows + row) * self.columns

    def offsets(self) -> tuple[list[int], int]:
        """Where each of `places_of` begins, and the end of the last one."""
        offsets, end = [], HEADER_BYTES + _up(self.rows_bytes)
        for place in places_of(self.spec, self.sizes):
            offsets.append(end)
            end += _up(place.num_rows * place.field.num_bytes)
        return offsets, end


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
        sizes = layout.num_rows, layout.columns, layout.num_tables, layout.sizes.num_records
        self.rows = CacheRows(memory[HEADER_BYTES:], *sizes)
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
    """A sequence in a former rank's file. life: of the file; a reader looks again when it has read. rows: without
    tables."""

    path: Path
    life: int
    rows: CacheRows
    row: int
    num_tokens: int  # behind which one can go on


class FormerCache:
    """The sequences of ranks of this machine that have ended. paths: the files of a rank, [] where they are not here.
    alive: whether a process, by its life, has not ended: what it has may change."""

    def __init__(self, paths: Callable[[int], Sequence[Path]], layout: Layout, alive: Callable[[int], bool]) -> None:
        self._paths = paths
        self._layout = layout
        self._alive = alive
        self._parts = parts_of(layout.spec, layout.sizes.block_size)

    def find(self, rank: int, sequence_id: int, num_released: int, most: int) -> Found | None:
        """sequence_id: what that rank called it. num_released: tokens that are computed as it has released what comes
        of them; 0: it has released none. most: no more tokens are wanted."""
        for path in self._paths(rank):
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                life, process, digest = _read_header(file)
                if not life or digest != self._layout.digest or self._alive(process):
                    continue
                size, sizes = self._layout.small_bytes, self._layout.sizes
                raw = os.pread(file, size, HEADER_BYTES)
                if len(raw) < size:
                    continue
                memory = np.frombuffer(raw, dtype=np.uint8)
                rows = CacheRows(memory, self._layout.num_rows, 0, 0, sizes.num_records)
                row = rows.find(sequence_id)
                if row >= 0:
                    held = int(rows.num_blocks[row]) * sizes.block_size
                    count = reach(self._parts, rows, row, min(rows.certain(row, num_released), held, most))
                    return Found(path, life, rows, row, count) if count else None
            finally:
                os.close(file)
        return None

    def read(self, found: Found, held: Holding, memory: CacheMemory) -> bool:
        """Write what was found to the blocks and the record of `memory` that the sequence has here. False: it is not
        there any more, and nothing of them counts."""
        try:
            file = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            moves = self._moves(file, found, held)
            offsets, _ = self._layout.offsets()
            for place, start in zip(places_of(self._layout.spec, self._layout.sizes), offsets, strict=True):
                size = place.field.num_bytes
                target = memory.layers[place.layer][place.number].view(torch.uint8).view(-1).numpy()
                for move in moves[place.group]:
                    here = target[move.here * size : (move.here + move.num) * size].data
                    if os.preadv(file, [here], start + move.there * size) != len(here):
                        return False
            return _read_header(file)[0] == found.life
        except (OSError, LookupError):
            return False
        finally:
            os.close(file)

    def _moves(self, file: int, found: Found, held: Holding) -> list[list[Move]]:
        """Of each group. Raises LookupError when the tables of blocks are not there any more."""

        def blocks(table: int) -> list[int]:
            size = 8 * -(-found.num_tokens // self._layout.sizes.block_size)
            raw = os.pread(file, size, self._layout.blocks_at(table, found.row))
            if len(raw) < size:
                raise LookupError(f"table {table}")
            numbers: list[int] = np.frombuffer(raw, dtype=np.int64).tolist()
            return numbers

        return [part.moves(found.rows, found.row, found.num_tokens, blocks, held) for part in self._parts]


def _read_header(file: int) -> tuple[int, int, bytes]:
    """Life (0: nothing is in it), process, digest of the layout."""
    raw = os.pread(file, _HEADER.size, 0)
    if len(raw) < _HEADER.size:
        return 0, 0, b""
    magic, life, process, digest = _HEADER.unpack(raw)
    return (int(life), int(process), bytes(digest)) if magic == MAGIC else (0, 0, b"")


def _up(number: int) -> int:
    return -(-number // _ALIGNED) * _ALIGNED
