"""The Triton kernels that the parts of gpu_check.py will launch, compiled by all cores at once into Triton's cache, beside the parts:
`python benchmarks/gpu_compile.py --device cuda --seconds N [--tiny] [--capability 90] [--workers N]`. One JSON line per row.

Needs no GPU and touches none: every launch is made with tensors of the "meta" device, and compiled for the GPU that nvidia-smi names.
So it can also fill a cache that is carried along (TRITON_CACHE_DIR), where Python and Triton are the same there. What is compiled
first is what the parts want first; a kernel that is not there when a part comes to it is compiled by the part itself.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton.knobs
from compile_ahead import not_launched
from gpu_models import TINY, WHOLE, Driver, Whole, make_model, steps_of
from gpu_rows import row
from gpu_work import check_cases, padded, tune_cases
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import layers.choice
import layers.triton.device
import moe_kernels.backends
import moe_kernels.choice
import moe_kernels.token_sums
from models.base import CausalLM

ROOT = Path(__file__).resolve().parent.parent
META = torch.device("meta")
ROOMS = ("layers", "mla", "moe_kernels")
SPARE_CORES = 4  # for the part that runs
SHOWN_SECONDS = 10.0  # between two rows

Thunk = Callable[[], object]


class _Elsewhere:
    """Triton's driver of a GPU that is not asked: enough for a kernel to be compiled for it."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[None]:
    """Tensors of "meta" count as a GPU's of this compute capability, and what would be launched on them is compiled."""
    modules = [
        importlib.import_module(f"{room}.triton.{path.stem}")
        for room in ROOMS
        for path in (ROOT / room / "triton").glob("[a-z]*.py")
    ]
    rooms: list[Any] = [layers.choice, moe_kernels.choice, moe_kernels.backends, moe_kernels.token_sums]
    asked = [(room, "on_gpu", room.on_gpu) for room in rooms]
    asked += [(module, "chip_of", module.chip_of) for module in modules if "chip_of" in vars(module)]
    active = driver._active
    driver.set_active(_Elsewhere(capability))
    try:
        for place, name, _ in asked:
            setattr(place, name, (lambda device: f"sm_{capability}") if name == "chip_of" else (lambda device: True))
        with not_launched(
            [module for module in modules if any(isinstance(k, JITFunction) for k in vars(module).values())]
        ):
            yield
    finally:
        driver._active = active
        for place, name, before in asked:
            setattr(place, name, before)


# ---- what is compiled ----


def thunks(tiny: bool) -> Iterator[Thunk]:
    """In the order in which the parts want it. To be called within `compiling`; made one by one, because making them compiles too."""
    families = ("qwen3",) if tiny else tuple(TINY)
    for family in families:
        for dtype in (torch.float32, torch.bfloat16):
            yield functools.partial(_family, family, dtype)
    for whole in () if tiny else WHOLE.values():
        steps = steps_of(tiny)
        for sequences, queries in (
            (steps.decodes[-1], 1),
            *steps.prompts,
            *((count, 1) for count in steps.decodes[:-1]),
        ):
            yield functools.partial(_whole, whole, sequences, queries)
    for case in (*padded(META, tiny), *check_cases(META, tiny)):
        yield functools.partial(case.run, None)
    for case in tune_cases(META, tiny):
        for candidate in (None, *(case.candidates[:2] if tiny else case.candidates)):
            yield functools.partial(case.run, candidate)


def _family(name: str, dtype: torch.dtype) -> None:
    model = make_model(TINY[name], dtype, META, filled=False)
    steps = Driver(model, 3, 64, 16, META)
    for first, count in ((0, 19), (19, 5), (24, 1)):
        steps.logits(steps.run(steps.step(range(3), first, count)))


@functools.cache
def _made(whole: Whole) -> CausalLM:
    return whole.make(META, False, filled=False)


def _whole(whole: Whole, sequences: int, queries: int) -> None:
    steps = steps_of(False)
    driver_of = steps.driver(_made(whole), META)
    step = driver_of.step(range(sequences), steps.context if queries == 1 else 0, queries)
    hidden_TD = driver_of.run(step)
    driver_of.model.greedy_tokens(hidden_TD[step.logits_rows_P], driver_of.model.config.vocab_size)


# ---- by whom ----


def work(capability: int, tiny: bool, ends: float, claimed: Any, done: Any, failed: Any) -> None:
    """One process. claimed: the number of the next thunk that no process has taken; done, failed: how many thunks were compiled, by
    all processes, and how many raised. Every process goes through all of them and compiles those that it has claimed."""
    os.nice(10)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    with compiling(capability):
        mine = _claim(claimed)
        for number, thunk in enumerate(thunks(tiny)):
            if time.monotonic() > ends:
                return
            if number != mine:
                continue
            try:
                thunk()
                _claim(done)
            except Exception:  # it says so again when it is launched
                traceback.print_exc(limit=-4, file=sys.stderr)
                _claim(failed)
            mine = _claim(claimed)


def _claim(claimed: Any) -> int:
    with claimed.get_lock():
        claimed.value += 1
        return int(claimed.value) - 1


def capability_of(device: str) -> int:
    """Of the first GPU; without one that of a Hopper."""
    if device == "cuda":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
            said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            found = re.match(r"(\d+)\.(\d)", said.strip())
            if found:
                return int(found[1] + found[2])
    return 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--capability", type=int, help="such as 90; that of the GPU here")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - SPARE_CORES))
    options = parser.parse_args()
    capability = options.capability or capability_of(options.device)
    began = time.monotonic()
    # A fork has torch and Triton imported already; nothing here has started a thread or touched a GPU.
    context = multiprocessing.get_context("fork")
    claimed, done, failed = (context.Value("l", 0) for _ in range(3))
    arguments = capability, options.tiny, began + options.seconds, claimed, done, failed
    workers = [context.Process(target=work, args=arguments, daemon=True) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    folder = Path(triton.knobs.cache.dir)
    there = sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
    row(f"kernels for sm_{capability}", None, workers=len(workers), in_the_cache_before=there)
    shown = began
    while any(worker.is_alive() for worker in workers):
        time.sleep(0.2)
        if time.monotonic() - shown > SHOWN_SECONDS:
            shown = time.monotonic()
            row("launches compiled so far", None, launches=done.value, seconds=shown - began)
    ended_badly = sum(worker.exitcode != 0 for worker in workers)
    note = {"note": "no time was left for the rest"} if time.monotonic() - began > options.seconds else {}
    values = {"launches": done.value, "failed": failed.value, "workers_ended_badly": ended_badly}
    row("launches compiled", failed.value + ended_badly == 0, **values, seconds=time.monotonic() - began, **note)


if __name__ == "__main__":
    main()
