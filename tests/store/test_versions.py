"""Weights that follow others: mapped between two steps, the old ones freed when no process uses them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_filling import new_model, weights_of

from engine.recovery.reading import Unread
from ep.experts import WeightFormat
from layers.weights import Checkpoint
from models.base import CausalLM
from models.tiny import CHECKPOINT
from store.memory import Store, in_use, make_store
from store.versions import Versions

pytestmark = pytest.mark.store

ROOM = 1 << 30


@pytest.fixture
def versions() -> Iterator[Versions]:
    held = Versions("test", make_store("test-1"), "first")
    yield held
    held.close()


def path_of(versions: Versions, number: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{versions.file(number)}")


def filled(versions: Versions, number: int, key: str, checkpoint: Path) -> tuple[CausalLM, Store]:
    """A rank's model on this version, of which it has made what was missing."""
    store = Store(path_of(versions, number), key, ROOM)
    store.use()
    model = new_model(WeightFormat.INT8, torch.float32)
    model.load(Unread() if store.complete else Checkpoint(checkpoint), store)
    return model, store


def other_checkpoint(folder: Path) -> Path:
    shutil.copytree(CHECKPOINT, folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file)
    return folder


def test_ranks_go_over_one_by_one(versions: Versions, tmp_path: Path) -> None:
    checkpoint = other_checkpoint(tmp_path / "model")
    ranks = [filled(versions, 1, "first", CHECKPOINT) for _ in range(2)]
    first = {name: tensor.clone() for name, tensor in weights_of(ranks[0][0]).items()}
    number = versions.add("second")
    assert versions.newest_full == 1 and versions.free() == (), "it is empty"
    _, filling = filled(versions, number, "second", checkpoint)  # beside the steps of the others
    filling.close()
    assert versions.newest_full == number and versions.held == (1, 2)
    expected = new_model(WeightFormat.INT8, torch.float32)
    expected.load(Checkpoint(checkpoint))
    for model, old in ranks:
        assert versions.free() == (), "a rank uses it"
        new = Store(path_of(versions, number), "second", ROOM)
        new.use()
        model.load(Unread(), new)  # between two steps: nothing is read
        old.close()
        found = weights_of(model)
        assert all(torch.equal(found[name], tensor) for name, tensor in weights_of(expected).items())
        assert any(not torch.equal(found[name], tensor) for name, tensor in first.items() if name in found)
    assert versions.free() == (1,) and versions.held == (number,)
    assert "/memfd:test-1" not in Path("/proc/self/maps").read_text()


USER = """
import sys
from pathlib import Path
from store.memory import Store
store = Store(Path(sys.argv[1]), "first", 1 << 30)
store.use()
print("used", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_uses_nothing(versions: Versions) -> None:
    filled(versions, 1, "first", CHECKPOINT)[1].close()
    assert not in_use(versions.file(1))
    command = [sys.executable, "-c", USER, str(path_of(versions, 1))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None and user.stdout.readline() == "used\n"
        assert in_use(versions.file(1))
        user.kill()
    assert not in_use(versions.file(1))


def test_one_that_is_given_up(versions: Versions) -> None:
    filled(versions, 1, "first", CHECKPOINT)[1].close()
    number = versions.add("second")
    versions.drop(number)
    assert versions.held == (1,) and versions.free() == ()
    assert versions.add("third") == number + 1
