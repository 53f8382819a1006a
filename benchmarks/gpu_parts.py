"""The parts of gpu_check.py: `python benchmarks/gpu_parts.py NAME --device cuda --seconds N [--tiny] [--out DIR]`. One JSON line per row.

Optional libraries are looked for where a part needs them; without one the part says so and that is all.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_children import told_to_go
from gpu_libraries import deepgemm, flashinfer, nvshmem
from gpu_models import TINY, Driver, make_model
from gpu_rows import Options, attempt, forms_of_gpu, relative, row
from gpu_whole import deepseek, graph_library, profile, qwen3
from torch import Tensor

from engine.capture import GraphPolicy
from ep.experts import WeightFormat
from models.base import CausalLM
from native import Isa, limit_isa

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
ALL_EXPERTS = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}  # so that no choice flips on a rounding


# ---- limits, parity ----


def limits(options: Options) -> None:
    found = options.limits()
    name = torch.cuda.get_device_name(options.device) if options.on_gpu else "a CPU"
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else "none"
    row(name, None, torch=torch.__version__, triton=triton)
    row("copy, bytes read and written", None, gb_s=found.memory / 1e9)
    for kind, speed in found.products.items():
        row(f"matrix product {kind}", None, tflop_s=speed / 1e12)


def logits_of(model: CausalLM, device: torch.device) -> Tensor:
    """Three sequences: a prompt, a piece that goes on after it, two decodes of each; all tokens' logits."""
    driver = Driver(model, 3, 64, 16, device)
    token_T = torch.arange(3 * 26) * 7 % 128
    found, used = [], 0
    for first, count in ((0, 19), (19, 5), (24, 1), (25, 1)):
        step = driver.step(range(3), first, count, token_T[used : used + 3 * count])
        found.append(driver.logits(driver.run(step)).cpu())
        used += 3 * count
    return torch.cat(found)


def parity(options: Options) -> None:
    """Every family, on this device against float32 on the CPU; in bfloat16 no further from it than torch on the CPU, twice."""
    for family, raw in TINY.items():
        if not options.left():
            row("families left out", None, note=f"no time from {family} on")
            return
        with attempt(f"{family} float32"):
            torch.manual_seed(1)
            exact = make_model(raw, torch.float32, CPU)
            ours = logits_of(make_model(raw, torch.float32, options.device, like=exact), options.device)
            error = relative(ours, logits_of(exact, CPU))
            row(f"{family} float32", error < 1e-3, error=error)
        with attempt(f"{family} bfloat16"):
            wide = {**raw, **ALL_EXPERTS}
            torch.manual_seed(2)
            half = make_model(wide, torch.bfloat16, CPU)
            expected = logits_of(make_model(wide, torch.float32, CPU, like=half), CPU)
            ours = logits_of(make_model(wide, torch.bfloat16, options.device, like=half), options.device)
            error, theirs = relative(ours, expected), relative(logits_of(half, CPU), expected)
            row(f"{family} bfloat16", error < max(2 * theirs, 0.02), error=error, torch_on_cpu=theirs)
    with attempt("deepseek-v3 experts in fp8"):
        raw = {**TINY["deepseek-v3"], **ALL_EXPERTS}
        fp8 = make_model(raw, torch.bfloat16, options.device, WeightFormat.FP8)
        expected = logits_of(make_model(raw, torch.float32, CPU, like=fp8), CPU)
        error = relative(logits_of(fp8, options.device), expected)
        row("deepseek-v3 experts in fp8", error < 0.1, error=error)


# ---- graphs ----


def graphs(options: Options) -> None:
    """Captured steps equal eager ones, while the batch shrinks and grows."""
    dtype = torch.bfloat16 if options.on_gpu else torch.float32
    for family in ("qwen3", "qwen3-moe", "deepseek-v3"):
        alone = options.on_gpu or family == "qwen3"  # on a CPU torch's experts and MLA count on the host
        model = make_model({**TINY[family], **ALL_EXPERTS}, dtype, options.device)
        kinds = [("full", GraphPolicy(full=(1, 2, 4, 8)))] if alone else []
        kinds += [
            ("piecewise", GraphPolicy(piecewise=(4, 8, 64), break_exchanges=not alone)),
            ("experts cut", GraphPolicy(piecewise=(4, 8, 64), break_exchanges=True)),
        ]
        for name, policy in kinds:
            with attempt(f"{family} {name}"):
                worst, captured = _worst(options, model, policy)
                row(f"{family} {name}", worst < (2e-2 if options.on_gpu else 1e-4), error=worst, captured=captured)


