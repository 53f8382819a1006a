"""A rank's cache in memory that outlives the rank: what it has computed of its sequences can be taken over by another.

The first process of a machine makes two files in memory for each rank and keeps them. A rank takes the older one and
lays in it its cache (`CacheMemory`), and which blocks each row of its batch has (`CacheRows`); the other one holds what
the process before it has left, until `forget_former`. Whoever takes over a sequence of a rank that was lost finds it in
either by its number (`FormerCache`), and reads its rows by pread(2): a file that shrinks meanwhile is read short, and a
mapping of it would end the process.

The file: HEADER_BYTES of header, the arrays of CacheRows, the fields of the cache in the order of `spec.places_of`,
then the residual stream of the step under way (cache/residuals.py). A rank that has ended cannot have written half a
row that counts: rows of the cache count as far as tokens were released, or as far as an earlier step has computed them,
and those of layers before one at whose start the residual stream is kept; a state counts if its record says that it is
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
from cache.parts import Move, Taken, parts_of, reach
from cache.residuals import NUM_PLACES, Kept, KeptTokens, Residuals, no_residuals
from cache.rows import CacheRows
from cache.spec import CacheSizes, CacheSpec, places_of, token_groups

MAGIC = b"moesaic cache 1\n"
HEADER_BYTES = 4096
_HEADER = struct.Struct("<16sQQ32s")  # magic, life of the file (one more than the other's), process, layout
_ALIGNED = 4096


class Layout(NamedTuple):
    """What lies in such a file; all ranks of a server have the same. columns: of a row's table of blocks. kept_tokens,
    residual_bytes: the tokens of a step, at most, whose residual stream is kept, and its bytes of each."""

    spec: CacheSpec
    sizes: CacheSizes
    num_rows: int
    columns: int
    kept_tokens: int = 0
    residual_bytes: int = 0

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

    @property
    def residuals_at(self) -> int:
        return self.offsets()[1]

    @property
    def num_bytes(self) -> int:
        return self.kept_rows_at(NUM_PLACES) if self.kept_tokens else self.residuals_at

    def kept_rows_at(self, place: int, token: int = 0) -> int:
        """Where the residual stream of that token begins."""
        first = self.residuals_at + KeptTokens.num_bytes(self.num_rows)
        return first + (place * self.kept_tokens + token) * self.residual_bytes


class SharedCache:
    """The memory of a rank that begins, in the older one of its files. Raises OSError."""

    def __init__(self, paths: Sequence[Path], layout: Layout, process: int) -> None:
        """paths: of the rank's files. process: engine.process.orphan.life_of this process."""
        files = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
        try:
            lives = [_read_header(file)[0] for file in files]
            own = lives.index(min(lives))
            size = layout.num_bytes
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
        offsets, end = layout.offsets()
        places = zip(places_of(layout.spec, layout.sizes), offsets, strict=True)
        tensors = [memory[start : start + place.num_rows * place.field.num_bytes] for place, start in places]
        self.residuals = no_residuals()
        if layout.kept_tokens:
            self.residuals = Residuals(memory[end:], layout.num_rows, layout.kept_tokens, layout.residual_bytes)
        self.fields: list[Tensor] = [torch.from_numpy(memory) for memory in tensors]  # bytes, as `places_of` has them

    def forget_former(self) -> None:
        """Give the system the memory of what the process before this one has left."""
        for path in self._former:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(file, 0)
            os.close(file)


class Found(NamedTuple):
    """A sequence in a former rank's file. life: of the file; a reader looks again when it has read. rows: without
    tables. num_kept: further tokens, of the step that was under way: of layers at whose start, kept_layers, their
    residual stream was kept, from that row on."""

    path: Path
    life: int
    rows: CacheRows
    row: int
    num_tokens: int  # behind which one can go on
    num_kept: int = 0
    kept_layers: tuple[int, ...] = ()
    first_kept: int = 0


