"""Where this room asks which device there is: whether ranks have GPUs, the stream of a tensor, and a wait that ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ep.protocol import PeerLost

_SPIN_SECONDS = 0.001
_NAP_SECONDS = 5e-5
_GRACE_SECONDS = 0.25  # what a peer's GPU still had to do when its host left


class CurrentStream:
    """The stream on which work for the current device is queued, as cuda.core passes streams around."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def await_true(
    done: Callable[[], bool],
    timeout: float,
    closed: Callable[[], bool],
    left: Callable[[], bool],
    missing: Callable[[], tuple[int, ...]],
    spin: float = _SPIN_SECONDS,
) -> None:
    """Return when done(). spin: seconds for which it is asked without a pause, on a thread that has the interpreter.
    Raises PeerLost naming missing(): after `timeout` seconds; when a rank has left() and what it may have done before
    does not come soon; at once when the group is closed() here, by another thread."""
    began = time.monotonic()
    end = began + timeout
    noticed = False
    while not done():
        now = time.monotonic()
        if closed():
            raise PeerLost((), "the group was left during an exchange")
        if now > end:
            reason = "a rank left the group" if noticed else f"nothing came for {timeout:g} s"
            raise PeerLost(missing(), reason)
        if now - began >= spin:
            if not noticed and left():
                noticed, end = True, min(end, now + _GRACE_SECONDS)
            time.sleep(_NAP_SECONDS)


def mark_device(device: torch.device) -> Callable[[], bool]:
    """Whether the device has done all that is queued on the current stream now. On a CPU nothing is queued."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.query


def beside(device: torch.device) -> AbstractContextManager[object]:
    """What is queued inside does not wait for what the device has to do already."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, where the device's copy engines read it by themselves."""
    return x.pin_memory() if device.type == "cuda" else x


def fetch(x: Tensor) -> Tensor:
    """A copy of it on the host, which is there when what is queued on the device by now has been done."""
    if x.device.type != "cuda":
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
