"""The kernels' own test, built with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "native" / "src"
FLAGS = ["-std=c++17", "-O1", "-fopenmp", "-Wno-psabi", "-fno-omit-frame-pointer"]
SANITIZE = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-sanitize=alignment",
]  # registers load from anywhere


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64")
def test_no_kernel_touches_what_is_not_its_own(tmp_path: Path) -> None:
    objects = []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(tmp_path / f"{source.stem}.o")
        subprocess.run(["g++", *FLAGS, *SANITIZE, "-c", str(source), "-o", str(objects[-1])], check=True, timeout=300)
    program = tmp_path / "selftest"
    subprocess.run(["g++", *SANITIZE, "-fopenmp", *map(str, objects), "-o", str(program)], check=True, timeout=120)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 numbers wrong" in done.stdout
