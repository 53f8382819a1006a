"""What is read from traces: figures of steps, and the command that prints them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from trace_checks import check_trace, hidden, packed, read_trace

from ep.recorder import Event, Kind
from front.messages import ProfilePart
from front.profiling import Profile
from front.trace_figures import figures
from front.trace_file import write_trace
from moesaic.cli import cli

MS = 10**6
ORDER = [Kind.ATTENTION, Kind.DISPATCH, Kind.WAIT_DISPATCH, Kind.EXPERTS, Kind.COMBINE, Kind.WAIT_COMBINE]


def slices(lane: int, times: list[tuple[int, int]], step: int = 4) -> list[Event]:
    return [
        Event(start * MS, end * MS, step, 8, 1, kind, lane) for kind, (start, end) in zip(ORDER, times, strict=True)
    ]


def traced(path: Path, of_ranks: list[list[Event]]) -> dict[str, Any]:
    parts = [
        ProfilePart(profile_id=1, rank=rank, started=True, events=packed(events))
        for rank, events in enumerate(of_ranks)
    ]
    write_trace(Profile(path, parts, [], 1.0))
    found = read_trace(path)
    check_trace(found)
    return found


def test_one_lane(tmp_path: Path) -> None:
    """Rank 1 attends for longer, so rank 0 waits for its tokens; that is no exchange."""
    first = slices(0, [(0, 10), (10, 11), (11, 25), (25, 30), (30, 31), (31, 35)])
    second = slices(0, [(0, 20), (20, 21), (21, 24), (24, 30), (30, 32), (32, 36)])
    forward = [Event(0, end * MS, 4, 8, 0, Kind.FORWARD, 0) for end in (35, 36)]
    broken = Event(40 * MS, 41 * MS, 5, 8, 0, Kind.FORWARD, 0)  # nobody else has this step
    (step,) = figures(traced(tmp_path / "x.json", [[*first, forward[0], broken], [*second, forward[1]]]))
    assert step.tokens == (8, 8) and step.lanes == 1 and step.step == 4
    assert step.forward == 36
    assert step.computed == 20 + 1 + 6 + 2
    assert step.travelled == (25 - 21) + (36 - 32)
    assert (step.flight, step.waited) == (14 + 3 + 4 + 4, 14 + 3 + 4 + 4)


def test_two_lanes(tmp_path: Path) -> None:
    one = slices(0, [(0, 10), (10, 11), (22, 23), (23, 30), (30, 31), (42, 42)])
    two = slices(1, [(11, 21), (21, 22), (31, 32), (32, 40), (40, 41), (42, 50)])
    (step,) = figures(traced(tmp_path / "x.json", [[*one, *two, Event(0, 50 * MS, 4, 16, 0, Kind.FORWARD, 0)]]))
    assert step.lanes == 2 and step.tokens == (16,) and step.forward == 50
    assert step.waited == 1 + 0 + 1 + 8 and step.flight == 12 + 11 + 10 + 9


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    words = [
        "bench",
        "dbo",
        "--tokens",
        "64",
        "--steps",
        "3",
        "--rounds",
        "1",
        "--dtype",
        "float32",
        "--threads-per-rank",
        "1",
    ]
    result = CliRunner().invoke(cli, [*words, "--trace-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout.splitlines()[-1])
    assert row["ranks"] == 2 and row["lanes"] == 2 and row["tokens"] == 64 and row["steps"] >= 3
    assert row["ideal_ms"] == max(row["compute_ms"], row["exchange_ms"]) > 0
    assert row["sum_ms"] == pytest.approx(row["compute_ms"] + row["exchange_ms"], abs=0.002)
    assert all(row[f"{mode}_ms"] > 0 for mode in ("off", "on", "auto")) and row["hidden"] <= 1
    assert hidden(read_trace(tmp_path / "on.json"), 0) > 0 == hidden(read_trace(tmp_path / "off.json"), 0)


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--tokens", "1"], "--tokens"), (["--steps", "2"], "--steps"), (["-dp", "1"], "--data-parallel-size")],
)
def test_bad_wishes(words: list[str], named: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "dbo", *words])
    assert isinstance(result.exception, ValueError) and named in str(result.exception)


def test_the_picture(tmp_path: Path) -> None:
    for name, start in (("off", 0), ("on", 7)):
        times = [
            (start + begin, start + end) for begin, end in [(0, 10), (10, 11), (13, 16), (16, 30), (30, 31), (31, 35)]
        ]
        forward = Event(start * MS, (start + 40) * MS, 4, 8, 0, Kind.FORWARD, 0)
        traced(tmp_path / f"{name}.json", [[*slices(0, times), forward] for _ in range(2)])
    script = Path(__file__).parents[2] / "benchmarks" / "trace_picture.py"
    out = tmp_path / "x.svg"
    command = [sys.executable, str(script), str(tmp_path / "off.json"), str(tmp_path / "on.json"), "--out", str(out)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    assert [(row["trace"], row["step"], row["forward"]) for row in rows] == [
        ("off.json", 4, 40.0),
        ("on.json", 4, 40.0),
    ]
    assert [row["hidden"] for row in rows] == [round(1 - 7 / 9, 3)] * 2
    bars = [node for node in ElementTree.parse(out).iter() if len(node)]
    notes = [node[0].text for node in bars if node.tag.endswith("rect")]
    assert len(notes) == 2 * 2 * (6 + 2)
    assert notes.count("experts, layer 1, 14.000 ms") == 4 and notes.count("in flight 5.000 ms") == 4
    refused = subprocess.run([*command, "--step", "9"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "no exchanges of step 9" in refused.stderr
