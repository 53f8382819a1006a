"""What the parts of gpu_check.py share: their options, their rows, and the distance between two results."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_clock import GpuClock, Limits
from torch import Tensor


@dataclass
class Options:
    device: torch.device
    tiny: bool
    ends: float  # on time.monotonic

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def left(self, seconds: float = 0.0) -> bool:
        """Whether something that takes so long can still begin."""
        return time.monotonic() + seconds < self.ends

    def clock(self) -> Callable[..., float]:
        """Seconds of one call."""
        return GpuClock(self.device) if self.on_gpu else _once

    def limits(self) -> Limits:
        if self.on_gpu:
            return Limits.probe(self.clock(), self.device, *((256, 1 << 20) if self.tiny else ()))
        return Limits(1e9, {"bf16": 1e9, "fp8": 1e9})  # made up: nothing is measured on a CPU


def row(name: str, ok: bool | None = None, **values: Any) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}
    print(json.dumps({"name": name, "ok": ok, **rounded}), flush=True)


@contextlib.contextmanager
def attempt(name: str) -> Iterator[None]:
    """What goes wrong within is a row, and what comes after it goes on."""
    try:
        yield
    except Exception as error:  # of any library
        traceback.print_exc(file=sys.stderr)
        row(name, False, note=f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _once(run: Callable[[], object], repeats: int = 1) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def relative(ours: Tensor, reference: Tensor) -> float:
    """||ours - reference|| / ||reference||; NaN is infinitely far."""
    ours, reference = ours.double().cpu(), reference.double().cpu()
    error = float((ours - reference).norm() / reference.norm())
    return error if error == error else float("inf")
