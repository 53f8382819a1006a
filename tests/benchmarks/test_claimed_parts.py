"""The parts of gpu_check.py as they run on a GPU machine (its clock, its graphs, models made on the device), with tensors that claim to
be on one (tests/claimed_gpu.py)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_clock
import gpu_parts
import gpu_whole
import pytest
import torch
from gpu_rows import Options

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fakes" / "fake_parts"))
from claimed_gpu import claimed_gpu

pytestmark = pytest.mark.triton

GPU = torch.device("cuda")  # as gpu_parts.py says it
Rows = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Rows]:
    """What has been printed."""
    monkeypatch.setattr(gpu_clock, "FLUSH_BYTES", 1 << 10)
    timed = gpu_whole._wall
    monkeypatch.setattr(gpu_whole, "_wall", lambda options, run, repeats=1: timed(options, run, 1))
    with torch.inference_mode():
        yield lambda: [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("part", ["limits", "qwen3", "deepseek", "padded", "kernels", "tune"])
def test_measuring(part: str, rows: Rows) -> None:
    with claimed_gpu(numbers=False) as seen:
        gpu_parts.PARTS[part](Options(GPU, True, time.monotonic() + 60))
    found = rows()
    assert len(found) > 1 and not any("note" in row for row in found), found
    assert part == "limits" or seen.kernels.total() > 20


@pytest.mark.slow
def test_comparing(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run: what is compared must be equal."""
    monkeypatch.setattr(gpu_parts, "TINY", {"deepseek-v3": gpu_parts.TINY["deepseek-v3"]})
    with claimed_gpu():
        gpu_parts.parity(Options(GPU, True, time.monotonic() + 300))
    found = rows()
    assert len(found) == 3 and all(row["ok"] for row in found), found