class FormerCache:
    """The sequences of ranks of this machine that have ended. paths: the files of a rank, [] where they are not here.
    alive: whether a process, by its life, has not ended: what it has may change."""

    def __init__(self, paths: Callable[[int], Sequence[Path]], layout: Layout, alive: Callable[[int], bool]) -> None:
        self._paths = paths
        self._layout = layout
        self._digest = layout.digest
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
                if not life or digest != self._digest or self._alive(process):
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
                    found = self._with_kept(file, Found(path, life, rows, row, count), most + 1)
                    return found if found.num_tokens or found.num_kept else None
            finally:
                os.close(file)
        return None

    def _with_kept(self, file: int, found: Found, most: int) -> Found:
        """most: as many tokens are known of the sequence."""
        layout = self._layout
        size = KeptTokens.num_bytes(layout.num_rows) if layout.kept_tokens else 0
        raw = os.pread(file, size, layout.residuals_at)
        if not size or len(raw) < size:
            return found
        kept = KeptTokens(np.frombuffer(raw, dtype=np.uint8), layout.num_rows)
        for stay, start, num, first in kept.entries():
            if stay == found.rows.stays[found.row] and start == found.num_tokens:
                layers = tuple(kept.layers.tolist())
                return found._replace(num_kept=min(num, most - start), kept_layers=layers, first_kept=first)
        return found

    def read(self, found: Found, held: Holding, memory: CacheMemory) -> list[Kept] | None:
        """Write what was found to the blocks and the record of `memory` that the sequence has here; of each token of
        the step that was under way, what is kept. None: it is not there any more, and nothing of them counts."""
        try:
            file = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            moves = self._moves(file, found, held)
            offsets, _ = self._layout.offsets()
            for place, start in zip(places_of(self._layout.spec, self._layout.sizes), offsets, strict=True):
                size = place.field.num_bytes
                target = memory.layers[place.layer][place.number].view(torch.uint8).view(-1).numpy()
                for move in moves[place.group]:
                    here = target[move.here * size : (move.here + move.num) * size].data
                    if os.preadv(file, [here], start + move.there * size) != len(here):
                        return None
            kept = self._kept(file, found)
            return kept if _read_header(file)[0] == found.life else None
        except (OSError, LookupError):
            return None
        finally:
            os.close(file)

    def _kept(self, file: int, found: Found) -> list[Kept]:
        """Raises LookupError when it is not there any more."""
        layout, count = self._layout, found.num_kept
        rows = np.empty((NUM_PLACES, count, layout.residual_bytes), dtype=np.uint8)
        for place in range(NUM_PLACES if count else 0):
            here = rows[place].reshape(-1).data
            if os.preadv(file, [here], layout.kept_rows_at(place, found.first_kept)) != len(here):
                raise LookupError("residuals")
        return [Kept(found.kept_layers, rows[:, index]) for index in range(count)]

    def _moves(self, file: int, found: Found, held: Holding) -> list[list[Move]]:
        """Of each group. Raises LookupError when the tables of blocks are not there any more."""
        num_tokens = found.num_tokens + found.num_kept

        def blocks(table: int) -> list[int]:
            size = 8 * -(-num_tokens // self._layout.sizes.block_size)
            raw = os.pread(file, size, self._layout.blocks_at(table, found.row))
            if len(raw) < size:
                raise LookupError(f"table {table}")
            numbers: list[int] = np.frombuffer(raw, dtype=np.int64).tolist()
            return numbers

        taken = Taken(found.rows, found.row, found.num_tokens, num_tokens, blocks, held)
        return [part.moves(taken) for part in self._parts]


def _read_header(file: int) -> tuple[int, int, bytes]:
    """Life (0: nothing is in it), process, digest of the layout."""
    raw = os.pread(file, _HEADER.size, 0)
    if len(raw) < _HEADER.size:
        return 0, 0, b""
    magic, life, process, digest = _HEADER.unpack(raw)
    return (int(life), int(process), bytes(digest)) if magic == MAGIC else (0, 0, b"")


def _up(number: int) -> int:
    return -(-number // _ALIGNED) * _ALIGNED
