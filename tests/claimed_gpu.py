"""Tensors that claim to be on a GPU, on a machine without one: what the engine does with `device="cuda"` runs here as it is written.

A `GpuTensor` says that it is on "cuda:0"; its numbers lie in a tensor of the CPU, on which every operation is computed. The rules
of the real device are kept, and what breaks them raises: an operation on tensors of both devices, a kernel that is given memory of
the host, a grid that CUDA does not launch, memory that numpy wants to see, an operation that CUDA lacks for 8-bit floats. What makes
the host wait for the device, and what is copied between the two, is counted. Kernels of Triton run in the interpreter, or are
only looked at. torch.cuda.CUDAGraph is the fake of fake_cuda_graph.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from fake_cuda_graph import FakeGraph, launch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_support import _is_launched, _language_kept, _replaced, kernel_modules

GPU = torch.device("cuda", 0)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MOST = (2**31 - 1, 65535, 65535)  # programs of a launch along x, y, z
# Of 8-bit floats CUDA copies, converts, cuts and fills; it computes nothing with them.
_ON_FP8 = {
    "copy_", "_to_copy", "to", "view", "_unsafe_view", "slice", "select", "split", "chunk", "detach", "alias", "clone",
    "contiguous", "transpose", "t", "expand", "reshape", "flatten", "unsqueeze", "squeeze", "empty", "empty_like",
    "empty_strided", "new_empty", "as_strided", "_scaled_mm", "cat", "index_select", "zero_", "fill_", "zeros",
    "lift_fresh", "unbind", "numpy_T",
}  # fmt: skip
_WAITING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "bincount", "equal", "is_nonzero")
_COPYING = {"copy_", "_to_copy", "to"}


class GpuError(RuntimeError):
    """What a GPU would refuse, or should not be asked."""


@dataclass
class Seen:
    """What was noticed. waits: by operation, how often the host waited for the device; uploads: copies from the host's memory;
    pinned: those that it did not wait for; kernels: names of the kernels launched."""

    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    pinned: int = 0
    kernels: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        self.waits.clear()
        self.uploads.clear()
        self.kernels.clear()
        self.pinned = 0


_SEEN = Seen()
_PINNED: set[int] = set()  # storages


class GpuTensor(torch.Tensor):
    """inner: where the numbers are. To C++ it is of the device "meta", which has no memory: nothing can read it unseen."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> GpuTensor:
        with torch.inference_mode(inner.is_inference()):  # views of other tensors are not inference tensors
            made = torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
                device="meta",
            )  # fmt: skip
        made.inner = inner
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    is_cuda, is_cpu, is_meta = True, False, False

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def get_device(self) -> int:
        return 0

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor):  # C++ would make a tensor of the device that it believes in
            value = torch.full((), value, dtype=self.dtype, device=GPU)
        super().__setitem__(index, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees what makes tensors, which has none to be asked by."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation, on the device where its arguments are or where it is told to go."""
    leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor | torch.device)]
    ours = [x for x in leaves if isinstance(x, GpuTensor)]
    hosts = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, GpuTensor)]
    target = next((x.type for x in leaves if isinstance(x, torch.device)), None)
    name = func._schema.name.removeprefix("aten::")
    if not ours and target != "cuda":
        pinned = bool(kwargs.get("pin_memory"))
        made = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        if pinned:
            _PINNED.add(made.untyped_storage().data_ptr())
        return made
    _look(func, name, args, ours, hosts, target)
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if name in _COPYING and (target == "cpu" or (name == "copy_" and not isinstance(args[0], GpuTensor))):
        return args[0] if name == "copy_" else result
    same = {id(x.inner): x for x in ours}

    def outer(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return same[id(x)] if id(x) in same else GpuTensor(x)

    return tree_map(outer, result)


def _inner(x: Any) -> Any:
    if isinstance(x, GpuTensor):
        return x.inner
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _look(func: Any, name: str, args: Any, ours: list[GpuTensor], hosts: list[Tensor], target: str | None) -> None:
    """Raises for what breaks the device's rules, and counts what crosses its border."""
    masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
        isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]
    )
    if name in _WAITING or masks:
        _SEEN.waits[name] += 1
    if name in _COPYING and (hosts or target == "cpu"):
        if hosts and (target == "cuda" or (name == "copy_" and ours and ours[0] is args[0])):
            source = hosts[0].untyped_storage().data_ptr()
            _SEEN.uploads[name] += 1
            _SEEN.pinned += source in _PINNED
        else:
            _SEEN.waits["copy to the host"] += 1
        return
    for x in hosts:
        # A number in a tensor without dimensions may be anywhere, in what works element by element.
        if x.dim() or torch.Tag.pointwise not in func.tags:
            if not ours:
                raise GpuError(f"{func}: makes a tensor on the GPU of one of the host")
            raise GpuError(f"{func}: expected all tensors to be on the same device, found cuda:0 and cpu")
    if any(x.dtype in _FP8 for x in ours) and name not in _ON_FP8:
        raise GpuError(f"{func}: CUDA may have no such operation on 8-bit floats")