def _worst(options: Options, model: CausalLM, policy: GraphPolicy) -> tuple[float, int]:
    """The largest difference to eager steps, and how many graphs were captured."""
    driver, eager = (Driver(model, 7, 64, 16, options.device) for _ in range(2))
    captured = driver.capture(graph_library(options), policy)
    worst, first = 0.0, 0
    for count, living in ((9, 7), (1, 7), (1, 3), (1, 5), (1, 1), (4, 7), (1, 7)):
        step = eager.step(range(living), first, count)
        ours = driver.logits(captured.run(captured.step(range(living), first, count, step.token_ids_T)))
        worst = max(worst, relative(ours, eager.logits(eager.run(step))))
        first += count
    return worst, len(captured.capture.captured(True) + captured.capture.captured(False))


# ---- kernels ----


def kernels(options: Options) -> None:
    """Each Triton kernel beside the limit (benchmarks/gpu_ops.py)."""
    _cases(options, padded_rows=False)


def padded(options: Options) -> None:
    """Experts whose slots have many places and few rows, as they are cut and as they could be."""
    _cases(options, padded_rows=True)


def _cases(options: Options, padded_rows: bool) -> None:
    if not _has_triton():
        return
    ops = importlib.import_module("gpu_ops")
    clock, found = options.clock(), options.limits()
    with forms_of_gpu(options):
        work = importlib.import_module("gpu_work")
        make = work.padded if padded_rows else work.check_cases
        chosen = make(options.device, options.tiny)
        for found_row in ops.rows(chosen, clock, found):
            error = found_row.pop("error", None)
            name = f"{found_row.pop('op')} {found_row.pop('shape')}"
            row(name, False if error else None, **found_row, **({"note": error} if error else {}))
            if error and "CUDA error" in error:  # the device is of no use to this process any more
                return
            if not options.left(2):
                row("the rest left out", None, note="no time for the rest")
                return


def tests(options: Options) -> None:
    """The tests of the Triton kernels, which run on the GPU where there is one, and those marked gpu: a process for each file, all
    at the same time, because most of it is compiling."""
    if importlib.util.find_spec("pytest") is None:
        row("pytest", None, note="not installed: left out")
        return
    rooms = [ROOT / "tests" / room for room in ("layers", "mla", "moe_kernels")]
    files = [path for room in rooms for path in sorted(room.glob("test_triton_*.py"))]
    files = files[:1] if options.tiny else [*files, *sorted((ROOT / "tests/gpu").glob("test_*.py"))]
    if importlib.util.find_spec("hypothesis") is None:
        files = [
            path
            for path in files
            if "import hypothesis" not in (text := path.read_text()) and "from hypothesis" not in text
        ]
    with concurrent.futures.ThreadPoolExecutor(len(files)) as pool:
        for path, (ok, values) in zip(files, pool.map(functools.partial(_tested, options), files), strict=True):
            row(path.stem, ok, **values)


def _tested(options: Options, path: Path) -> tuple[bool, dict[str, Any]]:
    """Whether all of a file's tests passed, and how many did; the first that did not."""
    plain = ["-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider", "-v", "-rfE", "--tb=line"]
    command = [sys.executable, "-m", "pytest", *plain, "-k", "not compile", str(path)]
    note, code = "", 1
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=max(1.0, options.ends - time.monotonic()),
        )  # fmt: skip
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        text, note = (late.output or b"").decode(errors="replace"), "no time was left; "
    print(text, file=sys.stderr, flush=True)
    lines = text.splitlines()
    passed = sum(" PASSED" in line for line in lines)
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if code and not failed:
        note += lines[-1][:200] if lines else "it said nothing"
    values: dict[str, Any] = {"passed": passed, "failed": len(failed)}
    if failed or note:
        values["note"] = note + "; ".join(line[:160] for line in failed[:3])
    return code == 0, values


