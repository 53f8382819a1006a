"""The one file of this room that asks which device there is: opening it, what goes to it, what comes back, and its
graphs."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dbo.alive import mark

log = logging.getLogger("moesaic.device")

Ints = npt.NDArray[np.int64]

OF_GRAPHS = "a lower --gpu-memory-utilization or fewer --cudagraph-capture-sizes leave more for graphs"
_WORD = 8  # bytes, to a multiple of which arrays of any dtype begin
_NAP_SECONDS = 5e-5


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


def check_room(device: torch.device, num_bytes: int, graph_bytes: int = 0) -> None:
    """Raises ValueError when weights and cache, and what is kept for graphs beside them, do not fit into the GPU's
    memory; a CPU's is not looked at."""
    if device.type == "cuda":
        check_free(str(device), *torch.cuda.mem_get_info(device), num_bytes, graph_bytes)


def check_free(name: str, free: int, total: int, num_bytes: int, graph_bytes: int) -> None:
    """The same, for so many bytes."""
    if num_bytes + graph_bytes > free:
        raise ValueError(
            f"{name}: weights and cache take {num_bytes >> 20} MiB and graphs {graph_bytes >> 20} "
            f"MiB, and {free >> 20} of "
            f"{total >> 20} MiB are free (--gpu-memory-utilization, --kv-cache-memory-bytes, --cudagraph-capture-sizes)"
        )


def use_device(device: torch.device) -> None:
    """What this thread does with "the current device" is meant for this one: every thread has a current device of
    its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def graph_library(device: torch.device) -> CudaGraphs:
    assert device.type == "cuda"
    return CudaGraphs(device)


# ---- what goes to the device ----


class Upload(Protocol):
    """What brings the host's numbers of one step to the device."""

    def send(self, source: Ints, target: Tensor) -> None:
        """Copy source, int64 [n], to the first n of target. The host does not wait, and may write to source again."""
        ...


def make_upload(device: torch.device) -> Upload | None:
    """None: the device reads what the host has written."""
    return None if device.type == "cpu" else PinnedUpload(torch.cuda.Event, pinned=True)


class Event(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """Whether all that was queued before `record` has been done."""
        ...


class PinnedUpload:
    """A copy from pinned memory. There are two such memories in turn: while the copy of one step may still be under way
    the next one is being written."""

    def __init__(self, new_event: Callable[[], Event], pinned: bool) -> None:
        self._pinned, self._new_event = pinned, new_event
        self._hosts = [self._host(1) for _ in range(2)]
        self._events: list[Event | None] = [None, None]
        self._turn = 0

    def send(self, source: Ints, target: Tensor) -> None:
        size, turn = len(source), self._turn
        if not size:
            return
        event = self._events[turn]
        if event is None:
            event = self._events[turn] = self._new_event()
        else:
            event.synchronize()
        if size > self._hosts[turn].numel():
            self._hosts[turn] = self._host(2 * size)
        host = self._hosts[turn]
        host.numpy()[:size] = source
        target[:size].copy_(host[:size], non_blocking=True)
        event.record()
        self._turn = 1 - turn

    def _host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self._pinned)


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Small host arrays of any dtype, on the device with what is queued next; the host does not wait. On the CPU they
    stay what they are."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return in_one_copy(arrays, device, pinned=device.type == "cuda")


def in_one_copy(arrays: Sequence[npt.NDArray[Any]], device: torch.device, pinned: bool) -> list[Tensor]:
    """Torch does not give pinned memory away until the copy out of it is over."""
    sizes = [-(-array.nbytes // _WORD) * _WORD for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    parts, first = [], 0
    for array, size in zip(arrays, sizes, strict=True):
        part = slice(first, first + array.nbytes)
        host.numpy()[part] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        dtype = torch.from_numpy(array[:0]).dtype
        parts.append(there[part].view(dtype).view(array.shape))
        first += size
    there.copy_(host, non_blocking=True)
    return parts


# ---- what comes back ----


class Arrival(Protocol):
    """Tensors on their way to the host. Used by two threads."""

    def done(self) -> bool: ...

    def take(self) -> list[Tensor]:
        """They, on the host; as often as wanted. Raises RuntimeError when the device does not come to its end."""
        ...


class Readback(Protocol):
    """late: the device thread goes on while they travel, so the next step takes its tokens from the device."""

    @property
    def late(self) -> bool: ...

    def fetch(self, tensors: Sequence[Tensor]) -> Arrival: ...


def make_readback(device: torch.device, timeout: float) -> Readback:
    """timeout: seconds, the bound of a wait for the device."""
    if device.type == "cpu":
        return AtOnce()
    return LateReadback(torch.cuda.Event, timeout, pinned=True)


class AtOnce:
    """The CPU's own: they are there."""

    late = False

    def fetch(self, tensors: Sequence[Tensor]) -> Arrival:
        return Here(list(tensors))


class Here:
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def done(self) -> bool:
        return True

    def take(self) -> list[Tensor]:
        return self._tensors


class LateReadback:
    """Copies to pinned memory, queued behind what makes the tensors, with an event behind them."""

    late = True

    def __init__(self, new_event: Callable[[], Event], timeout: float, pinned: bool) -> None:
        self._new_event, self._timeout, self._pinned = new_event, timeout, pinned

    def fetch(self, tensors: Sequence[Tensor]) -> Arrival:
        hosts = [torch.empty(x.shape, dtype=x.dtype, pin_memory=self._pinned) for x in tensors]
        for host, x in zip(hosts, tensors, strict=True):
            host.copy_(x, non_blocking=True)
        event = self._new_event()
        event.record()
        return _Travelling(hosts, event, self._timeout)


class _Travelling:
    """The wait sleeps between its looks: the device thread needs the interpreter to queue the next step meanwhile."""

    def __init__(self, hosts: list[Tensor], event: Event, timeout: float) -> None:
        self._hosts, self._event, self._timeout = hosts, event, timeout

    def done(self) -> bool:
        return self._event.query()

    def take(self) -> list[Tensor]:
        end = time.monotonic() + self._timeout
        while not self._event.query():
            if time.monotonic() > end:
                raise RuntimeError(f"the device has not finished a step within {self._timeout:g} s")
            mark()
            time.sleep(_NAP_SECONDS)
        return self._hosts


# ---- graphs ----


def ran_out(error: BaseException | None) -> bool:
    """Whether there was no memory, at first: a capture that is left half way then fails in another way too."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


class CudaGraphs:
    """Implements engine.capture.GraphLibrary and GraphSeries. The graphs of a session share one pool of memory: they
    never run at the same time."""

    refused = ""  # torch raises instead

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: object = None

    def series(self, lane: int) -> CudaGraphs:
        return self

    def new(self) -> _CudaGraph:
        return _CudaGraph(self._pool)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """On a stream of its own, as capturing demands; the collector must not free a tensor meanwhile. Says what the
        graphs have taken. RuntimeError names the options when there is no memory for them."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        free, began = torch.cuda.mem_get_info(self._device)[0], time.monotonic()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(stream):
                yield
        except RuntimeError as error:
            if ran_out(error):
                raise RuntimeError(f"out of memory, {free >> 20} MiB were free: {OF_GRAPHS}") from error
            raise
        finally:
            if collecting:
                gc.enable()
            torch.cuda.synchronize(self._device)
        taken = free - torch.cuda.mem_get_info(self._device)[0]
        log.info("event=graphs_captured bytes=%d seconds=%.1f", taken, time.monotonic() - began)


class _CudaGraph:
    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def begin(self) -> None:
        # Other threads (of the balancer) may use the GPU meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()
