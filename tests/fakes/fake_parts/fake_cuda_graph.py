"""A fake of torch.cuda.CUDAGraph on the CPU: it records the operations of torch and repeats them on the same memory.

It follows the real one's rules: nothing between begin and end may read a tensor on the host, make one of the
host's numbers, or have a shape that depends on values; a replay computes nothing but what was recorded, from what its inputs hold then, and leaves its results
where the captured ones lay. Unlike the real one it runs the operations while it captures, and undoes them at the end: memory that was
there before is as it was, what they made is poisoned.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

_READ_ON_THE_HOST = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
}  # fmt: skip
_COPY_FROM_THE_HOST = {torch.tensor, torch.as_tensor, torch.asarray}  # from memory that is not pinned
_DEPEND_ON_VALUES = (
    "nonzero",
    "_local_scalar_dense",
    "masked_select",
    "unique",
    "bincount",
    "repeat_interleave.Tensor",
)


class FakeCaptureError(RuntimeError):
    """What the real library reports as cudaErrorStreamCaptureUnsupported."""


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_ON_THE_HOST | _COPY_FROM_THE_HOST:
            raise FakeCaptureError(f"operation not permitted when stream is capturing: {func.__name__}")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, Any, Any, Any]], before: list[tuple[Tensor, Tensor]]) -> None:
        """before: gets what each call overwrites, and a copy of it."""
        super().__init__()
        self._calls = calls
        self._before = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        masks = "index.Tensor" in name or "index_put" in name
        by_mask = masks and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])
        if by_mask or any(part in name for part in _DEPEND_ON_VALUES):
            raise FakeCaptureError(f"operation not permitted when stream is capturing: {name}")
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before += [(part, part.clone()) for part in _tensors(x)]
        result = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, result))
        return result


class _Capturing(threading.local):
    """Ranks may be threads, and each captures its own work."""

    graph: FakeGraph | None = None


_CAPTURING = _Capturing()


def launch(call: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for a kernel: call(*args, **kwargs) runs, and a graph that is being captured by this thread will repeat it. It
    returns nothing, and may write to the tensors that it is given."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        if _CAPTURING.graph is not None:
            _CAPTURING.graph.note(call, args, kwargs)
        call(*args, **kwargs)


class FakeLaunch:
    """Stands for a Triton kernel on the CPU."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return partial(launch, self._kernel[grid])


@dataclass
class FakeGraph:
    """Implements engine.capture.Graph."""

    calls: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)
    num_replays: int = 0
    _open: contextlib.ExitStack | None = None
    _before: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        assert self._open is None and not self.calls and _CAPTURING.graph is None
        _CAPTURING.graph = self
        self._open = contextlib.ExitStack()
        self._open.enter_context(_Functions())
        self._open.enter_context(_Operations(self.calls, self._before))

    def end(self) -> None:
        assert self._open is not None
        self._open.close()
        self._open = None
        _CAPTURING.graph = None
        for x, copy in reversed(self._before):
            x.copy_(copy)
        self._before.clear()
        poison(self.calls)

    def note(self, call: Any, args: Any, kwargs: Any) -> None:
        """A call that returns nothing and writes to what it is given."""
        self._before += [(x, x.clone()) for x in _tensors((args, kwargs))]
        self.calls.append((call, args, kwargs, None))

    def replay(self) -> None:
        assert self.calls and self._open is None
        self.num_replays += 1
        for func, args, kwargs, result in self.calls:
            for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                assert old.shape == new.shape, f"{func} gave {tuple(new.shape)}, but {tuple(old.shape)} when captured"
                if old.data_ptr() != new.data_ptr() and old.numel():
                    old.copy_(new)


def poison(calls: list[tuple[Any, Any, Any, Any]]) -> None:
    """The real library computes nothing while it captures: what was made is NaN until a replay."""
    given = {x.untyped_storage().data_ptr() for x in _outside(calls)}
    for *_, result in calls:
        for x in _tensors(result):
            if x.is_floating_point() and x.untyped_storage().data_ptr() not in given:
                x.fill_(torch.nan)


def _outside(calls: list[tuple[Any, Any, Any, Any]]) -> Iterator[Tensor]:
    """Arguments that no recorded call has made."""
    made: set[int] = set()
    for _, args, kwargs, result in calls:
        for x in _tensors((args, kwargs)):
            if x.untyped_storage().data_ptr() not in made:
                yield x
        made.update(x.untyped_storage().data_ptr() for x in _tensors(result))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


@dataclass
class FakeGraphLibrary:
    """Implements engine.capture.GraphLibrary and GraphSeries."""

    graphs: list[FakeGraph] = field(default_factory=list)
    num_sessions: int = 0

    refused = ""

    def series(self, lane: int) -> FakeGraphLibrary:
        return self

    def new(self) -> FakeGraph:
        self.graphs.append(FakeGraph())
        return self.graphs[-1]

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        self.num_sessions += 1
        yield

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)
