"""Ranks that fill a store together have what a rank alone has, to the bit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.recovery.reading import Unread
from ep.backends.local import LocalAllToAll
from ep.experts import WeightFormat
from ep.parallel import Parallel
from eplb.placement import linear_placement
from layers.weights import Checkpoint, CheckpointError, StoredWeight
from models.base import CausalLM
from models.parts import kept_tensors
from models.registry import build, read_config
from models.tiny import CHECKPOINT
from store.filling import Whole, take_all
from store.memory import Store, StoreError, make_store

pytestmark = pytest.mark.store

ROOM = 1 << 30
NUM_RANKS = 3


@pytest.fixture
def path() -> Iterator[Path]:
    file = make_store("test")
    yield Path(f"/proc/{os.getpid()}/fd/{file}")
    os.close(file)


def new_model(form: WeightFormat, dtype: torch.dtype) -> CausalLM:
    facts = read_config(CHECKPOINT)
    placement = linear_placement(facts.num_moe_layers, facts.num_experts, 1)
    parallel = Parallel(0, 1, placement, lambda slots, _: [LocalAllToAll(slots)])
    model = build(facts, parallel, dtype, torch.device("cpu"))
    model.keep_experts(form)
    model.keep_linears(form)
    return model


def weights_of(model: CausalLM) -> dict[str, Tensor]:
    assert isinstance(model, torch.nn.Module)
    found = kept_tensors(model)
    for layer, moe in model.moe_layers:
        found |= {f"{layer} {index}": tensor for index, tensor in enumerate(moe.experts.memory)}
    return {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in found.items()}


def load(model: CausalLM, store: Store) -> int:
    """The bytes that were read."""
    checkpoint = Checkpoint(CHECKPOINT)
    model.load(checkpoint, store)
    checkpoint.finish()
    return checkpoint.bytes_read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [WeightFormat.PLAIN, WeightFormat.FP8, WeightFormat.INT8, WeightFormat.INT4])
def test_together_as_alone(path: Path, form: WeightFormat, dtype: torch.dtype) -> None:
    alone = new_model(form, dtype)
    source = Checkpoint(CHECKPOINT)
    alone.load(source)
    models, read = [new_model(form, dtype) for _ in range(NUM_RANKS)], [0] * NUM_RANKS
    stores = [Store(path, "key", ROOM) for _ in models]

    def fill(rank: int) -> None:
        read[rank] = load(models[rank], stores[rank])

    threads = [threading.Thread(target=fill, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = new_model(form, dtype)
    stores.append(Store(path, "key", ROOM))
    late.load(Unread(), stores[-1])  # nothing is read
    expected = weights_of(alone)
    for model in [*models, late]:
        found = weights_of(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert sum(read) == source.bytes_read, "every byte is read once"


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", [WeightFormat.PLAIN, WeightFormat.FP8, WeightFormat.INT8, WeightFormat.INT4])
def test_by_several_threads_as_by_one(path: Path, three_threads: None, form: WeightFormat) -> None:
    model, alone = new_model(form, torch.bfloat16), new_model(form, torch.bfloat16)
    alone.load(Checkpoint(CHECKPOINT))
    source = Checkpoint(CHECKPOINT)
    model.load(source, Store(path, "key", ROOM))
    source.finish()
    found, expected = weights_of(model), weights_of(alone)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.get_num_threads() == 3


def test_pieces_are_made_side_by_side(path: Path, three_threads: None) -> None:
    together, made = threading.Barrier(3), [torch.full((4,), float(number)) for number in range(3)]
    taken: dict[int, Tensor] = {}

    def piece(number: int) -> Whole:
        def make() -> list[str]:
            together.wait(30)  # for the others, or it fails
            return []

        def take(tensors: Mapping[str, Tensor]) -> None:
            taken[number] = tensors["x"]

        return Whole(make, lambda: {"x": made[number]}, take, lambda keys: None)

    assert take_all(Store(path, "key", ROOM), [piece(number) for number in range(3)]) == 3
    assert all(torch.equal(taken[number], made[number]) for number in range(3))


def test_a_thread_that_fails(path: Path, three_threads: None) -> None:
    """What it had claimed is another rank's, at once: the process lives on."""

    class Failing(Checkpoint):
        def borrow(self, name: str, shape: tuple[int, ...], index: int | None = None) -> StoredWeight:
            if "layers.1" in name and "experts.3." in name:
                raise CheckpointError("no")
            return super().borrow(name, shape, index)

    first, second = Store(path, "key", ROOM), Store(path, "key", ROOM)
    with pytest.raises(CheckpointError, match="no"):
        new_model(WeightFormat.INT8, torch.float32).load(Failing(CHECKPOINT), first)
    load(new_model(WeightFormat.INT8, torch.float32), second)
    assert second.complete


def test_a_rank_that_fails_leaves_its_part_to_others(path: Path) -> None:
    class Failing(Checkpoint):
        def read(self, name: str, out: Tensor, index: int | None = None) -> None:
            if "layers.1" in name:
                raise CheckpointError("no")
            super().read(name, out, index)

    first = Store(path, "key", ROOM)
    with pytest.raises(CheckpointError, match="no"):
        new_model(WeightFormat.PLAIN, torch.float32).load(Failing(CHECKPOINT), first)
    first.close()  # as the end of its process would
    second = Store(path, "key", ROOM)
    model = new_model(WeightFormat.PLAIN, torch.float32)
    load(model, second)
    alone = new_model(WeightFormat.PLAIN, torch.float32)
    alone.load(Checkpoint(CHECKPOINT))
    found = weights_of(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights_of(alone).items())


def test_a_store_of_another_form_is_refused(path: Path) -> None:
    store = Store(path, "key", ROOM)
    model = new_model(WeightFormat.INT8, torch.float32)
    load(model, store)
    other = new_model(WeightFormat.PLAIN, torch.bfloat16)  # the key should have differed
    with pytest.raises((StoreError, AssertionError)):
        other.load(Unread(), Store(path, "key", ROOM))
