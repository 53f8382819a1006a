"""The kernels' own tests, built with the address and undefined-behaviour sanitizers. Matrix tiles are plain loops in
them (native/src/tiles.h): the sanitizers see what tiles touch, and a CPU without them tests what they are given."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "native" / "src"
FLAGS = ["-std=c++17", "-O1", "-fopenmp", "-Wno-psabi", "-fno-omit-frame-pointer", "-DTILE_MODEL"]
SANITIZE = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-sanitize=alignment",
]  # registers load from anywhere


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)


def build_and_run(sources: Sequence[Path], folder: Path) -> str:
    """What the program says that these sources make."""
    objects = []
    for source in sources:
        objects.append(folder / f"{source.stem}.o")
        subprocess.run(["g++", *FLAGS, *SANITIZE, "-c", str(source), "-o", str(objects[-1])], check=True, timeout=300)
    program = folder / "selftest"
    subprocess.run(["g++", *SANITIZE, "-fopenmp", *map(str, objects), "-o", str(program)], check=True, timeout=120)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_compiler
def test_matrix_tiles_as_plain_loops(tmp_path: Path) -> None:
    said = build_and_run([SOURCES / "selftest_tiles.cpp", SOURCES / "experts_amx.cpp"], tmp_path)
    assert said.endswith(" cases, 0 numbers wrong\n") and not said.startswith("0 ")


@pytest.mark.slow
@needs_compiler
def test_no_kernel_touches_what_is_not_its_own(tmp_path: Path) -> None:
    sources = [source for source in sorted(SOURCES.glob("*.cpp")) if source.name != "selftest_tiles.cpp"]
    assert "0 numbers wrong" in build_and_run(sources, tmp_path)
