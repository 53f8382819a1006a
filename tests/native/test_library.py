"""The library is found, shares torch's OpenMP runtime, and may be missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import native
from native import Isa, best_isa, isa, library, limit_isa, why_absent

ROOT = Path(__file__).resolve().parents[2]
RUNTIMES = """
print(*sorted({line.split()[-1].rpartition("/")[2] for line in open("/proc/self/maps")
               if line.split()[-1].rpartition("/")[2].startswith(("libgomp", "libiomp", "libomp"))}))
"""
needs_library = pytest.mark.skipif(library() is None, reason=why_absent())


def python(code: str, folder: Path = ROOT) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, check=True
    ).stdout.strip()


@needs_library
@pytest.mark.parametrize("first", ["native", "torch"])
def test_one_openmp_runtime(first: str) -> None:
    """Whoever comes first, both have the same one."""
    second = {"native": "torch", "torch": "native"}[first]
    work = (
        "import native, torch; native.library(); torch.set_num_threads(2); torch.rand(300, 300) @ torch.rand(300, 300)"
    )
    runtimes = python(
        f"import {first}\nif '{first}' == 'native': native.library()\nimport {second}\n{work}\n{RUNTIMES}"
    )
    assert len(runtimes.split()) == 1, runtimes


@needs_library
def test_a_lesser_machine_is_simulated() -> None:
    for most in Isa:
        assert limit_isa(most) == isa() == min(most, best_isa())
    assert limit_isa(best_isa()) == best_isa()


def test_without_the_library_torch_does_everything(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "native", tmp_path / "native", ignore=shutil.ignore_patterns("_kernels*", "__pycache__"))
    code = """
import torch, native
from moe_kernels import WeightFormat, expert_weights
from moe_kernels.weights import PlainExperts
assert native.library() is None and native.isa() == native.Isa.NONE == native.limit_isa(native.Isa.AVX2)
weights = expert_weights(2, 4, 6, torch.float32, torch.device("cpu"), WeightFormat.FP8)
assert isinstance(weights, PlainExperts)
print(native.why_absent())
"""
    said = python(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, {str(tmp_path)!r})\n{code}", tmp_path
    )
    assert said.startswith("the native kernels were not built") and len(said.splitlines()) == 1


@needs_library
def test_every_source_is_built() -> None:
    """A file that pyproject.toml does not name would be left out silently."""
    named = (ROOT / "pyproject.toml").read_text()
    sources = (Path(native.__file__).parent / "src").iterdir()
    assert [
        path.name for path in sources if path.name != "selftest.cpp" and f'"native/src/{path.name}"' not in named
    ] == []


@needs_library
def test_recording_imports_nothing() -> None:
    """torch keeps its compiler out of a dispatch mode by importing it first, which takes a second of the first step."""
    script = """
import sys, torch
from native.tape import Memory, Recording
before = set(sys.modules)
recording = Recording(Memory())
tape = recording.new()
tape.begin()
torch.empty(4, 4).view(2, 8)
tape.end()
print(len(set(sys.modules) - before), repr(recording.refused))
"""
    assert python(script) == "0 ''"
