"""A small placement, and files of peers read and written, for the tests of eplb/formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eplb.offline.formats.registry import Found, read_any
from eplb.offline.formats.source import Hints
from eplb.offline.placement_file import PlacementFile, describe
from eplb.offline.trace import Trace
from eplb.placement import Placement
from eplb.repair import even_shares

# Two layers, three experts, two ranks with two slots; expert 0 and then expert 2 have two copies.
MAP_LP = [[0, 1, 2, 0], [2, 1, 0, 2]]
MAP_LGS = [[[0, 1], [2, 0]], [[2, 1], [0, 2]]]
TWO = Hints(ranks=2)


def flat(ids: Any = MAP_LGS, layer_ids: tuple[int, ...] = (0, 1), domains: tuple[int, ...] = ()) -> PlacementFile:
    array = np.array(ids, dtype=np.int32)
    experts = int(array.max()) + 1
    share = even_shares(array, experts)
    return describe(Placement(0, experts, array, share, (True,) * array.shape[1], domains), "", layer_ids)


def placement_in(path: Path, hints: Hints = TWO, **how: str) -> Found:
    found = read_any(path, hints, **how)
    assert found.placement is not None and found.trace is None
    return found


def load_in(path: Path, hints: Hints = Hints(), **how: str) -> tuple[str, Trace]:  # noqa: B008 -- frozen
    found = read_any(path, hints, **how)
    assert found.trace is not None and found.placement is None
    return found.format, found.trace


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
