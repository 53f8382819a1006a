"""benchmarks/bench_hostile.py, at its smallest size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "bench_hostile.py"
WORDS = ["--ranks", "1", "--streams", "1", "--bytes", "50000", "--bodies", "1", "--seconds", "0.1"]


@pytest.mark.slow
def test_it_runs() -> None:
    command = [sys.executable, str(SCRIPT), *WORDS, "--cases", "none,one_word,messages", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    *rows, total = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["case"] for row in rows] == ["none", "one_word", "messages"]
    assert all(set(row["statuses"]) <= {"400"} for row in rows), rows
    assert total["failed_streams"] == total["orphans"] == 0
