"""The GPU check itself, on the CPU: every part runs, and one that crashes, hangs or is cut is a row."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu_check import PARTS, Part

ROOT = Path(__file__).resolve().parent.parent.parent


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--tiny", "--out", str(out), *arguments]


def rows_in(out: Path) -> list[dict[str, Any]]:
    """Those that are there by now."""
    path = out / "gpu_check.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")] if path.exists() else []
    )


def check(tmp_path: Path, *arguments: str, python_path: Path | None = None) -> list[dict[str, Any]]:
    """As on a machine where this project is not installed: the directory is all there is."""
    out = tmp_path / "results"
    environment = {**os.environ, "PYTHONPATH": "" if python_path is None else str(python_path)}
    done = subprocess.run(
        command(out, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment
    )
    rows = rows_in(out)
    assert done.returncode == 0, done.stdout + done.stderr + (out / "gpu_check.log").read_text()
    table = (out / "gpu_check.txt").read_text()
    assert len(table.splitlines()) == len(rows) + 1 and table.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert rows[0]["part"] == "machine" and rows[0]["torch"]
    return rows[1:]


def wait_for(what: Callable[[], Any], seconds: float = 100.0) -> Any:
    ends = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < ends, "it does not come"
        time.sleep(0.05)
    return found


def processes(*words: str) -> list[int]:
    """Whose command has all of these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            given = path.read_bytes().decode(errors="replace").split("\0")
            if all(word in given for word in words):
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
def test_a_few_parts(tmp_path: Path) -> None:
    rows = check(tmp_path, "--only", "graphs", "deepgemm")
    assert {row["part"] for row in rows} == {"graphs", "deepgemm"}
    assert sum(row["ok"] is True for row in rows) == 7


@pytest.mark.slow
def test_every_part(tmp_path: Path) -> None:
    """Whole, with one part that is killed midway: its rows stay, a row says so, and the others come."""
    out = tmp_path / "results"
    with subprocess.Popen(
        command(out, "--seconds", "280"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": ""},
    ) as running:  # fmt: skip
        try:
            wait_for(lambda: any(row["part"] == "kernels" for row in rows_in(out)), 200)
            [killed] = processes("kernels", str(out))
            os.kill(killed, signal.SIGKILL)
            assert running.wait(200) == 1
        finally:
            running.kill()
    rows = rows_in(out)
    assert {row["part"] for row in rows} == {"machine", "compile", *(part.name for part in PARTS)}
    by_part = {part.name: [row for row in rows if row["part"] == part.name] for part in PARTS}
    assert all(len(found) > 1 and found[-1]["name"] == "(seconds)" for found in by_part.values())
    failed = [row for row in rows if row["ok"] is False]
    assert [(row["part"], row["name"]) for row in failed] == [("kernels", "(the part itself)")], failed
    assert "exit code -9" in failed[0]["note"] and by_part["kernels"][0]["name"].startswith("experts gate_up")
    assert failed[0]["note"] in (out / "gpu_check.txt").read_text()
    compiled = [row for row in rows if row["part"] == "compile"][-1]
    assert compiled["ok"] and compiled["launches"] > 20 and compiled["failed"] == 0
    beside = [row for row in by_part["torch"] if "ratio" in row]
    assert len(beside) > 8 and all(row["torch_ms"] > 0 for row in beside)
    assert any("graph" in row["name"] or "idle_pct" in row for row in by_part["profile"])
    assert all(row["measured"] == 2 for row in by_part["tune"] if "config" in row)


def test_without_time_parts_are_cut_and_say_so(tmp_path: Path) -> None:
    rows = check(tmp_path, "--seconds", "6")
    assert [row["note"] for row in rows if row["part"] != "compile"] == ["cut: no time was left"] * len(PARTS)


def test_it_takes_no_more_than_its_seconds(tmp_path: Path) -> None:
    """Also while a part does not end: that is stopped, and a row says so."""
    script = tmp_path / "hangs.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with (tmp_path / "log").open("w") as log:
        run = gpu_check.Check(
            "cpu", True, 8.0, tmp_path, log, ["limits", "parity", "graphs"], script=script, grace=0.5, least=0.5
        )
        began = time.monotonic()
        rows = list(run.rows())
    assert time.monotonic() - began < 8.0
    notes = [row["note"] for row in rows if "note" in row and row["part"] != "machine"]
    assert notes[0] == "stopped: it had not begun" and notes[1:] == ["cut: no time was left"] * 2


def test_told_to_end_it_says_where(tmp_path: Path) -> None:
    """As when whoever runs it has no time left: rows that were known are there, and so is a table."""
    out = tmp_path / "results"
    with subprocess.Popen(
        command(out, "--only", "parity", "graphs"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        try:
            wait_for(lambda: len(rows_in(out)) > 2)
            running.terminate()
            assert running.wait(30) == 1
        finally:
            running.kill()
    last = rows_in(out)[-1]
    assert (last["part"], last["ok"]) == ("parity", False) and "told to end" in last["note"]
    assert "told to end" in (out / "gpu_check.txt").read_text()
    wait_for(lambda: not processes(str(out)))


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
ENGINE = "zmq tokenizers jinja2 starlette uvicorn uvloop httptools prometheus_client yaml rich click safetensors"


def hiding(tmp_path: Path, hidden: str) -> Path:
    """A directory for PYTHONPATH with which Python does not find these modules."""
    folder = tmp_path / "hiding"
    folder.mkdir()
    # What installed this project in an editable way finds it by an entry in sys.path, which stays.
    (folder / "sitecustomize.py").write_text(HIDES.format(hidden=hidden))
    return folder


@pytest.mark.slow
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
    ids=["torch, msgspec and triton", "no triton"],
)
def test_what_is_missing_is_said(tmp_path: Path, hidden: str, only: list[str], notes: list[str]) -> None:
    rows = check(tmp_path, "--only", *only, python_path=hiding(tmp_path, hidden))
    assert {row["part"] for row in rows} == set(only)
    left_out = [f"{row['name']} {row['note']}" for row in rows if "note" in row]
    assert len(left_out) == len(only) - 2 + (hidden.startswith("triton"))
    assert all(any(note in text for text in left_out) for note in notes)
    assert "graphs" not in only or sum(row["ok"] is True for row in rows) == 7


def test_without_what_all_parts_need_it_says_so_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(hiding(tmp_path, "msgspec"))}
    done = subprocess.run(
        command(tmp_path / "results"), cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 2 and "has no msgspec" in done.stderr and "docs/gpu.md" in done.stderr


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
        run = gpu_check.Check("cpu", True, 60.0, tmp_path, log, script=script, grace=0.0)
        part = Part(name, 2.0)
        rows = list(run.run(part, run.start(part), time.monotonic() + 60))
    assert [row["name"] for row in rows] == ["first", "(the part itself)", "(seconds)"]
    assert rows[1]["ok"] is False and note in rows[1]["note"]
    assert all(gpu_check.line_of(row).startswith(name) for row in rows)
    assert f"==== {name}" in (tmp_path / "log").read_text()


def test_no_gpu_is_said_in_one_line() -> None:
    arguments = ["benchmarks/gpu_parts.py", "limits", "--device", "cuda", "--seconds", "9"]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        assert "there is no GPU here" in done.stderr
