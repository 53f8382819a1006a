"""What a checkpoint was at the start, and everything that may happen to it later."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from layers.identity import CheckpointError, check, identify
from layers.weights import Checkpoint

pytestmark = pytest.mark.attacks

VALUES = torch.arange(600_000, dtype=torch.float32).view(3, 200_000)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    save_file({"a": VALUES}, directory / "model.safetensors")
    return directory / "model.safetensors"


def overwrite(path: Path) -> None:
    """In place, of equal size; no sample of the digest has it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\1\2\3\4")


def replace(path: Path) -> None:
    """By another file of equal shapes."""
    save_file({"a": VALUES + 1}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def forge(path: Path) -> None:
    """Other weights in the same place, with the time of the old ones."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size - 8)
        file.write(struct.pack("=d", 1.0))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (overwrite, r"model.safetensors: changed since the start: mtime_ns is \d+, was \d+$"),
    (replace, r"model.safetensors: changed since the start: mtime_ns is \d+, was \d+, inode is \d+, was \d+$"),
    (forge, r"model.safetensors: changed since the start: its header or weights are others$"),
    (lambda path: os.truncate(path, 1000), r"model.safetensors: changed since the start: size is 1000, was \d+, mtime"),
    (lambda path: path.unlink(), r"model.safetensors: cannot be read: No such file or directory$"),
    (lambda path: path.with_name("more.safetensors").touch(), r"more.safetensors: .* this file was not there$"),
    (lambda path: path.with_name("config.json").write_text('{"a": 1}'), r"config.json: changed since the start: size"),
    (lambda path: path.parent.rename(path.parents[1] / "gone"), r"model/config.json: cannot be read: No such file"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_has_changed_is_named(weights: Path, change: Callable[[Path], object], message: str) -> None:
    known = identify(weights.parent)
    assert sorted(known) == ["config.json", "model.safetensors"]
    check(weights.parent, known)
    change(weights)
    with pytest.raises(CheckpointError, match=message):
        check(weights.parent, known)


def test_a_file_that_is_away_and_back_is_the_same(weights: Path) -> None:
    known = identify(weights.parent)
    weights.rename(weights.with_name("away"))
    weights.with_name("away").rename(weights)
    check(weights.parent, known)


@pytest.mark.parametrize("change", [overwrite, lambda path: os.truncate(path, 1000)])
def test_a_file_that_is_open_is_not_read_when_it_was_changed(weights: Path, change: Callable[[Path], object]) -> None:
    """Cut short it would end a process that reads it where it is mapped."""
    checkpoint = Checkpoint(weights.parent, known=identify(weights.parent))
    checkpoint.stage([("a", 1)])
    change(weights)
    with pytest.raises(CheckpointError, match="changed since the start"):
        checkpoint.stage([("a", 1)])
    with pytest.raises(CheckpointError, match="changed since the start"):
        checkpoint.skip("a")
        checkpoint.finish()
    with pytest.raises(CheckpointError):
        Checkpoint(weights.parent, known={"model.safetensors": (1, 2, 3, "")})


@pytest.mark.parametrize("change", [replace, lambda path: path.unlink()])
def test_what_was_open_can_be_read_on(weights: Path, change: Callable[[Path], object]) -> None:
    checkpoint = Checkpoint(weights.parent, known=identify(weights.parent))
    change(weights)
    source, bytes_read = checkpoint.stage([("a", 1), ("a", None)])
    assert torch.equal(source.borrow("a", (200_000,), 1).weight, VALUES[1])
    assert torch.equal(source.borrow("a", (3, 200_000)).weight, VALUES)
    assert bytes_read == VALUES.nbytes * 4 // 3
    with pytest.raises(CheckpointError, match=r"expected shape \[5\], got \[200000\]"):
        source.borrow("a", (5,), 1)


def test_a_handle_that_went_bad_is_opened_again(weights: Path) -> None:
    """As after a pause of a network file system (ESTALE); here it is the wrong file's."""
    checkpoint = Checkpoint(weights.parent, known=identify(weights.parent))
    file = checkpoint._file("a")
    with weights.with_name("config.json").open("rb") as other:
        os.dup2(other.fileno(), file._descriptor)
    assert torch.equal(checkpoint.stage([("a", 2)])[0].borrow("a", (200_000,), 2).weight, VALUES[2])
