"""Bare numbers: loads [T, L, E] or [L, E], a map of slots [L, G, S] or [L, P], or the experts that every token chose
[N, L, K], as .npy, .npz with one array, .pt, or (loads) a table as text with a row per layer.

Nothing in such a file says which of them it is: whole numbers with a -1, or --kind placement, are a map; --kind ids are
choices; all else are loads.

Legend: N tokens, K experts per token, T records, L layers, E logical experts, G ranks, S slots of a rank, P slots of a
layer on all ranks together.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from eplb.offline.files import read_bytes, replacing
from eplb.offline.formats.parts import flat_map, numbers, placement_from, trace_from
from eplb.offline.formats.source import Container, Hints, Source
from eplb.offline.placement_file import PlacementFile
from eplb.offline.trace import Trace

NAME = "npy"
WHAT = "bare arrays .npy or .npz; loads as .csv or JSON lists"
_LOAD_NAMES = ("load", "loads", "count", "counts", "logical_count", "expert_load")


def holds(source: Source) -> str:
    """ "load", "placement", or "" for what is no file of this format."""
    if source.container is Container.TABLE or (source.container is Container.JSON and isinstance(source.value, list)):
        return "load"
    if source.container not in (Container.NPY, Container.NPZ):
        return ""
    array = _array(source)
    return "placement" if array.dtype.kind == "i" and array.size and array.min() == -1 else "load"


def _array(source: Source) -> npt.NDArray[Any]:
    if source.container is Container.NPY:
        only: npt.NDArray[Any] = source.value
        return only
    names = [name for name in source.value if len(source.value) == 1 or name in _LOAD_NAMES]
    if len(names) != 1:
        raise ValueError(
            f"{source.path} holds {', '.join(source.value)}; one array, or one of the name {_LOAD_NAMES[0]}, is needed"
        )
    chosen: npt.NDArray[Any] = source.value[names[0]]
    return chosen


def _text(source: Source) -> npt.NDArray[Any]:
    """Rows of numbers separated by commas, tabs or spaces; lines of # are left out."""
    text = read_bytes(source.path).decode("utf-8", "replace").replace(",", " ")
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        raise ValueError(f"{source.path} is a table without a row")
    try:
        return np.loadtxt(io.StringIO(text), ndmin=2, dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{source.path} is no table of numbers: {' '.join(str(error).split())}") from None


def read_load(source: Source, hints: Hints) -> Trace:
    if source.container is Container.TABLE:
        array = _text(source)
    elif source.container is Container.JSON:
        array = numbers(source.value, "the list", source.path)
    else:
        array = _array(source)
    return trace_from(numbers(array, "the array", source.path), source.path, hints, NAME)


def read_ids(source: Source, hints: Hints) -> Trace:
    """Choices [N, L, K] or, of one layer, [N, K] (-1: none) as counts, hints.record_tokens tokens to a record."""
    where = source.path
    value = source.value if source.container is not Container.NPZ else _array(source)
    ids_NLK = numbers(value, "the array", where)
    if ids_NLK.ndim == 2:
        ids_NLK = ids_NLK[:, None, :]
    if ids_NLK.ndim != 3 or 0 in ids_NLK.shape or ids_NLK.dtype.kind not in "iu":
        raise ValueError(
            f"{where}: choices are whole numbers [tokens, layers, experts per token], not {ids_NLK.dtype} "
            f"{list(ids_NLK.shape)}"
        )
    num_layers, top = ids_NLK.shape[1], int(ids_NLK.max())
    num_experts = hints.experts or top + 1
    if ids_NLK.min() < -1 or top >= num_experts or num_experts > 1 << 16:
        raise ValueError(f"{where}: ids are {ids_NLK.min()} to {top}; they must be -1 (none) to {num_experts - 1}")
    loads, tokens = [], []
    for start in range(0, len(ids_NLK), hints.record_tokens):
        some_NLK = ids_NLK[start : start + hints.record_tokens].astype(np.int64)
        flat = (some_NLK + np.arange(num_layers)[:, None] * num_experts)[some_NLK >= 0]
        loads.append(np.bincount(flat, minlength=num_layers * num_experts).reshape(num_layers, num_experts))
        tokens.append(len(some_NLK))
    hints = structs.replace(hints, top_k=hints.top_k or ids_NLK.shape[2])
    trace = trace_from(np.stack(loads), where, hints, NAME)
    return Trace(trace.load, trace.step, trace.steps, np.array(tokens, dtype=np.int64), trace.meta)


def read_placement(source: Source, hints: Hints) -> PlacementFile:
    value = source.value if source.container is Container.JSON else _array(source)
    return placement_from(numbers(value, "the array", source.path), source.path, hints, NAME)


def write_load(path: Path, trace: Trace) -> None:
    with replacing(path) as stream:
        np.save(stream, trace.load)


def write_placement(path: Path, file: PlacementFile) -> None:
    ids = flat_map(file, "a bare .npy map", unused_ok=True)
    with replacing(path) as stream:
        np.save(stream, ids.astype(np.int32))
