"""What all formats of eplb/formats have in common: what is written comes back, what is wrong is refused in one line."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer_files import MAP_LGS, TWO, flat, load_in, write

from eplb.offline.formats.registry import FORMATS, read_any, read_any_placement, read_any_trace
from eplb.offline.formats.source import Hints
from eplb.offline.placement_file import describe
from eplb.offline.trace import make_trace
from eplb.placement import Placement, linear_placement

PLACEMENTS = [(name, entry) for name, entry in FORMATS.items() if entry.write_placement]
LOADS = [(name, entry) for name, entry in FORMATS.items() if entry.write_load]


@pytest.mark.parametrize(("name", "entry"), PLACEMENTS, ids=[name for name, _ in PLACEMENTS])
def test_every_placement_comes_back(tmp_path: Path, name: str, entry: Any) -> None:
    path = tmp_path / ("p.npy" if name in ("npy", "omniinfer") else "p.yaml" if name == "trtllm" else "p.json")
    file = flat([[[0, 1], [0, 2]], [[1, 2], [0, 2]]])
    entry.write_placement(path, file)
    found = read_any(path, TWO, kind="placement" if name == "npy" else "")
    assert found.format == name
    assert found.placement and found.placement.placement.checksum() == file.placement.checksum()


@pytest.mark.parametrize(("name", "entry"), LOADS, ids=[name for name, _ in LOADS])
def test_every_load_comes_back(tmp_path: Path, name: str, entry: Any) -> None:
    path = tmp_path / {"npy": "l.npy", "sglang": "l.pt", "vllm-ascend": "l.pt", "moesaic": "l.jsonl"}.get(
        name, "l.json"
    )
    trace = make_trace([[[1, 2, 3], [4, 5, 6]]])
    entry.write_load(path, trace)
    found, back = load_in(path)
    assert found == name
    assert back.load.tolist() == trace.load.tolist()


@pytest.mark.parametrize("name", [name for name, _ in PLACEMENTS if name != "moesaic"])
def test_shares_are_refused_by_name(tmp_path: Path, name: str) -> None:
    share = np.array([[[0.8, 1], [1, 0.2]]], dtype=np.float32)
    file = describe(Placement(0, 3, np.array(MAP_LGS[:1], dtype=np.int32), share, (True, True)))
    with pytest.raises(ValueError, match=r"rank 0 takes 0.800 of expert 0; .*--flat"):
        FORMATS[name].write_placement(tmp_path / "x", file)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["sglang", "trtllm", "vllm-ascend", "vllm"])
def test_unused_slots_and_dead_ranks_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="slot 1 of rank 1 in layer 0 holds no expert"):
        FORMATS[name].write_placement(tmp_path / "x", flat([[[0, 1], [2, -1]]], (0,)))
    ids = np.array([[[0, 1], [-1, -1]]], dtype=np.int32)
    dead = describe(Placement(0, 2, ids, (ids >= 0).astype(np.float32), (True, False)))
    with pytest.raises(ValueError, match="rank 1 is not alive"):
        FORMATS[name].write_placement(tmp_path / "x", dead)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.json", b"{", "x.json"),
        ("x.json", b'{"what": 1}', "of no known format; the formats are moesaic, sglang"),
        ("x.json", b'{"logical_count": [[1, -2]]}', "is -2"),
        ("x.json", b'{"logical_count": [[1, NaN]]}', "nan"),
        ("x.json", b'{"logical_count": [[1, 2], [3]]}', "differ in length"),
        ("x.json", b'{"logical_count": [[1, "a"]]}', "no number"),
        ("x.json", b'{"logical_count": [[0, 0]]}', "no layer received any token"),
        ("x.json", b'{"logical_count": {"a": [1]}}', "layer numbers"),
        ("x.json", b'{"logical_count": 3}', "shape"),
        ("x.json", b'{"physical_to_logical_map": [[0, 1, 1, 3]]}', "expert(s) have no slot"),
        ("x.json", b'{"physical_to_logical_map": [[0, "x"]]}', "physical_to_logical_map"),
        ("x.json", b'{"physical_to_logical_map": []}', "shape"),
        ("x.json", b'{"load_history": []}', "load_history is empty"),
        ("x.yaml", b"a: [1\n", "x.yaml"),
        ("x.yaml", b"initial_global_assignments: 3\n", "initial_global_assignments"),
        ("x.yaml", b"initial_global_assignments: {3: [0, a]}\n", "x.yaml"),
        ("x.npy", b"\x93NUMPY\x01\x00junk", "no readable .npy"),
        ("x.npz", b"PK\x03\x04junk", "cut off or damaged"),
        ("x.pt", b"junk", "no readable torch file"),
        ("x.bin", b"\x00\x01", "no JSON, YAML"),
        ("x.json", b"", "is empty"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read_any(path, TWO)
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


_VALUES = (b"NaN", b"-1", b"1e999", b"null", b"{}", b"[]", b'"x"', b"9" * 20, b"true", b"0.5", b"]", b"}")


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to three changes: a byte, a gap, the end cut off, or another value in place of one."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        values = list(re.finditer(rb'-?\d+(\.\d+)?|"[^"]*"|\[[^\[\]]*\]', data))
        kind = rng.randrange(4)
        if kind == 0:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + rng.randint(1, 30) :]
        elif kind == 2 or not values:
            data = data[:at]
        else:
            value = rng.choice(values)
            data = data[: value.start()] + rng.choice(_VALUES) + data[value.end() :]
    return data


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    """Never another exception, never a message without the file's name."""
    rng = random.Random(seed)
    whole: dict[str, bytes] = {}
    trace = make_trace([[[1, 2, 3], [4, 5, 6]]])
    for name, suffix in (
        ("moesaic", "jsonl"),
        ("moesaic", "npz"),
        ("sglang", "json"),
        ("adrs", "json"),
        ("npy", "npy"),
    ):
        FORMATS[name].write_load(tmp_path / f"l.{suffix}", trace)
        whole[f"{name}_load.{suffix}"] = (tmp_path / f"l.{suffix}").read_bytes()
    for name, suffix in (
        ("moesaic", "json"),
        ("sglang", "pt"),
        ("trtllm", "yaml"),
        ("vllm-ascend", "json"),
        ("omniinfer", "npy"),
    ):
        FORMATS[name].write_placement(tmp_path / f"p.{suffix}", flat())
        whole[f"{name}_placement.{suffix}"] = (tmp_path / f"p.{suffix}").read_bytes()
    for _ in range(150):
        name = rng.choice(sorted(whole))
        (tmp_path / name).write_bytes(damaged(whole[name], rng))
        try:
            read_any(tmp_path / name, TWO)
        except ValueError as error:
            assert name in str(error)
            assert "\n" not in str(error)


def test_a_trace_where_a_placement_is_needed(tmp_path: Path) -> None:
    load = write(tmp_path / "load.json", '{"logical_count": [[1, 2]]}')
    FORMATS["moesaic"].write_placement(tmp_path / "p.json", describe(linear_placement(1, 2, 2)))
    with pytest.raises(ValueError, match="is a trace of loads"):
        read_any_placement(load, Hints())
    with pytest.raises(ValueError, match="is a placement"):
        read_any_trace(tmp_path / "p.json", Hints())
    with pytest.raises(ValueError, match="without what trtllm has"):
        read_any(load, Hints(), format="trtllm")


def test_layers_can_be_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "load.json", '{"logical_count": [[1, 2], [3, 4], [5, 6]]}')
    _, trace = load_in(path, Hints(layers=(1, 2), model="m", ranks=8))
    assert (trace.load.tolist(), trace.layer_ids, trace.meta.model, trace.meta.ranks) == (
        [[[3, 4], [5, 6]]],
        (1, 2),
        "m",
        8,
    )
    with pytest.raises(ValueError, match="no layer 9; its layers are 0 to 2"):
        read_any(path, Hints(layers=(1, 9)))