# ---- the whole engine ----


def engine(options: Options) -> None:
    """The embedded model, greedy, through scheduler, cache and sampler: the same tokens as on the CPU."""
    try:
        moesaic = importlib.import_module("moesaic")
        importlib.import_module("engine.build")  # moesaic itself imports what a model needs when there is one
        llm, params = moesaic.LLM, moesaic.SamplingParams(max_tokens=24, temperature=0.0)
    except ImportError as error:
        row("engine", None, note=f"not run: {error}")
        return
    prompts = ["Once upon a time", "The little dog", "In the morning,"]
    found = []
    for device in ("cpu", options.device.type):
        began = time.monotonic()
        with contextlib.closing(llm(device=device, dtype="float32", max_model_len=128, max_num_seqs=4)) as served:
            outputs = served.generate(prompts, params)
            found.append([output.outputs[0].token_ids for output in outputs])
            row(
                f"embedded model on {device}", None, seconds=time.monotonic() - began, graphs=served.plan.cudagraph_mode
            )
    pairs = [pair for theirs, ours in zip(*found, strict=True) for pair in zip(theirs, ours, strict=False)]
    same = sum(a == b for a, b in pairs) / max(1, len(pairs))
    # Two tokens that are equally good may change places, and what follows with them.
    row("embedded model, greedy tokens as on the CPU", same > 0.6, same=same, tokens=len(pairs))


def torch_beside(options: Options) -> None:
    """What torch has of the same (gpu_beside.py)."""
    if _has_triton():
        with forms_of_gpu(options):
            importlib.import_module("gpu_beside").torch_beside(options)


def tune(options: Options) -> None:
    """Tables of configurations (tune_triton.py), written again after every shape."""
    if not _has_triton():
        return
    tuner, work = importlib.import_module("tune_triton"), importlib.import_module("gpu_work")
    chip = importlib.import_module("layers.triton.device").chip_of(options.device)
    found: list[Any] = []
    num_threads = max(1, (os.cpu_count() or 2) - 4) if options.on_gpu else 0
    with forms_of_gpu(options):
        cases = work.tune_cases(options.device, options.tiny)
        if options.tiny:
            cases = (dataclasses.replace(case, candidates=case.candidates[:2]) for case in cases)
        for tuned in tuner.tune_all(cases, options.clock(), tuner.FILES, options.ends - 2, num_threads):
            found.append(tuned)
            if options.out is not None:
                tuner.merge(found, chip, options.out)
            row(
                f"{tuned.kernel} {tuned.sizes}", None, config=tuned.config, us=1e6 * tuned.seconds, in_use_us=1e6 * tuned.default_seconds,
                gain=tuned.default_seconds / tuned.seconds, measured=tuned.measured, failed=tuned.failed,
            )  # fmt: skip
    if not options.left(2):
        row("the rest left out", None, note="no time for other shapes")


def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    row("triton", None, note="not installed: left out")
    return False


PARTS: dict[str, Callable[[Options], None]] = {
    **{
        part.__name__: part
        for part in (
            limits, parity, graphs, qwen3, deepseek, profile, padded, kernels, tune, tests, engine, deepgemm, flashinfer, nvshmem,
        )
    },
    "torch": torch_beside,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, help="it is told through its standard input, if this is not given")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="the directory where tables go")
    given = parser.parse_args()
    # Until here the GPU has not been touched: another part may be measuring on it.
    seconds = told_to_go() if given.seconds is None else given.seconds
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here (--device cpu --tiny tests the script)")
    torch.set_grad_enabled(False)
    if given.device == "cpu":
        torch.set_num_threads(1)
        limit_isa(Isa.NONE)  # the fakes and the interpreter see torch's operations only
    options = Options(torch.device(given.device), given.tiny, time.monotonic() + seconds, given.out)
    PARTS[given.part](options)


if __name__ == "__main__":
    main()
