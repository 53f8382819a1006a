"""Every format by name, and the reader that finds out which one a file has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from eplb.offline.formats import adrs, ascend, native, omniinfer, plain, sglang, trtllm, vllm
from eplb.offline.formats.source import Hints, Source, open_source
from eplb.offline.placement_file import PlacementFile
from eplb.offline.trace import Trace


class Format(NamedTuple):
    """holds: "load", "placement" or "" for a source that is not of this format. A function is None where the peer has
    no such file."""

    what: str
    holds: Callable[[Source], str]
    read_load: Callable[[Source, Hints], Trace] | None = None
    read_placement: Callable[[Source, Hints], PlacementFile] | None = None
    write_load: Callable[[Path, Trace], None] | None = None
    write_placement: Callable[[Path, PlacementFile], None] | None = None


def _format(module: ModuleType) -> Format:
    functions = vars(module)
    return Format(module.WHAT, module.holds, *(functions.get(name) for name in Format._fields[2:]))


# In the order in which a file is offered to them: the plainest last.
_MODULES = (native, sglang, trtllm, ascend, adrs, vllm, omniinfer, plain)
FORMATS: Mapping[str, Format] = {module.NAME: _format(module) for module in _MODULES}


class Found(NamedTuple):
    """What a file turned out to be: exactly one of trace and placement is there."""

    format: str
    trace: Trace | None
    placement: PlacementFile | None


def read_any(path: Path, hints: Hints, format: str = "", kind: str = "") -> Found:
    """Read a file of any format. format and kind ("load", "placement", or "ids" for the experts that every token chose)
    are found out unless given; "ids" must be given.

    Raises MissingHint when the caller has to say more, ValueError (one line with the file's name) for what cannot be
    read.
    """
    source = open_source(path)
    if kind == "ids":
        return Found(plain.NAME, plain.read_ids(source, hints), None)
    names = [format] if format else list(FORMATS)
    for name in names:
        held = FORMATS[name].holds(source)
        if held or format:
            return _read(source, name, kind or held, hints)
    raise ValueError(f"{path} is {source.container.value} of no known format; the formats are {', '.join(FORMATS)}")


def _read(source: Source, name: str, kind: str, hints: Hints) -> Found:
    entry = FORMATS[name]
    if not kind:
        raise ValueError(f"{source.path} is {source.container.value} without what {name} has: {entry.what}")
    reader = entry.read_load if kind == "load" else entry.read_placement
    if reader is None:
        raise ValueError(f"{source.path}: {name} has no file of a {kind} ({entry.what})")
    try:
        result = reader(source, hints)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{source.path} is not what {name} writes ({entry.what}): {error}") from None
    if isinstance(result, Trace):
        return Found(name, result, None)
    return Found(name, None, result)


def read_any_trace(path: Path, hints: Hints) -> Trace:
    """The loads in a file of any format."""
    found = read_any(path, hints)
    if found.trace is None:
        raise ValueError(f"{path} is a placement ({found.format}); a trace of loads is needed")
    return found.trace


def read_any_placement(path: Path, hints: Hints) -> PlacementFile:
    """The placement in a file of any format."""
    found = read_any(path, hints)
    if found.placement is None:
        raise ValueError(f"{path} is a trace of loads ({found.format}); a placement is needed")
    return found.placement
