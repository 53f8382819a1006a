"""Forks of vLLM that read a map: {"version": 2, "model_maps": {architecture: {"physical_to_logical_map": [L, P]}}}.

vLLM itself neither writes loads nor reads placements (0.32).

Legend: L layers, P slots of a layer on all ranks together.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from eplb.offline.files import write_bytes
from eplb.offline.formats.parts import flat_map, numbers, placement_from
from eplb.offline.formats.source import Container, Hints, Source
from eplb.offline.placement_file import PlacementFile

NAME = "vllm"
WHAT = "map .json of forks"


class _Map(msgspec.Struct):
    physical_to_logical_map: list[list[int]]


def holds(source: Source) -> str:
    """ "placement", or "" for what is no file of this format."""
    return "placement" if source.container is Container.JSON and "model_maps" in source else ""


def read_placement(source: Source, hints: Hints) -> PlacementFile:
    maps: dict[str, _Map] = source.json("model_maps", dict[str, _Map])
    chosen = hints.model if hints.model in maps else next(iter(maps), "")
    if len(maps) > 1 and chosen != hints.model:
        raise ValueError(f"{source.path} holds maps of {', '.join(maps)}; --model chooses one")
    if not maps:
        raise ValueError(f"{source.path}: model_maps is empty")
    ids = numbers(maps[chosen].physical_to_logical_map, "physical_to_logical_map", source.path)
    file = placement_from(ids, source.path, hints, NAME)
    return PlacementFile(file.placement, file.slots, file.layer_ids, chosen, file.provenance)


def write_placement(path: Path, file: PlacementFile) -> None:
    ids = flat_map(file, "vLLM")
    maps = {file.model or "model": {"physical_to_logical_map": ids.reshape(len(ids), -1).tolist()}}
    write_bytes(path, msgspec.json.encode({"version": 2, "model_maps": maps}) + b"\n")
