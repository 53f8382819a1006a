"""The store of weights that a process maps before it is a rank (engine/process/rank_store.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from configs.engine import EngineConfig, Plan
from engine.plan import make_plan
from engine.process.places import STORE
from engine.process.rank_store import begin
from store.filling import Whole, take_all
from store.memory import Store, make_store

pytestmark = pytest.mark.store
KEY = "key"


@pytest.fixture
def path() -> Iterator[Path]:
    file = make_store("test")
    yield Path(f"/proc/{os.getpid()}/fd/{file}")
    os.close(file)


@pytest.fixture
def plan(tmp_path: Path, path: Path) -> Plan:
    (tmp_path / "memory.json").write_bytes(msgspec.json.encode({STORE: str(path)}))
    plan = replace(make_plan(EngineConfig()), weight_store=True, weight_key=KEY, store_nodes=())
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    return plan


def fill(path: Path) -> None:
    weights = torch.arange(1000.0)

    def take(tensors: Mapping[str, Tensor]) -> None:
        assert torch.equal(tensors["x"], weights)

    store = Store(path, KEY, 1 << 30)
    take_all(store, [Whole(list, lambda: {"x": weights}, take, lambda keys: None)])
    store.close()


def test_a_full_store_is_mapped(tmp_path: Path, path: Path, plan: Plan) -> None:
    fill(path)
    begun = begin(tmp_path / "plan.json", tmp_path, tmp_path / "memory.json")
    assert begun is not None and begun.store.complete and begun.reading is None
    for thread in threading.enumerate():
        if thread.name == "mapping":
            thread.join(30.0)
    begun.store.close()


def test_one_that_is_to_be_filled_is_the_ranks(tmp_path: Path, plan: Plan) -> None:
    assert begin(tmp_path / "plan.json", tmp_path, tmp_path / "memory.json") is None


def test_one_of_its_node_waits_for_its_cores(tmp_path: Path, path: Path, plan: Plan) -> None:
    fill(path)
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(replace(plan, store_nodes=(0, 1))))
    assert begin(tmp_path / "plan.json", tmp_path, tmp_path / "memory.json") is None


@pytest.mark.parametrize("change", ["none", "other", "broken"])
def test_what_is_wrong_with_it_the_rank_says(tmp_path: Path, path: Path, plan: Plan, change: str) -> None:
    if change == "none":
        (tmp_path / "memory.json").write_bytes(msgspec.json.encode({STORE: str(tmp_path / "nowhere")}))
    elif change == "other":
        fill(path)
        (tmp_path / "plan.json").write_bytes(msgspec.json.encode(replace(plan, weight_key="another")))
    else:
        (tmp_path / "plan.json").write_text("{")
    assert begin(tmp_path / "plan.json", tmp_path, tmp_path / "memory.json") is None
