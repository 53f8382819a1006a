"""vllm-ascend (and MindIE's family): the expert map JSON, and loads as a .pt table [L, E].

{"moe_layer_count": L, "layer_list": [{"layer_id": 0, "device_count": G, "device_list":
    [{"device_id": 0, "device_expert": [ids]}, ...]}, ...]}, every list of the same length.

Legend: L layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from eplb.offline.files import write_bytes
from eplb.offline.formats import torch_link
from eplb.offline.formats.parts import flat_map, numbers, placement_from, trace_from
from eplb.offline.formats.source import Container, Hints, Source
from eplb.offline.placement_file import PlacementFile
from eplb.offline.trace import Trace

NAME = "vllm-ascend"
WHAT = "expert map .json; table of loads .pt"


class _Device(msgspec.Struct):
    device_expert: list[int]
    device_id: int = -1


class _Layer(msgspec.Struct):
    device_list: list[_Device]
    layer_id: int
    device_count: int = 0


def holds(source: Source) -> str:
    """ "load", "placement", or "" for what is no file of this format."""
    if source.container is Container.TORCH:
        return "load" if isinstance(source.value, np.ndarray) and source.value.ndim in (2, 3) else ""
    return "placement" if source.container is Container.JSON and "layer_list" in source else ""


def read_load(source: Source, hints: Hints) -> Trace:
    return trace_from(numbers(source.value, "the table", source.path), source.path, hints, NAME)


def read_placement(source: Source, hints: Hints) -> PlacementFile:
    where = source.path
    layers: list[_Layer] = source.json("layer_list", list[_Layer])
    if "moe_layer_count" in source:
        count = source.json("moe_layer_count", int)
        if count != len(layers):
            raise ValueError(f"{where}: moe_layer_count is {count}, but layer_list has {len(layers)} layers")
    if not layers:
        raise ValueError(f"{where}: layer_list is empty")
    rows = []
    for layer in layers:
        if layer.device_count and layer.device_count != len(layer.device_list):
            raise ValueError(
                f"{where}: layer {layer.layer_id} has {len(layer.device_list)} devices; device_count is "
                f"{layer.device_count}"
            )
        given = [device.device_id for device in layer.device_list]
        order = np.argsort(given, kind="stable") if min(given, default=-1) >= 0 else range(len(given))
        rows.append([layer.device_list[int(index)].device_expert for index in order])
    ids = numbers(rows, "device_expert", where)
    return placement_from(ids, where, hints, NAME, [layer.layer_id for layer in layers])


def write_load(path: Path, trace: Trace) -> None:
    if trace.num_records > 1:
        raise ValueError(
            f"vllm-ascend reads one table of loads; this trace has {trace.num_records} records; --sum adds them up"
        )
    torch_link.write(path, trace.load[0].astype(np.float32))


def write_placement(path: Path, file: PlacementFile) -> None:
    ids = flat_map(file, "vllm-ascend")
    layers = [
        {
            "layer_id": layer,
            "device_count": len(ids_GS),
            "device_list": [{"device_id": rank, "device_expert": ids_S} for rank, ids_S in enumerate(ids_GS.tolist())],
        }
        for layer, ids_GS in zip(file.layer_ids, ids, strict=True)
    ]
    data = msgspec.json.encode({"moe_layer_count": len(layers), "layer_list": layers})
    write_bytes(path, msgspec.json.format(data, indent=1) + b"\n")
