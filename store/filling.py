"""Weights as torch tensors in a store (store/memory.py): ranks fill it together, each takes all of it.

A *piece* is what a model names (a layer without its experts, the experts of a layer). It is made in a rank's own
memory, which stays in the processor's cache where it is small, and written to the store. What is large is cut into
units. Pieces and units stand in one queue, from which ranks claim them one by one; a rank makes one on each of its
threads at a time.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from store.memory import Store, StoreError, await_parts

CLAIMED_PER_THREAD = 4
FILL_SECONDS = 3600.0  # for another rank that fills: it ends or is killed when it does not get on
LINE = 64  # bytes; every tensor begins on one
_LENGTH_BYTES = 8


class Whole(Struct, frozen=True):
    """A piece of tensors by name. make: reads and packs them, and returns the keys of the checkpoint that were used;
    tensors: what there is then; take: use these instead of one's own; skip: these keys were used by another rank."""

    make: Callable[[], Sequence[str]]
    tensors: Callable[[], Mapping[str, Tensor]]
    take: Callable[[Mapping[str, Tensor]], None]
    skip: Callable[[Sequence[str]], None]


class Units(Struct, frozen=True):
    """A piece of `count` units. form: what the checkpoint makes of it, in a word; like(form): tensors of the shapes and
    dtypes that it has then, of which each unit has its part of the first dimension, and which are not written to; take:
    use these instead; make(unit): its part of each, valid until the same thread makes the next one; skip(unit): another
    rank has written it."""

    count: int
    form: Callable[[], str]
    like: Callable[[str], Sequence[Tensor]]
    take: Callable[[Sequence[Tensor]], None]
    make: Callable[[int], Sequence[Tensor]]
    skip: Callable[[int], None]

    @property
    def num_parts(self) -> int:
        """Its description, its memory, its units, its large pages."""
        return 3 + self.count


Piece = Whole | Units


def take_all(store: Store, pieces: Sequence[Piece], seconds: float = FILL_SECONDS) -> int:
    """Fill what no other rank has filled, and have every piece use the store. Returns the number of parts that this
    rank has made. Raises StoreError when other ranks take longer than `seconds`."""
    numbered, num_parts = _numbered(pieces)
    if not store.complete:
        store.begin(num_parts)
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            work = _Work(store, numbered, pool if threads > 1 else None, threads)
            await_parts(work.go_on, seconds)
        if threads > 1:  # of the libraries that know one number only, and have heard of 1
            torch.set_num_threads(threads)
        store.finish()
        return work.made
    if store.num_parts != num_parts:
        raise StoreError(f"the store of weights has {store.num_parts} parts, the model {num_parts}")
    for number, piece in numbered:
        if isinstance(piece, Whole):
            piece.take(_read_tensors(store, number))
        else:
            _take_region(store, number, piece)
    return 0


def _numbered(pieces: Iterable[Piece]) -> tuple[list[tuple[int, Piece]], int]:
    """Each piece with the number of its first part, and how many parts there are."""
    numbered, end = [], 0
    for piece in pieces:
        numbered.append((end, piece))
        end += 1 if isinstance(piece, Whole) else piece.num_parts
    return numbered, end


class _Part(Struct, frozen=True):
    """make: write it, on any thread; take: another rank has. needs: parts that must be full before."""

    number: int
    make: Callable[[], None]
    take: Callable[[], None]
    needs: range = range(0)


