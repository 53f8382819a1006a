"""TensorRT-LLM: the load balancer's YAML, and the folder of statistics that its models write.

Placements: num_slots, layer_updates_per_iter, initial_global_assignments: {model layer: [P expert ids, rank by rank]}.
Loads: a folder (EXPERT_STATISTIC_PATH) with meta_info.json {"num_experts", "num_experts_per_token"} and
rank*.safetensors, whose tensors are named "iteration_layer" and hold [E] counts of that rank.

Legend: L layers, G ranks, P slots of a layer on all ranks together, E logical experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs
from safetensors import SafetensorError, safe_open

from eplb.offline.files import decode_json, read_bytes, write_bytes
from eplb.offline.formats.parts import flat_map, numbers, placement_from, trace_from
from eplb.offline.formats.source import Container, Hints, Source
from eplb.offline.placement_file import PlacementFile
from eplb.offline.trace import Trace

NAME = "trtllm"
WHAT = "load balancer .yaml; folder of expert statistics"
ASSIGNMENTS = "initial_global_assignments"


class _Config(msgspec.Struct):
    initial_global_assignments: dict[int, list[int]]
    num_slots: int = 0
    layer_updates_per_iter: int = 0


class _MetaInfo(msgspec.Struct):
    num_experts: int
    num_experts_per_token: int = 0


def holds(source: Source) -> str:
    """ "load", "placement", or "" for what is no file of this format."""
    if source.container is Container.FOLDER:
        return "load" if (source.path / "meta_info.json").is_file() else ""
    is_object = source.container in (Container.YAML, Container.JSON)
    return "placement" if is_object and ASSIGNMENTS in source else ""


def read_placement(source: Source, hints: Hints) -> PlacementFile:
    where = source.path
    try:
        config = msgspec.yaml.decode(read_bytes(where), type=_Config, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from None
    layers = sorted(config.initial_global_assignments)
    if not layers:
        raise ValueError(f"{where}: {ASSIGNMENTS} names no layer")
    for layer in layers:
        found = len(config.initial_global_assignments[layer])
        if config.num_slots and found != config.num_slots:
            raise ValueError(f"{where}: layer {layer} assigns {found} slots; num_slots is {config.num_slots}")
    rows = [config.initial_global_assignments[layer] for layer in layers]
    return placement_from(numbers(rows, ASSIGNMENTS, where), where, hints, NAME, layers)


def write_placement(path: Path, file: PlacementFile) -> None:
    ids = flat_map(file, "TensorRT-LLM")
    lines = [f"num_slots: {ids[0].size}", "layer_updates_per_iter: 0", f"{ASSIGNMENTS}:"]
    for layer, ids_GS in zip(file.layer_ids, ids, strict=True):
        lines.append(f"  {layer}: [{', '.join(map(str, ids_GS.ravel().tolist()))}]")
    write_bytes(path, ("\n".join(lines) + "\n").encode())


def read_load(source: Source, hints: Hints) -> Trace:
    where = source.path
    meta: _MetaInfo = decode_json(read_bytes(where / "meta_info.json"), _MetaInfo, where / "meta_info.json")
    files = sorted(path for path in where.glob("rank*.safetensors") if not path.stem.endswith("_raw"))
    if not files:
        raise ValueError(f"{where} has no rank*.safetensors")
    counts: dict[tuple[int, int], npt.NDArray[Any]] = {}
    for path in files:
        _add_counts(path, counts, meta.num_experts)
    iterations, layers = (sorted({key[side] for key in counts}) for side in (0, 1))
    if len(counts) != len(iterations) * len(layers):
        raise ValueError(f"{where}: {len(iterations)} iterations of {len(layers)} layers are not all there")
    load = np.stack([np.stack([counts[i, layer] for layer in layers]) for i in iterations])
    hints = structs.replace(hints, top_k=hints.top_k or meta.num_experts_per_token, ranks=hints.ranks or len(files))
    return trace_from(load, where, hints, NAME, layers)


def _add_counts(path: Path, counts: dict[tuple[int, int], npt.NDArray[Any]], num_experts: int) -> None:
    try:
        with safe_open(path, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- no mapping, only looks like one
                iteration, _, layer = name.partition("_")
                count_E = tensors.get_tensor(name)
                if count_E.shape != (num_experts,) or not (iteration.isdigit() and layer.isdigit()):
                    raise ValueError(
                        f"{path}: tensor {name} {list(count_E.shape)}; expected iteration_layer with [{num_experts}]"
                    )
                key = (int(iteration), int(layer))
                counts[key] = counts[key] + count_E if key in counts else count_E.astype(np.float64)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
