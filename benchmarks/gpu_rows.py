"""What the parts of gpu_check.py share: their options, their rows, and the distance between two results."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_clock import GpuClock, Limits
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Options:
    device: torch.device
    tiny: bool
    ends: float  # on time.monotonic
    out: Path | None = None  # where files go that are not rows

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
            return Limits.probe(self.clock(), self.device, *((64, 1 << 20) if self.tiny else ()))
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


@contextlib.contextmanager
def forms_of_gpu(options: Options) -> Iterator[None]:
    """On a CPU: every room takes its Triton forms, in the interpreter."""
    with contextlib.ExitStack() as stack:
        if not options.on_gpu:
            sys.path.insert(0, str(ROOT / "tests"))
            stack.enter_context(importlib.import_module("triton_support").as_on_gpu())
        yield


def _once(run: Callable[[], object], repeats: int = 1) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def relative(ours: Tensor, reference: Tensor) -> float:
    """||ours - reference|| / ||reference||; NaN is infinitely far."""
    ours, reference = ours.double().cpu(), reference.double().cpu()
    error = float((ours - reference).norm() / reference.norm())
    return error if error == error else float("inf")