# ---- kernels ----


@dataclass
class _Launched:
    """Stands for a kernel. Its arguments are looked at; then it runs in the interpreter if there is one."""

    name: str
    interpreted: Any | None

    def __getitem__(self, grid: Any) -> Any:
        for size, most in zip(grid, _MOST, strict=False):
            if not isinstance(size, int) or not 0 < size <= most:
                raise GpuError(f"{self.name}: a grid of {tuple(grid)} cannot be launched")

        def run(*args: Any, **kwargs: Any) -> None:
            _SEEN.kernels[self.name] += 1
            known = [self._known(x) for x in args], {key: self._known(x) for key, x in kwargs.items()}
            if self.interpreted is not None:
                self.interpreted[grid](*known[0], **known[1])

        return lambda *args, **kwargs: launch(run, *args, **kwargs)

    def _known(self, x: Any) -> Any:
        if isinstance(x, GpuTensor):
            if x.numel() and x.data_ptr() % x.element_size():
                raise GpuError(f"{self.name}: a tensor that is not aligned")
            return x.inner
        if isinstance(x, TensorDescriptor):
            assert isinstance(x.base, GpuTensor), f"{self.name}: rows of the host"
            assert x.base.data_ptr() % 16 == 0 and all(s * x.base.element_size() % 16 == 0 for s in x.strides[:-1])
            return TensorDescriptor(x.base.inner, x.shape, x.strides, x.block_shape)
        if isinstance(x, Tensor):
            raise GpuError(f"{self.name}: is given memory of the host, {tuple(x.shape)} {x.dtype}")
        return x


@contextlib.contextmanager
def _kernels(numbers: bool) -> Iterator[None]:
    modules = kernel_modules()

    def stand_in(kernel: Any) -> Any:
        interpreted = InterpretedFunction(kernel.fn) if numbers else None
        return _Launched(kernel.__name__, interpreted) if _is_launched(kernel) else interpreted or kernel

    with contextlib.ExitStack() as stack:
        if numbers:
            stack.enter_context(np.errstate(all="ignore"))
            stack.enter_context(_language_kept())
            modules = (*modules, tl, tl.standard, tl.math)
        stack.enter_context(_replaced(modules, stand_in))
        yield


# ---- torch.cuda ----


class _Stream:
    def __init__(self, device: Any = None, **_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event


class _Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _CudaGraph(FakeGraph):
    """torch.cuda.CUDAGraph's own signatures."""

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        super().begin()

    def capture_end(self) -> None:
        super().end()


class _Threads(threading.local):
    """Modes belong to threads: one that says which device is its own gets ours."""

    mode: _Mode | None = None


@contextlib.contextmanager
def claimed_gpu(numbers: bool = True, memory: int = 1 << 34) -> Iterator[Seen]:
    """Within it there is one GPU of so many bytes. numbers: kernels run in the interpreter; else nothing but the shapes of what
    they write is true. Other threads have it once they call torch.cuda.set_device."""
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    threads = _Threads()

    def set_device(device: Any) -> None:
        assert device in (0, GPU)
        if threads.mode is None:
            threads.mode = _Mode()
            threads.mode.__enter__()
            # torch.tensor(..., device="cuda") asks us to move what it has made, as it asks torch's own fake tensors.
            torch._C._set_only_lift_cpu_tensors(True)

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        yield

    found = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 1, "is_initialized": lambda: True,
        "get_device_capability": lambda device=None: (9, 0), "get_device_name": lambda device=None: "a claimed GPU",
        "mem_get_info": lambda device=None: (memory, memory), "set_device": set_device, "current_device": lambda: 0,
        "synchronize": lambda device=None: None, "empty_cache": lambda: None, "Event": _Event, "Stream": _Stream,
        "stream": on_stream, "current_stream": lambda device=None: _Stream(), "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": _CudaGraph,
    }  # fmt: skip
    before = {name: vars(torch.cuda)[name] for name in found}
    _SEEN.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_kernels(numbers))
        stack.callback(lambda: [setattr(torch.cuda, name, kept) for name, kept in before.items()])
        for name, value in found.items():
            setattr(torch.cuda, name, value)
        stack.callback(_PINNED.clear)
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        if "_host_emptyCache" not in vars(torch._C):  # torch.cuda.graph calls it; builds without CUDA have none
            torch._C._host_emptyCache = lambda: None
            stack.callback(delattr, torch._C, "_host_emptyCache")
        set_device(GPU)
        try:
            yield _SEEN
        finally:
            mode, threads.mode = threads.mode, None
            assert mode is not None
            mode.__exit__(None, None, None)


def host(x: Tensor) -> Tensor:
    """Its numbers, for a test to look at: nobody waits."""
    return x.inner if isinstance(x, GpuTensor) else x
