"""The GPU check itself, on the CPU: every part runs, and one that crashes, hangs or is cut is a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu_check import PARTS, Part

ROOT = Path(__file__).resolve().parent.parent.parent


def check(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "results" / "rows.jsonl"
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--tiny", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(rows) + 1
    return rows


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
    rows = list(gpu_check.run_part(Part(name, 2.0), "cpu", True, 2.0, script, grace=0.0))
    assert [row["name"] for row in rows] == ["first", "(the part itself)", "(seconds)"]
    assert rows[1]["ok"] is False and note in rows[1]["note"]
    assert all(gpu_check.line_of(row).startswith(name) for row in rows)


def test_no_gpu_is_said_in_one_line() -> None:
    command = [sys.executable, "benchmarks/gpu_parts.py", "limits", "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        assert "there is no GPU here" in done.stderr
