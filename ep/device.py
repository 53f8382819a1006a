"""Where this room asks which device there is: whether ranks have GPUs, the stream of a tensor, and a wait that ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

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
) -> None:
    """Return when done(). Raises PeerLost naming missing(): after `timeout` seconds; when somebody has left() and what it
    may have done before does not come soon; at once when the group is closed() here, by another thread."""
    began = time.monotonic()
    end = began + timeout
    noticed = False
    while not done():
        now = time.monotonic()
        if closed():
            raise PeerLost((), "the group was left during an exchange")
        if now > end:
            reason = "somebody left the group" if noticed else f"nothing came for {timeout:g} s"
            raise PeerLost(missing(), reason)
        if now - began > _SPIN_SECONDS:
            if not noticed and left():
                noticed, end = True, min(end, now + _GRACE_SECONDS)
            time.sleep(_NAP_SECONDS)


def await_device(device: torch.device, timeout: float, closed: Callable[[], bool], left: Callable[[], bool]) -> None:
    """Return when the device has done all that is queued on the current stream: a wait with a bound, which
    torch.cuda.synchronize is not. Raises PeerLost: an exchange that hangs waits for somebody. On a CPU nothing is queued."""
    if device.type != "cuda":
        return
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    await_true(event.query, timeout, closed, left, lambda: ())
