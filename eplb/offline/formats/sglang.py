"""SGLang: recorder files (.pt), and expert locations (.pt or .json) for --init-expert-location.

Loads: {"logical_count": [T, L, E] or [L, E]} (recorder modes stat and stat_approx), or {"records": [{"forward_pass_id",
"rank", "global_physical_count": [L, P]}, ...], "last_physical_to_logical_map": [L, P]} (mode per_pass; each rank writes
a file of what it routed, and one file is taken as the sample that it is). Published counts as {"logical_count": {layer:
[E]}} are read too. Placements: {"physical_to_logical_map": [L, P]}, slots in rank order, tokens split evenly over
copies. L counts dense layers too: they have zeros in loads and any map in placements.

Legend: T records, L layers, E logical experts, P slots of a layer on all ranks together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from eplb.offline.files import write_bytes
from eplb.offline.formats import torch_link
from eplb.offline.formats.parts import all_layers, flat_map, numbers, placement_from, trace_from
from eplb.offline.formats.source import Container, Hints, Source
from eplb.offline.placement_file import PlacementFile
from eplb.offline.trace import Trace

NAME = "sglang"
WHAT = "recorder .pt, expert location .pt or .json"
COUNT, MAP, LAST_MAP = "logical_count", "physical_to_logical_map", "last_physical_to_logical_map"


def holds(source: Source) -> str:
    """ "load", "placement", or "" for what is no file of this format."""
    if source.container not in (Container.TORCH, Container.JSON):
        return ""
    if MAP in source:
        return "placement"
    return "load" if COUNT in source or ("records" in source and LAST_MAP in source) else ""


def read_load(source: Source, hints: Hints) -> Trace:
    if source.container is Container.TORCH and COUNT not in source:
        return _passes(source, hints)
    value = source.value[COUNT]
    if source.container is Container.JSON:
        value = source.json(COUNT, Any)
    layer_ids: list[int] = []
    if isinstance(value, dict):
        layer_ids, value = _by_layer(value, source.path)
    load = numbers(value, COUNT, source.path)
    return trace_from(load, source.path, hints, NAME, layer_ids, drop_idle_layers=True)


def _by_layer(value: dict[str, Any], where: Path) -> tuple[list[int], list[Any]]:
    try:
        layers = {int(key): row for key, row in value.items()}
    except ValueError:
        raise ValueError(f"{where}: the keys of {COUNT} must be layer numbers") from None
    return sorted(layers), [layers[layer] for layer in sorted(layers)]


def _passes(source: Source, hints: Hints) -> Trace:
    """One record per forward pass: physical counts, summed over the ranks in the file, turned into logical ones."""
    where = source.path
    ids_LP = numbers(source.value[LAST_MAP], LAST_MAP, where).astype(np.int64)
    if ids_LP.ndim != 2 or ids_LP.min() < 0:
        raise ValueError(f"{where}: {LAST_MAP} must be [layers, slots] of expert ids, 0 or more")
    by_pass: dict[int, npt.NDArray[Any]] = {}
    for index, record in enumerate(source.value["records"]):
        if not isinstance(record, dict) or not {"forward_pass_id", "global_physical_count"} <= record.keys():
            raise ValueError(f"{where}: records[{index}] has no forward_pass_id and global_physical_count")
        count_LP = numbers(record["global_physical_count"], "global_physical_count", where)
        if count_LP.shape != ids_LP.shape:
            raise ValueError(
                f"{where}: records[{index}] counts {list(count_LP.shape)} slots; {LAST_MAP} has {list(ids_LP.shape)}"
            )
        number = int(record["forward_pass_id"])
        by_pass[number] = by_pass[number] + count_LP if number in by_pass else count_LP.astype(np.int64)
    if not by_pass:
        raise ValueError(f"{where} has no records")
    num_layers, num_experts = len(ids_LP), int(ids_LP.max()) + 1
    flat_N = (np.arange(num_layers)[:, None] * num_experts + ids_LP).ravel()
    load = np.stack(
        [
            np.bincount(flat_N, weights=by_pass[number].ravel(), minlength=num_layers * num_experts)
            for number in sorted(by_pass)
        ]
    )
    return trace_from(load.reshape(-1, num_layers, num_experts), where, hints, NAME, drop_idle_layers=True)


def read_placement(source: Source, hints: Hints) -> PlacementFile:
    value = source.value[MAP] if source.container is Container.TORCH else source.json(MAP, list[list[int]])
    return placement_from(numbers(value, MAP, source.path), source.path, hints, NAME)


def write_load(path: Path, trace: Trace) -> None:
    idle_E = np.zeros(trace.num_experts, dtype=trace.load.dtype)
    load = all_layers(trace.load, trace.layer_ids, idle_E)
    whole = np.array_equal(load, np.rint(load)) and load.max() < 2**31
    _write(path, COUNT, load.astype(np.int32) if whole else load)


def write_placement(path: Path, file: PlacementFile) -> None:
    ids = flat_map(file, "SGLang")
    ids_LP = ids.reshape(len(ids), -1)
    # What SGLang itself starts with: a layer without experts needs a map too.
    idle_P = np.arange(ids_LP.shape[1], dtype=np.int32) % file.placement.num_experts
    _write(path, MAP, all_layers(ids_LP, file.layer_ids, idle_P))


def _write(path: Path, key: str, array: npt.NDArray[Any]) -> None:
    if path.suffix == ".pt":
        torch_link.write(path, {key: array.astype(np.int64) if key == MAP else array})
    else:
        write_bytes(path, msgspec.json.encode({key: array.tolist()}) + b"\n")
