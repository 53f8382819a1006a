"""What the GPU benchmarks run, and the tuner, on tiny shapes in the interpreter, with a clock that is told what it shows."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import gpu_cases
import gpu_ops
import pytest
import torch
import tune_triton
from compile_ahead import compile_ahead
from gpu_cases import Case, Shape
from gpu_clock import Limits
from triton.compiler import CompiledKernel
from triton_support import as_on_gpu, compiling_for

from moe_kernels.triton import grouped_gemm as triton_grouped_gemm
from moe_kernels.triton.configs import GemmConfig, choose

pytestmark = pytest.mark.triton

CPU = torch.device("cpu")
LATENT = Shape("tiny", 128, 128, 4, 4, 2, 3, 0, 16, 300)
GROUPED = Shape("tiny, grouped", 128, 128, 4, 4, 2, 4, 2, 128, 300)
LIMITS = Limits(1e9, {"bf16": 1e9, "fp8": 2e9})
ROOT = Path(__file__).resolve().parent.parent.parent


def cases() -> Iterator[Case]:
    few = (3,)
    yield from gpu_cases.expert_cases(LATENT, CPU, few)
    yield from gpu_cases.mla_cases(LATENT, CPU, [(2, 20)], [(1, 10, 20)], latent=32, rope=8, width=16)
    yield from gpu_cases.attention_cases(GROUPED, CPU, [(2, 20)], [(1, 5, 20)])
    for shape in (LATENT, GROUPED):
        yield from gpu_cases.row_cases(shape, CPU, few)
        yield from gpu_cases.cache_cases(shape, CPU, few)
    yield from gpu_cases.sampling_cases(LATENT, CPU, [2])


def once(run: Callable[[], object]) -> float:
    run()
    return 1e-3


def test_every_case_runs_and_has_a_row() -> None:
    with as_on_gpu():
        found = list(gpu_ops.rows(cases(), once, LIMITS))
    assert len({(row["op"], row["shape"]) for row in found}) == len(found) > 25
    for row in found:
        assert "error" not in row, row
        assert row["ms"] == 1.0 and row["pct_of_limit"] >= 0 and gpu_ops.line(row)
    assert all(json.dumps(row) for row in found)


def test_a_case_that_fails_says_how() -> None:
    def broken(_: object) -> object:
        raise RuntimeError("out of resources\nmore")

    (row,) = gpu_ops.rows([Case("x", "y", 1, 1, broken)], once, LIMITS)
    assert row == {"op": "x", "shape": "y", "error": "RuntimeError: out of resources"}


def test_the_fastest_that_is_right_is_kept(tmp_path: Path) -> None:
    case = next(gpu_cases.expert_cases(LATENT, CPU, [3]))
    fast, slow, impossible = GemmConfig(16, 64, 64, 4, 3), GemmConfig(16, 64, 128, 4, 3), GemmConfig(16, 48, 64, 4, 3)
    times = iter([5e-3, 4e-3, 2e-3])

    def clock(run: Callable[[], object]) -> float:
        run()
        return next(times)

    with as_on_gpu():
        tuned = tune_triton.tune(replace(case, candidates=(slow, impossible, fast)), clock)
    assert (tuned.config, tuned.seconds, tuned.default_seconds, tuned.failed) == (
        (16, 64, 64, 4, 3, 4, 0),
        2e-3,
        5e-3,
        1,
    )
    (path,) = tune_triton.merge([tuned], "sm_90", tmp_path)
    assert path == tmp_path / "moe_kernels" / "triton" / "tuned.py"
    spec = importlib.util.spec_from_file_location("tuned_now", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = module.TUNED
    assert table == {"gate_up": {"sm_90": {case.sizes: (16, 64, 64, 4, 3, 4, 0)}}}
    subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", path], check=True, timeout=60
    )


def test_candidates_are_compiled_ahead() -> None:
    """By threads, for a GPU that is not here; nothing is launched, and what cannot be compiled is no matter."""
    case = next(gpu_cases.expert_cases(LATENT, torch.device("meta"), [3]))
    kernel = triton_grouped_gemm._gate_up_kernel
    good = [GemmConfig(16, n, 64, 4, 3) for n in (64, 128)]
    with compiling_for(90):
        before = len(kernel.device_caches[90][0])
        compile_ahead([partial(case.run, config) for config in (*good, GemmConfig(16, 48, 64, 4, 3))], 2)
        made = list(kernel.device_caches[90][0].values())[before:]
        assert sum(isinstance(one, CompiledKernel) for one in made) == 2
    assert triton_grouped_gemm._gate_up_kernel is kernel


def test_a_configuration_with_another_result_is_left_out() -> None:
    results = iter([torch.ones(3), torch.ones(3), torch.zeros(3), torch.zeros(3)])
    case = Case("x", "y", 1, 1, lambda config: next(results), kernel="gate_up", candidates=(GemmConfig(1, 1, 1, 1, 1),))
    tuned = tune_triton.tune(case, once)
    assert tuned.config == () and tuned.failed == 1
    assert tune_triton.merge([tuned], "sm_90", Path("nowhere")) == []


def test_each_size_is_tuned_once_and_time_is_kept() -> None:
    case = Case("x", "y", 1, 1, lambda config: torch.ones(3), kernel="down", sizes=(1, 2, 3))
    many = [case, case, replace(case, sizes=(1, 2, 4)), replace(case, kernel="other")]
    assert len(list(tune_triton.tune_all(many, once, ["down"], time.monotonic() + 60))) == 2
    assert not list(tune_triton.tune_all(many, once, ["down"], time.monotonic() - 1))


def test_the_nearest_measured_shape_is_taken() -> None:
    measured = {"gate_up": {"sm_90": {(7168, 2048, 8): (1, 2, 3, 4, 5, 6), (7168, 2048, 64): (6, 5, 4, 3, 2, 1)}}}
    near = choose("gate_up", "sm_90", 7168, 2048, 16, measured)
    assert near == GemmConfig(1, 2, 3, 4, 5, 6)
    assert choose("gate_up", "sm_90", 7168, 1024, 100, measured) == GemmConfig(6, 5, 4, 3, 2, 1)
    defaults = choose("gate_up", "sm_90", 2048, 768, 8), choose("gate_up", "sm_100", 7168, 2048, 8)
    assert choose("gate_up", "sm_90", 2048, 768, 8, measured) == defaults[0]
    assert choose("gate_up", "sm_100", 7168, 2048, 8, measured) == defaults[1]


@pytest.mark.parametrize("script", ["gpu_ops.py", pytest.param("tune_triton.py", marks=pytest.mark.slow)])
def test_without_a_gpu_they_say_so(script: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    run = subprocess.run([sys.executable, ROOT / "benchmarks" / script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "there is none here" in run.stderr and "Traceback" not in run.stderr


@pytest.mark.slow
def test_what_is_compiled_beside_the_parts_is_found_by_others(tmp_path: Path) -> None:
    """Several processes, for a Hopper that is not here, into one cache: another one that wants the same has nothing to compile."""
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, ROOT / "benchmarks" / "gpu_compile.py", "--tiny", "--capability", "90", "--workers", "2"],
            capture_output=True, text=True, timeout=200, check=True,
            env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        rows = [json.loads(line) for line in run.stdout.splitlines()]
        assert rows[-1]["ok"] and rows[-1]["launches"] > 20, run.stderr
        found.append((rows[0]["in_the_cache_before"], len(list(tmp_path.glob("*/*.cubin")))))
    (before, made), (kept, still) = found
    assert before == 0 and kept >= made == still > 15
