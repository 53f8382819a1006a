"""Finds the fastest configuration of each Triton kernel on this GPU, for the shapes of published models, and writes them as data:
`python benchmarks/tune_triton.py [--models NAME ...] [--kernels NAME ...] [--minutes 30] [--out DIR]`.

A configuration that does not run, or whose result differs from that of the table's own, is left out. What was measured is merged
with what is there already, in moe_kernels/triton/tuned.py, layers/triton/tuned.py and mla/triton/tuned.py (under --out instead of
the repository's root); the engine takes the nearest shape from there.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from compile_ahead import compile_ahead
from gpu_cases import MODELS, Case, all_cases
from gpu_clock import GpuClock
from msgspec import structs
from torch import Tensor

import layers.triton.tuned
import mla.triton.tuned
import moe_kernels.triton.tuned
from moe_kernels.layout import ExpertBatch

ROOT = Path(__file__).resolve().parent.parent
FILES: dict[str, Any] = {  # kernel -> the module of its table
    **dict.fromkeys(("gate_up", "down", "gate_up_fp8", "down_fp8"), moe_kernels.triton.tuned),
    **dict.fromkeys(("attention_decode", "attention_prefill"), layers.triton.tuned),
    **dict.fromkeys(("mla_decode", "mla_decode_fp8", "mla_prefill"), mla.triton.tuned),
}
TOLERANCE = 0.05  # of the largest number: candidates sum in other orders

Clock = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Tuned:
    """seconds, and default_seconds with the configuration that the table has now; failed, measured: how many of the candidates."""

    kernel: str
    sizes: tuple[int, ...]
    config: tuple[int, ...]
    seconds: float
    default_seconds: float
    failed: int
    measured: int = 0


def tune(case: Case, clock: Clock, num_threads: int = 0, deadline: float = math.inf) -> Tuned:
    """The fastest of the candidates and of the one in use, which is config (). num_threads: that compile them first; 0: each is
    compiled when it runs. deadline: on time.monotonic; candidates for which there is no time are left out."""
    if num_threads:
        compile_ahead([functools.partial(case.run, candidate) for candidate in case.candidates], num_threads)
    expected = _numbers(case.run(None))
    best, least, failed = (), clock(lambda: case.run(None)), 0
    default, measured = least, 0
    for candidate in case.candidates:
        if time.monotonic() > deadline:
            break
        measured += 1
        try:
            right = _close(_numbers(case.run(candidate)), expected)
            seconds = clock(lambda candidate=candidate: case.run(candidate)) if right else float("inf")  # type: ignore[misc]
        except Exception:  # it does not fit this chip
            right, seconds = False, float("inf")
        failed += not right
        if seconds < least:
            best, least = structs.astuple(candidate), seconds
    return Tuned(case.kernel, case.sizes, best, least, default, failed, measured)


def _numbers(result: object) -> Tensor:
    """The result of a kernel as one tensor (rows in FP8: without their scales)."""
    found = result.x if isinstance(result, ExpertBatch) else result
    assert isinstance(found, Tensor)
    return found.float()


def _close(ours: Tensor, expected: Tensor) -> bool:
    return bool((ours - expected).abs().max() <= TOLERANCE * expected.abs().max())


def tune_all(
    cases: Iterable[Case], clock: Clock, kernels: Iterable[str], deadline: float, num_threads: int = 0
) -> Iterator[Tuned]:
    """Until the deadline (time.monotonic): what was found by then is whole. Sizes that occur twice are taken once."""
    wanted, done = set(kernels), set()
    for case in cases:
        key = (case.kernel, case.sizes)
        if case.kernel not in wanted or key in done:
            continue
        if time.monotonic() > deadline:
            return
        done.add(key)
        yield tune(case, clock, num_threads, deadline)


def merge(found: Iterable[Tuned], chip: str, root: Path) -> list[Path]:
    """Write the tables; the files written."""
    tables = {module: _copy(module.TUNED) for module in FILES.values()}
    changed = []
    for tuned in found:
        module = FILES[tuned.kernel]
        here = tables[module].setdefault(tuned.kernel, {}).setdefault(chip, {})
        if tuned.config:
            here[tuned.sizes] = tuned.config
            changed.append(module)
    written = []
    for module in dict.fromkeys(changed):
        path = root / Path(module.__file__).relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text(module.__doc__, tables[module]))
        written.append(path)
    return written


def _copy(table: dict[str, Any]) -> dict[str, Any]:
    return {kernel: {chip: dict(entries) for chip, entries in chips.items()} for kernel, chips in table.items()}


def _text(doc: str, table: dict[str, Any]) -> str:
    lines = [f'"""{doc}"""', ""]
    lines.append("TUNED: dict[str, dict[str, dict[tuple[int, ...], tuple[int, ...]]]] = {")
    for kernel, chips in sorted(table.items()):
        lines.append(f'    "{kernel}": {{')
        for chip, entries in sorted(chips.items()):
            lines.append(f'        "{chip}": {{')
            lines += [f"            {sizes}: {config}," for sizes, config in sorted(entries.items())]
            lines.append("        },")
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kernels", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=ROOT)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tune_triton measures on a GPU; there is none here")
    torch.set_grad_enabled(False)
    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability(device)
    deadline = time.monotonic() + 60 * options.minutes
    found = []
    cases, num_threads = all_cases(device, options.models), max(1, (os.cpu_count() or 2) - 2)
    for tuned in tune_all(cases, GpuClock(device), options.kernels, deadline, num_threads):
        found.append(tuned)
        print(json.dumps(asdict(tuned) | {"gain": round(tuned.default_seconds / tuned.seconds, 2)}), flush=True)
    for path in merge(found, f"sm_{major}{minor}", options.out):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