class _Work:
    """made: parts that this rank has filled."""

    def __init__(
        self, store: Store, numbered: Iterable[tuple[int, Piece]], pool: ThreadPoolExecutor | None, threads: int
    ) -> None:
        """pool: of so many threads; None: parts are made on this one."""
        self.made = 0
        self._store = store
        self._pool, self._threads = pool, threads
        self._made: SimpleQueue[tuple[_Part, BaseException | None]] = SimpleQueue()
        self._num_making = 0
        self._left: list[_Part] = []
        for number, piece in numbered:
            if isinstance(piece, Whole):
                self._left.append(self._whole(number, piece))
            else:
                self._left += self._units(number, piece)

    def go_on(self) -> bool:
        """Make every part that is left and not claimed; whether some are still being made by others. Claims are this
        thread's business: the others of a process would share them."""
        left, self._left = self._left, []
        full = self._store.full_parts()
        try:
            for part in left:
                if full[part.number]:
                    part.take()
                elif all(full[number] for number in part.needs) and self._store.claim(part.number):
                    self._begin(part)
                else:
                    self._left.append(part)
            while self._num_making:
                self._end()
        except BaseException:
            while self._num_making:
                part, _ = self._next_made()
                self._store.release(part.number)
            raise
        return bool(self._left)

    def _begin(self, part: _Part) -> None:
        """And wait for others where more are claimed than threads need: this one may have to wait for the interpreter,
        and they are not to wait for it."""
        self._num_making += 1
        if self._pool is None:
            self._make(part)
        else:
            self._pool.submit(self._make, part)
        while self._num_making > (CLAIMED_PER_THREAD * self._threads if self._pool else 0):
            self._end()

    def _make(self, part: _Part) -> None:
        try:
            part.make()
        except BaseException as error:
            self._made.put((part, error))
        else:
            self._made.put((part, None))

    def _end(self) -> None:
        """Of the first that has been made."""
        part, error = self._next_made()
        if error is not None:
            self._store.release(part.number)
            raise error
        self._store.fill(part.number)
        self.made += 1

    def _next_made(self) -> tuple[_Part, BaseException | None]:
        made = self._made.get()
        self._num_making -= 1
        return made

    def _whole(self, number: int, piece: Whole) -> _Part:
        store = self._store

        def make() -> None:
            _write_tensors(store, number, piece.make, piece.tensors)
            piece.take(_read_tensors(store, number))

        def take() -> None:
            piece.take(_read_tensors(store, number))
            piece.skip(_described(store, number).notes)

        return _Part(number, make, take)

    def _units(self, number: int, piece: Units) -> Iterable[_Part]:
        """The first two have no order: a unit can be made as soon as there is room for all."""
        store = self._store
        form = piece.form()
        like = piece.like(form)
        starts, total = _starts(like)
        offset = store.room(number + 1, total)
        piece.take(_views(store, offset, like))

        def describe() -> None:
            text = _describe({str(index): tensor for index, tensor in enumerate(like)}, [form])
            store.write(store.room(number, len(text)), text)

        def unit(index: int) -> _Part:
            def make() -> None:
                ends = [[end * tensor.nbytes // piece.count for end in (index, index + 1)] for tensor in like]
                for start, (first, last) in zip(starts, ends, strict=True):  # others will write to the same pages soon
                    store.pages.prepare(offset + start + first, last - first)
                for start, (first, last), made in zip(starts, ends, piece.make(index), strict=True):
                    assert made.nbytes == last - first
                    store.write(offset + start + first, _bytes_of(made))

            return _Part(number + 2 + index, make, lambda: piece.skip(index))

        units = range(number + 2, number + 2 + piece.count)
        return [
            _Part(number, describe, _nothing),
            _Part(number + 1, _nothing, _nothing),
            *(unit(index) for index in range(piece.count)),
            _Part(units.stop, lambda: store.pages.enlarge(offset, total), _nothing, units),
        ]


def _nothing() -> None:
    pass


def _take_region(store: Store, number: int, piece: Units) -> None:
    """Of a complete store, which says itself in what form the units are."""
    described = _described(store, number)
    like = piece.like(described.notes[0])
    found = [(name, dtype, shape) for name, dtype, shape, _ in described.tensors]
    wanted = [(str(index), _name(tensor.dtype), list(tensor.shape)) for index, tensor in enumerate(like)]
    if found != wanted:
        raise StoreError(f"the store of weights has {found}, the model {wanted}")
    piece.take(_views(store, store.offset(number + 1), like))


# ---- a part of tensors: the length of its description, the description (JSON), the tensors ----


class _Described(NamedTuple):
    """tensors: name, dtype, shape and where each begins, from `start` on."""

    start: int
    tensors: list[tuple[str, str, list[int], int]]
    notes: list[str]


def _describe(tensors: Mapping[str, Tensor], notes: Sequence[str]) -> bytes:
    starts, _ = _starts(tensors.values())
    described = [
        [name, _name(tensor.dtype), list(tensor.shape), start]
        for (name, tensor), start in zip(tensors.items(), starts, strict=True)
    ]
    text = json.dumps([described, list(notes)]).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _described(store: Store, part: int) -> _Described:
    offset = store.offset(part)
    length = int.from_bytes(store.read(offset, _LENGTH_BYTES), "little")
    tensors, notes = json.loads(store.read(offset + _LENGTH_BYTES, length))
    return _Described(offset + _up(_LENGTH_BYTES + length), [tuple(tensor) for tensor in tensors], notes)


def _write_tensors(
    store: Store, part: int, make: Callable[[], Sequence[str]], made: Callable[[], Mapping[str, Tensor]]
) -> None:
    keys = make()
    tensors = made()
    text = _describe(tensors, keys)
    starts, total = _starts(tensors.values())
    first = _up(len(text))
    offset = store.room(part, first + total)
    store.pages.prepare(offset, first + total)
    store.write(offset, text)
    for tensor, start in zip(tensors.values(), starts, strict=True):
        store.write(offset + first + start, _bytes_of(tensor.detach().contiguous()))
    store.pages.enlarge(offset, first + total)


def _read_tensors(store: Store, part: int) -> dict[str, Tensor]:
    described = _described(store, part)
    return {
        name: _tensor(store, described.start + start, torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
        for name, dtype, shape, start in described.tensors
    }


def _bytes_of(tensor: Tensor) -> ctypes.Array[ctypes.c_uint8]:
    """Where they lie; the tensor is contiguous."""
    return (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _up(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


def _starts(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """Where tensors begin that follow each other, and how much they take together."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += _up(tensor.nbytes)
    return starts, end


def _views(store: Store, offset: int, like: Sequence[Tensor]) -> list[Tensor]:
    return [_tensor(store, offset + start, tensor) for start, tensor in zip(_starts(like)[0], like, strict=True)]


def _tensor(store: Store, start: int, like: Tensor) -> Tensor:
    """Memory of the store as a tensor of this shape and dtype."""
    if not like.nbytes:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(store.buffer(start, like.nbytes), dtype=like.dtype).view(like.shape)
