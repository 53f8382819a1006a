"""Graphs on a CPU: a stretch of Python that runs native kernels, captured once and replayed without the Python
(native/src/tape.h).

While it is captured everything runs as usual. The tape keeps which kernels ran and with which arguments, so whatever
they read and wrote must stay where it is: tensors that are made meanwhile come from a `Memory`, which lasts. What is
read from elsewhere (weights, the cache, the inputs of a step) is the caller's business. Only native kernels are on the
tape: an operation that torch computed, or a kernel whose arguments change from step to step, makes the recording void,
and `Recording.refused` says which one it was.

A call on a tape may find that it cannot go on: an exchange whose peers are late (native/src/exchange.cpp). Then the
tape stops, `Late` says what for, and after that has been waited for in Python, where waits are bounded and peers may be
lost, it goes on with the same call.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from native.features import Isa, isa
from native.library import function

Bytes = npt.NDArray[np.uint8]

_ALIGNED = 64
_CHUNK_BYTES = 1 << 20

_POINTER = ctypes.c_void_p
_tape_new = function("tape_new", ctypes.POINTER(_POINTER))
_tape_free = function("tape_free", _POINTER)
_tape_begin = function("tape_begin", _POINTER)
_tape_end = function("tape_end", _POINTER, ctypes.POINTER(ctypes.c_char_p))


class _Stop(ctypes.Structure):
    """TapeStop of tape.h."""

    _fields_ = (
        ("at", ctypes.c_int64),
        ("by", ctypes.c_void_p),
        ("reason", ctypes.c_int64),
        ("mark", ctypes.c_int64),
    )

    at: int
    by: int
    reason: int
    mark: int


_tape_play = function("tape_play", _POINTER, ctypes.c_int, ctypes.POINTER(_Stop))
_tape_mark = function("tape_mark", ctypes.c_int64)


class Late(NamedTuple):
    """Where a tape has stopped. key: of what stops it, as that has said; reason: its own number; mark: the last one
    that was passed."""

    key: int
    reason: int
    mark: int


def mark(place: int) -> None:
    """What comes next belongs to this place of the step, as `Late` tells it: a layer's number."""
    if isa() > Isa.NONE:
        _tape_mark(place)


def _unexpected(late: Late) -> None:
    raise AssertionError(f"nothing on the tape should wait: {late}")


class Memory:
    """What the tensors of recordings lie in. Recordings share it: of those made from one Memory only one is replayed at
    a time, and its results are gone when the next one begins."""

    def __init__(self) -> None:
        self._chunks: list[Bytes] = []

    def chunk(self, index: int, num_bytes: int) -> Bytes:
        """The index-th, or the first one after it that has so many bytes."""
        for chunk in self._chunks[index:]:
            if len(chunk) >= num_bytes:
                return chunk
        self._chunks.append(_aligned(max(num_bytes, _CHUNK_BYTES)))
        return self._chunks[-1]

    def index_of(self, chunk: Bytes) -> int:
        return next(index for index, other in enumerate(self._chunks) if other is chunk)

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)


class CpuGraphs:
    """Implements engine.capture.GraphLibrary: graphs of one lane share their memory."""

    def __init__(self, wait: Callable[[Late], None] = _unexpected) -> None:
        """wait: until a tape that has stopped may go on; it may raise instead."""
        self._wait = wait
        self._memories: dict[int, Memory] = {}

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def series(self, lane: int) -> Recording:
        return Recording(self._memories.setdefault(lane, Memory()), self._wait)


class Recording:
    """One tape, or several with something in between that is not recorded. Not thread-safe; a thread records once at a
    time.

    refused: "", or why it cannot be replayed.
    """

    def __init__(self, memory: Memory, wait: Callable[[Late], None] = _unexpected) -> None:
        self.refused = ""
        self.wait = wait
        self._places = _Places(memory)
        self._kept: list[Tensor] = []  # made by torch in a form of its own

    def new(self) -> Tape:
        return Tape(self)

    def empty_like(self, x: Tensor) -> Tensor:
        """A tensor that stays, of x's shape and dtype."""
        return self._places.empty(x.shape, x.dtype)

    def refuse(self, reason: str) -> None:
        self.refused = self.refused or reason

    def keep(self, tensor: Tensor) -> None:
        """It is not freed before the recording is."""
        self._kept.append(tensor)


class Tape:
    """Kernel calls, which `replay` makes again with as many threads as they were recorded with. It keeps its recording,
    and so the memory of all the tensors."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._mode: _Watch | None = None
        self._num_threads = torch.get_num_threads()
        self._handle = ctypes.c_void_p()
        _tape_new(ctypes.byref(self._handle))
        free = weakref.finalize(self, _tape_free, self._handle)
        free.atexit = False

    def begin(self) -> None:
        """Record what this thread does, until `end`."""
        assert self._mode is None
        self._mode = _Watch(self._recording)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        _tape_begin(self._handle)

    def end(self) -> None:
        mode, self._mode = self._mode, None
        assert mode is not None
        refused = ctypes.c_char_p()
        _tape_end(self._handle, ctypes.byref(refused))
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if refused.value is not None:
            self._recording.refuse(f"{refused.value.decode()} takes other arguments in every step")

    def replay(self) -> None:
        """Raises what waiting for something late does."""
        stop = _Stop()
        _tape_play(self._handle, self._num_threads, stop)
        while stop.at >= 0:
            self._recording.wait(Late(stop.by, stop.reason, stop.mark))
            _tape_play(self._handle, self._num_threads, stop)


class _Places:
    """Memory of one recording, from the beginning of the Memory on; what is freed is given away again.

    That is safe because a tape is replayed in the order in which it was recorded.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._chunk = memory.chunk(0, _ALIGNED)
        self._used = 0
        self._free: dict[int, list[Bytes]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        num_bytes = count * dtype.itemsize
        place = self._take(max(_ALIGNED, -(-num_bytes // _ALIGNED) * _ALIGNED))
        # numpy's view dies with the last tensor on it: that is how it is known that its place is free.
        view = place[:num_bytes]
        freed = weakref.finalize(view, self._free[len(place)].append, place)
        freed.atexit = False
        if num_bytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.from_numpy(view).view(dtype).view(tuple(shape))

    def _take(self, num_bytes: int) -> Bytes:
        free = self._free.setdefault(num_bytes, [])
        if free:
            return free.pop()
        if self._used + num_bytes > len(self._chunk):
            index = self._memory.index_of(self._chunk)
            self._chunk, self._used = self._memory.chunk(index + 1, num_bytes), 0
        self._used += num_bytes
        return self._chunk[self._used - num_bytes : self._used]


def _aligned(num_bytes: int) -> Bytes:
    memory = np.empty(num_bytes + _ALIGNED, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + num_bytes]


_aten = torch.ops.aten
_NEW = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch: new tensors get memory that stays, views are let through, others make the
    recording void."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch need not keep its compiler out of `__torch_dispatch__`. To do so it would import that compiler
        (892 modules, about a second) in the first step that is recorded, and nothing here is compiled by it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _NEW:
            if result.is_contiguous() and result.device.type == "cpu":
                return self._recording.empty_like(result)
            self._recording.keep(result)
        elif func._schema.is_mutable or not _only_views(result, args):
            self._recording.refuse(f"torch computes {func}")
        return result


def _only_views(result: Any, args: Sequence[Any]) -> bool:
    """Whether the result is nothing but other views of the tensors that it was made from."""
    given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    results = result if isinstance(result, tuple | list) else (result,)
    return all(isinstance(part, Tensor) and part.untyped_storage().data_ptr() in given for part in results)
