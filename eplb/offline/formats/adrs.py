"""The ADRS benchmark's load history: {"load_history": [{"logical_expert_load": [[E] * L]}, ...]}, loads only.

Legend: T records, L layers, E logical experts.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from eplb.offline.files import decode_json, replacing
from eplb.offline.formats.parts import numbers, trace_from
from eplb.offline.formats.source import Container, Hints, Source
from eplb.offline.trace import Trace, narrow

NAME = "adrs"
WHAT = "load history .json"


class _Entry(msgspec.Struct):
    logical_expert_load: list[list[float]]


def holds(source: Source) -> str:
    """ "load", or "" for what is no file of this format."""
    return "load" if source.container is Container.JSON and "load_history" in source else ""


def read_load(source: Source, hints: Hints) -> Trace:
    """One entry at a time: the whole history as Python numbers would take ten times the file."""
    loads = []
    for index, raw in enumerate(source.json("load_history", list[msgspec.Raw])):
        entry: _Entry = decode_json(raw, _Entry, f"{source.path}: load_history[{index}]")
        loads.append(narrow(numbers(entry.logical_expert_load, f"load_history[{index}]", source.path)))
        if loads[-1].shape != loads[0].shape:
            raise ValueError(
                f"{source.path}: load_history[{index}] has shape {list(loads[-1].shape)}; the first has "
                f"{list(loads[0].shape)}"
            )
    if not loads:
        raise ValueError(f"{source.path}: load_history is empty")
    return trace_from(np.stack(loads), source.path, hints, NAME)


def write_load(path: Path, trace: Trace) -> None:
    with replacing(path) as stream:
        stream.write(b'{"load_history": [')
        for index, load_LE in enumerate(trace.load):
            whole = np.array_equal(load_LE, np.rint(load_LE))
            rows = (load_LE.astype(np.int64) if whole else load_LE.astype(np.float64)).tolist()
            stream.write(b",\n" if index else b"\n")
            stream.write(msgspec.json.encode({"logical_expert_load": rows}))
        stream.write(b"\n]}\n")
