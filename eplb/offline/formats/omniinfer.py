"""OmniInfer: a placement as a .npy (or a .npz with one array) of 0 and 1, [devices, layers, experts].

It says who hosts what, not in which slot and not with which share; layers and devices may differ in how many experts
they have. An imported placement takes the experts of a device in rising order.

Legend: L layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb.offline.files import replacing
from eplb.offline.formats.parts import flat_map, numbers
from eplb.offline.formats.parts import placement_from as placement_from_map
from eplb.offline.formats.source import Container, Hints, Source
from eplb.offline.placement_file import PlacementFile, describe

NAME = "omniinfer"
WHAT = "placement .npy, 0/1 [devices, layers, experts]"


def holds(source: Source) -> str:
    """ "placement", or "" for what is no file of this format: every expert of every layer must be on some device."""
    array = _only_array(source)
    if array is None or array.ndim != 3 or array.dtype.kind not in "iufb" or 0 in array.shape:
        return ""
    is_binary = bool(((array == 0) | (array == 1)).all())
    return "placement" if is_binary and bool(array.any(axis=0).all()) else ""


def _only_array(source: Source) -> npt.NDArray[Any] | None:
    if source.container is Container.NPY:
        value: npt.NDArray[Any] = source.value
        return value
    if source.container is Container.NPZ and len(source.value) == 1:
        only: npt.NDArray[Any] = next(iter(source.value.values()))
        return only
    return None


def read_placement(source: Source, hints: Hints) -> PlacementFile:
    where = source.path
    array = _only_array(source)
    if array is None or array.ndim != 3:
        raise ValueError(f"{where}: OmniInfer's placement is one array [devices, layers, experts]")
    hosts_LGE = numbers(array, "the placement", where).transpose(1, 0, 2)
    if not ((hosts_LGE == 0) | (hosts_LGE == 1)).all():
        raise ValueError(f"{where}: OmniInfer's placement holds 0 and 1 only")
    count_LG = hosts_LGE.astype(bool).sum(axis=2)
    slots = count_LG.max(axis=1)
    ids = np.full((*count_LG.shape, max(1, int(slots.max()))), -1, dtype=np.int64)
    for layer, rank, expert in np.argwhere(hosts_LGE):
        ids[layer, rank, np.argmin(ids[layer, rank])] = expert
    file = placement_from_map(ids, where, hints, NAME)
    kept = [int(slots[layer]) for layer in file.layer_ids]
    return describe(file.placement, file.model, file.layer_ids, kept, file.provenance)


def write_placement(path: Path, file: PlacementFile) -> None:
    ids = flat_map(file, "OmniInfer", unused_ok=True)
    hosts = np.zeros((ids.shape[1], ids.shape[0], file.placement.num_experts), dtype=np.int32)
    for layer, rank, slot in np.argwhere(ids >= 0):
        expert = ids[layer, rank, slot]
        if hosts[rank, layer, expert]:
            raise ValueError(
                f"OmniInfer cannot say that a device has an expert twice: expert {expert} on rank {rank} in layer "
                f"{file.layer_ids[layer]}"
            )
        hosts[rank, layer, expert] = 1
    with replacing(path) as stream:
        np.save(stream, hosts)
