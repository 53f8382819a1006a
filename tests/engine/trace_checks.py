"""What a trace must be to be read by chrome://tracing and ui.perfetto.dev, and what of it overlaps.

After "Trace Event Format" (Google, document 1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from ep import recorder

Event = dict[str, Any]

NEEDED = {
    "M": {"args"},
    "X": {"ts", "dur", "cat", "args"},
    "s": {"ts", "cat", "id"},
    "f": {"ts", "cat", "id", "bp"},
    "i": {"ts", "cat", "s"},
}
NANOSECOND = 1e-3  # microseconds; ends are sums of rounded numbers


def read_trace(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    return trace


def packed(events: list[recorder.Event]) -> bytes:
    """As a rank's recorder packs them."""
    record = recorder.Recorder(len(events))
    for event in events:
        record.add(event.kind, event.start, event.end, event.step, event.amount, event.layer, event.lane)
    return record.finish()[0]


def check_trace(trace: dict[str, Any]) -> list[Event]:
    """Raises AssertionError; the slices, those of a thread in order of time."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = trace["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid"} | NEEDED[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    slices = [event for event in events if event["ph"] == "X"]
    for thread in {(item["pid"], item["tid"]) for item in slices}:
        times = [item["ts"] for item in slices if (item["pid"], item["tid"]) == thread]
        assert times == sorted(times)
    _check_names(events)
    _check_nesting(slices)
    _check_flows(events, slices)
    return slices


def _check_names(events: list[Event]) -> None:
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            assert event["pid"] not in processes
            processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in threads
            threads[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "M":
            assert event["name"] in ("process_sort_index", "thread_sort_index")
            assert isinstance(event["args"]["sort_index"], int)
    assert len(set(threads.values())) == len(threads)
    for event in events:
        assert event["pid"] in processes and (event["ph"] == "M" or (event["pid"], event["tid"]) in threads), event


def _check_nesting(slices: list[Event]) -> None:
    """Two slices of a thread are nested or disjoint."""
    by_thread = defaultdict(list)
    for item in slices:
        by_thread[item["pid"], item["tid"]].append(item)
    for items in by_thread.values():
        ends: list[float] = []
        for item in sorted(items, key=lambda item: (item["ts"], -item["dur"])):
            while ends and ends[-1] <= item["ts"] + NANOSECOND:
                ends.pop()
            end = item["ts"] + item["dur"]
            assert not ends or end <= ends[-1] + NANOSECOND, item
            ends.append(end)


def _check_flows(events: list[Event], slices: list[Event]) -> None:
    """Every arrow has one beginning, in a dispatch, and one end, in the combine of the same layer."""
    starts = {(event["cat"], event["id"]): event for event in events if event["ph"] == "s"}
    ends = {(event["cat"], event["id"]): event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) + len(ends) == sum(event["ph"] in "sf" for event in events)
    at = {(item["pid"], item["tid"], item["ts"], item["name"]): item for item in slices}
    for key, start in starts.items():
        end = ends[key]
        assert end["bp"] == "e" and start["name"] == end["name"] and start["ts"] <= end["ts"]
        dispatch = at[start["pid"], start["tid"], start["ts"], "dispatch"]
        combine = at[end["pid"], end["tid"], end["ts"], "combine"]
        assert all(dispatch["args"][name] == combine["args"][name] for name in ("step", "layer"))
    assert len(starts) == sum(item["name"] == "combine" for item in slices)


def lanes_of(trace: dict[str, Any], rank: int) -> dict[int, list[Event]]:
    """The slices of each lane of a rank, in order of time."""
    lanes: dict[int, list[Event]] = {}
    for event in trace["traceEvents"]:
        name = event["args"]["name"] if event["ph"] == "M" and event["name"] == "thread_name" else ""
        if name.startswith(f"rank {rank} lane "):
            lanes[event["tid"]] = []
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["tid"] in lanes:
            lanes[event["tid"]].append(event)
    return dict(enumerate(lanes.values()))


def hidden(trace: dict[str, Any], rank: int) -> float:
    """Microseconds for which another lane of the rank computed while one's tokens were in flight."""
    lanes = lanes_of(trace, rank)
    total = 0.0
    for lane, items in lanes.items():
        for before, after in pairwise(items):
            if before["name"] not in ("dispatch", "combine") or after["name"] != "wait":
                continue
            start, end = before["ts"] + before["dur"], after["ts"]
            for other, work in lanes.items():
                if other != lane:
                    total += sum(
                        item["dur"]
                        for item in work
                        if item["name"] in ("attention", "experts")
                        and start <= item["ts"] + NANOSECOND
                        and item["ts"] + item["dur"] <= end + NANOSECOND
                    )
    return total
