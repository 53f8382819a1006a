"""The one file of this room that asks which device there is: opening it, what goes to it, what comes back, and its graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.graphs import Graph, GraphLibrary

Ints = npt.NDArray[np.int64]


def own_device(name: str, rank: int, ranks_per_machine: int) -> torch.device:
    """name: "cpu", or "cuda": the GPU with the rank's number in its machine."""
    return torch.device("cuda", rank % ranks_per_machine) if name == "cuda" else torch.device("cpu")


def open_device(name: str, rank: int, ranks_per_machine: int) -> torch.device:
    """The same, in use by this thread. Raises ValueError when it is not there."""
    device = own_device(name, rank, ranks_per_machine)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device cuda: torch {torch.__version__} finds no GPU here (--device cpu runs without one)")
    count = torch.cuda.device_count()
    if device.index >= count:
        raise ValueError(f"device cuda: rank {rank} is to have GPU {device.index} of its machine, which has {count}")
    use_device(device)
    return device


def check_room(device: torch.device, num_bytes: int) -> None:
    """Raises ValueError when so much more does not fit into the GPU's memory; a CPU's is not looked at."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        raise ValueError(
            f"{device}: weights and cache take {num_bytes >> 20} MiB, and {free >> 20} of {total >> 20} MiB are free "
            "(--gpu-memory-utilization, --kv-cache-memory-bytes)"
        )


def use_device(device: torch.device) -> None:
    """What this thread does with "the current device" is meant for this one: every thread has a current device of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def graph_library(device: torch.device) -> GraphLibrary:
    assert device.type == "cuda"
    return CudaGraphs(device)


# ---- what goes to the device ----


class Upload(Protocol):
    """Host arrays of one step to the device."""

    def tensor(self, array: Ints) -> Tensor:
        """int64, of the array's shape; on a GPU valid after `send`."""
        ...

    def send(self) -> None:
        """All arrays of the step have been given."""
        ...


def make_upload(device: torch.device, room: int) -> Upload:
    """room: the numbers of a large step; more are possible."""
    if device.type == "cpu":
        return SharedMemory()
    return PackedUpload(device, room, torch.cuda.Event, pinned=True)


class SharedMemory:
    """The CPU's own: nothing goes anywhere."""

    def tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array)

    def send(self) -> None:
        """It is there already."""


class Event(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PackedUpload:
    """All arrays of a step in one copy from pinned memory, which the host does not wait for.

    There are two such memories in turn: while the copy of one step may still be under way the next one is being written.
    """

    def __init__(self, device: torch.device, room: int, new_event: Callable[[], Event], pinned: bool) -> None:
        self._device, self._pinned, self._new_event = device, pinned, new_event
        self._hosts = [self._host(room) for _ in range(2)]
        self._events: list[Event | None] = [None, None]
        self._turn = 0
        self._used = 0
        self._target: Tensor | None = None

    def tensor(self, array: Ints) -> Tensor:
        end = self._used + array.size
        if self._target is None:
            self._begin(array.size)
        elif end > self._target.numel():  # rare: a step larger than any before
            self.send()
            self._hosts[self._turn] = self._host(2 * end)
            return self.tensor(array)
        assert self._target is not None
        end = self._used + array.size
        self._hosts[self._turn].numpy()[self._used : end] = array.ravel()
        part = self._target[self._used : end].view(array.shape)
        self._used = end
        return part

    def send(self) -> None:
        if self._target is None:
            return
        self._target[: self._used].copy_(self._hosts[self._turn][: self._used], non_blocking=True)
        event = self._events[self._turn] or self._new_event()
        event.record()
        self._events[self._turn] = event
        self._target = None
        self._used = 0
        self._turn = 1 - self._turn

    def _begin(self, size: int) -> None:
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        if size > self._hosts[self._turn].numel():
            self._hosts[self._turn] = self._host(2 * size)
        self._target = torch.empty(self._hosts[self._turn].numel(), dtype=torch.int64, device=self._device)

    def _host(self, size: int) -> Tensor:
        return torch.empty(max(1, size), dtype=torch.int64, pin_memory=self._pinned)


# ---- graphs ----


class CudaGraphs:
    """Implements engine.graphs.GraphLibrary. The graphs of a session share one pool of memory: they never run at the same
    time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: object = None

    def new(self) -> Graph:
        return _CudaGraph(self._pool)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """On a stream of its own, as capturing demands; the collector must not free a tensor meanwhile."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            if collecting:
                gc.enable()
            torch.cuda.synchronize(self._device)


class _CudaGraph:
    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture_begin(self) -> None:
        # Other threads (of the balancer) may use the GPU meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def capture_end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()
