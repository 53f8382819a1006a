"""Our own files: a trace as JSON lines or .npz (eplb.offline.trace), a placement as JSON
(eplb.offline.placement_file)."""

from __future__ import annotations

from pathlib import Path

from eplb.offline import placement_file
from eplb.offline import trace as trace_file
from eplb.offline.formats.parts import select_layers
from eplb.offline.formats.source import Container, Hints, Source
from eplb.offline.placement_file import PlacementFile
from eplb.offline.trace import Trace

NAME = "moesaic"
WHAT = "trace .jsonl or .npz; placement .json"


def holds(source: Source) -> str:
    """ "load", "placement", or "" for what is no file of this format."""
    if source.container is Container.LINES or (source.container is Container.NPZ and "header" in source):
        return "load"
    if source.container is Container.JSON and "format" in source:
        return "placement" if bytes(source.value["format"]) == f'"{placement_file.FORMAT}"'.encode() else ""
    return ""


def read_load(source: Source, hints: Hints) -> Trace:
    return select_layers(trace_file.read_trace(source.path, hints.progress, hints.skip_cut_line), hints, source.path)


def read_placement(source: Source, hints: Hints) -> PlacementFile:
    return placement_file.read_placement(source.path)


def write_load(path: Path, trace: Trace) -> None:
    trace_file.write_trace(path, trace)


def write_placement(path: Path, file: PlacementFile) -> None:
    placement_file.write_placement(path, file)
