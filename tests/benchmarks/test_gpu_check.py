"""The GPU check itself, on the CPU: every part runs, and one that crashes, hangs or is cut is a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu_check import PARTS, Part

ROOT = Path(__file__).resolve().parent.parent.parent


def check(tmp_path: Path, *arguments: str, python_path: Path | None = None) -> list[dict[str, Any]]:
    """As on a machine where nobody has installed this project: the directory is all there is."""
    out = tmp_path / "results"
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--tiny", "--out", str(out), *arguments]
    environment = {**os.environ, "PYTHONPATH": "" if python_path is None else str(python_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    rows = [json.loads(line) for line in (out / "gpu_check.jsonl").read_text().splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr + (out / "gpu_check.log").read_text()
    assert (out / "gpu_check.txt").read_text() == done.stdout and len(done.stdout.splitlines()) == len(rows) + 1
    assert rows[0]["part"] == "machine" and rows[0]["torch"]
    return rows[1:]


def test_a_few_parts(tmp_path: Path) -> None:
    rows = check(tmp_path, "--only", "graphs", "deepgemm")
    assert {row["part"] for row in rows} == {"graphs", "deepgemm"}
    assert sum(row["ok"] is True for row in rows) == 7


@pytest.mark.slow
def test_every_part(tmp_path: Path) -> None:
    rows = check(tmp_path)
    assert {row["part"] for row in rows} == {part.name for part in PARTS}
    for part in PARTS:
        assert sum(row["part"] == part.name for row in rows) > 1, part.name


def test_without_time_parts_are_cut_and_say_so(tmp_path: Path) -> None:
    rows = check(tmp_path, "--minutes", "0.1")
    assert [row["note"] for row in rows] == ["cut: no time was left"] * len(PARTS)


HIDES = """
import sys

HIDDEN = set({hidden!r}.split())


class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""
ENGINE = (
    "msgspec zmq tokenizers jinja2 starlette uvicorn uvloop httptools prometheus_client yaml rich click safetensors"
)


def hiding(tmp_path: Path, hidden: str) -> Path:
    """A directory for PYTHONPATH with which Python does not find these modules."""
    folder = tmp_path / "hiding"
    folder.mkdir()
    # What installed this project in an editable way finds it by an entry in sys.path, which stays.
    (folder / "sitecustomize.py").write_text(HIDES.format(hidden=hidden))
    return folder


@pytest.mark.parametrize(
    ("hidden", "only", "notes"),
    [
        (
            f"{ENGINE} transformers pytest hypothesis",
            ["limits", "graphs", "engine", "tests"],
            ["No module named", "pytest"],
        ),
        ("triton transformers", ["limits", "kernels", "deepgemm"], ["triton"]),
    ],
    ids=["torch and triton", "no triton"],
)
def test_what_is_missing_is_said(tmp_path: Path, hidden: str, only: list[str], notes: list[str]) -> None:
    rows = check(tmp_path, "--only", *only, python_path=hiding(tmp_path, hidden))
    assert {row["part"] for row in rows} == set(only)
    left_out = [f"{row['name']} {row['note']}" for row in rows if "note" in row]
    assert len(left_out) == len(only) - 2 + (hidden.startswith("triton"))
    assert all(any(note in text for text in left_out) for note in notes)
    assert "graphs" not in only or sum(row["ok"] is True for row in rows) == 7


def test_the_end_of_what_is_printed_says_what_failed() -> None:
    """Whoever runs it elsewhere may see the last 12,000 characters."""
    numbers = {"limit_ms": 0.1, "pct_of_limit": 50.0, "gb_s": 3.0, "tflop_s": 4.0}
    measured = [
        {"part": "kernels", "name": f"kernel {i} " + "x" * 60, "ok": None, "ms": float(i % 7), **numbers}
        for i in range(200)
    ]
    failed = {"part": "parity", "name": "llama", "ok": False, "note": "far"}
    lines = gpu_check.short_table([failed, *measured])
    assert 9_000 < sum(len(line) + 1 for line in lines) < 11_000
    assert lines[0] == lines[-1] == gpu_check.line_of(failed, brief=True) and lines[-2] == "failed:"
    assert sum("ms 6.0" in line for line in lines) == 28 and not any(
        "ms 0.0" in line or "tflop_s" in line for line in lines
    )
    assert gpu_check.short_table(measured[:3]) == [gpu_check.line_of(row) for row in measured[:3]]


BROKEN = """
import os, sys, time
print('{"name": "first", "ok": true}', flush=True)
if sys.argv[1] == "crashes":
    os.abort()
if sys.argv[1] == "raises":
    raise ValueError("out of order")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("name", "note"),
    [("crashes", "exit code -6"), ("raises", "ValueError: out of order"), ("hangs", "stopped after 2 s")],
)
def test_a_part_that_ends_badly_keeps_its_rows(tmp_path: Path, name: str, note: str) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    with (tmp_path / "log").open("w") as log:
        rows = list(gpu_check.run_part(Part(name, 2.0), "cpu", True, 2.0, log, script, grace=0.0))
    assert [row["name"] for row in rows] == ["first", "(the part itself)", "(seconds)"]
    assert rows[1]["ok"] is False and note in rows[1]["note"]
    assert all(gpu_check.line_of(row).startswith(name) for row in rows)


def test_no_gpu_is_said_in_one_line() -> None:
    command = [sys.executable, "benchmarks/gpu_parts.py", "limits", "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        assert "there is no GPU here" in done.stderr
