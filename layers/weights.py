"""A Hugging Face checkpoint directory, read key by key straight into a model's parameters.

Legend: O output features, I input features.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layers.identity import CheckpointError, Identities
from layers.safetensors_file import SafetensorsFile
from layers.safetensors_header import TensorEntry

__all__ = ["BLOCK", "Checkpoint", "CheckpointError", "Key", "Staged", "StoredWeight", "dequantize_blocks"]

INDEX = "model.safetensors.index.json"
BLOCK = 128  # FP8 weights have one scale per BLOCK x BLOCK weights
ROWS_AT_ONCE = 8 * BLOCK  # of a weight that is dequantised: bounds the float32 scratch

Progress = Callable[[int, int], None]
Key = tuple[str, int | None]  # a tensor's name, and which part of it along the first dimension; None: all of it


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight as it lies in the checkpoint. scale: float32, one for each 128 x 128 block of 8-bit weights, or None."""

    weight: Tensor
    scale: Tensor | None

    def widened(self) -> Tensor:
        """The weights themselves: as stored, or float32 [O, I] of blocks with scales."""
        if self.scale is None:
            return self.weight
        out_OI = torch.empty(self.weight.shape)
        dequantize_blocks(self.weight, self.scale, out_OI)
        return out_OI


class Staged:
    """Implements models.base.ExpertSource: some weights in memory of their own, so that filling a slot touches no
    disk."""

    def __init__(self, weights: dict[Key, StoredWeight]) -> None:
        self._weights = weights
        self._names = {name for name, _ in weights}

    def has(self, name: str) -> bool:
        return name in self._names

    def borrow(self, name: str, shape: tuple[int, ...], index: int | None = None) -> StoredWeight:
        stored = self._weights[name, index]
        if tuple(stored.weight.shape) != shape:
            raise CheckpointError(f"{name}: expected shape {list(shape)}, got {list(stored.weight.shape)}")
        return stored

    def give_back(self, name: str) -> None:
        """It goes with this object."""


class Checkpoint:
    """Implements models.base.WeightSource over `model.safetensors.index.json` or any `*.safetensors` of a directory.

    Files are mapped, so only what is read is touched. progress(bytes_done, bytes_total) is called after every key that
    was read or skipped. Raises CheckpointError for a directory without weights, and for broken or missing files.
    """

    def __init__(
        self,
        path: str | Path,
        progress: Progress | None = None,
        known: Identities | None = None,
        names: Callable[[str], str | None] | None = None,
    ) -> None:
        """known: what the files were at the start (layers/identity.py); others are refused, now and at every later
        read. names: from a key of the files to the name by which it is read here; None: not read at all
        (models/key_names.py)."""
        self.path = Path(path)
        self._known = known or {}
        self._files: dict[str, SafetensorsFile] = {}  # name -> its file
        self._keys: dict[str, str] = {}  # name -> what the file calls it, where that is something else
        for key, file in self._find():
            name = key if names is None else names(key)
            if name is None:
                continue
            if name in self._files:
                raise CheckpointError(f"{file.path}: {key}: the checkpoint has this tensor under another key too")
            self._files[name] = file
            if name != key:
                self._keys[name] = key
        self._unused = set(self._files)
        self._progress = progress
        self._bytes_done = 0
        self._bytes_total = sum(self._entry(name).num_bytes for name in self._files)
        self._lock = threading.Lock()  # of what is counted: several threads may borrow
        self.bytes_read = 0

    # ---- finding the files ----

    def _find(self) -> Iterable[tuple[str, SafetensorsFile]]:
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such directory")
        if (self.path / INDEX).exists():
            yield from self._from_index(self.path / INDEX)
            return
        paths = sorted(self.path.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.path}: no *.safetensors file in this directory")
        owner: dict[str, Path] = {}
        for path in paths:
            file = SafetensorsFile(path, self._known.get(path.name))
            for key in file.entries:
                if key in owner:
                    raise CheckpointError(f"{path}: {key}: also in {owner[key].name}, and there is no {INDEX}")
                owner[key] = path
                yield key, file

    def _from_index(self, index: Path) -> Iterable[tuple[str, SafetensorsFile]]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            if not isinstance(weight_map, dict):
                raise TypeError("weight_map is not an object")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index}: corrupt index: {error!r}") from None
        opened: dict[str, SafetensorsFile] = {}
        for key, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{index}: {key}: {name!r} is not the name of a file of this directory")
            if name not in opened:
                if not (self.path / name).exists():
                    raise CheckpointError(f"{index}: {key}: missing shard {name}")
                opened[name] = SafetensorsFile(self.path / name, self._known.get(name))
            if key not in opened[name].entries:
                raise CheckpointError(f"{self.path / name}: {key}: not in this file, though {INDEX} says so")
            yield key, opened[name]

    # ---- reading ----

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, out: Tensor, index: int | None = None) -> None:
        """Read tensor `name`, or its part `index` along the first dimension, into `out`; marks it used.

        Shapes must be equal; the dtype is converted to out's. If the checkpoint has `name` + "_scale_inv" (DeepSeek's
        FP8), each block of 128 x 128 is multiplied by its scale, and the scale is marked used too.
        """
        stored = self.borrow(name, tuple(out.shape), index)
        if stored.scale is None:
            out.copy_(stored.weight)
        else:
            dequantize_blocks(stored.weight, stored.scale, out)
        self.give_back(name)

    def borrow(self, name: str, shape: tuple[int, ...], index: int | None = None) -> StoredWeight:
        """Tensor `name`, or its part `index` along the first dimension, as it lies in the mapped file; not to be
        written to, nor used after `give_back`. Marks it (and its scales) used. shape: what it must have."""
        file = self._file(name)
        entry = self._entry(name)
        found = entry.shape if index is None else entry.shape[1:]
        if found != shape:
            raise CheckpointError(f"{file.path}: {name}: expected shape {list(shape)}, got {list(found)}")
        stored = file.view(self._key(name))
        part = stored if index is None else stored[index]
        scale = None
        if self.is_scaled(name):
            scale = self._scale(f"{name}_scale_inv", part, index)
        elif entry.dtype.is_floating_point and entry.dtype.itemsize == 1:
            raise CheckpointError(f"{file.path}: {name}: {entry.dtype} without {name}_scale_inv")
        self._mark(name, part.numel() * part.element_size())
        return StoredWeight(part, scale)

    def give_back(self, name: str) -> None:
        """What was borrowed is no longer used: its memory may go."""
        self._file(name).release(self._key(name))

    def stage(self, keys: Sequence[Key]) -> tuple[Staged, int]:
        """Copies of these, with their scales, and the bytes that were read. May be called in a thread. Raises
        CheckpointError."""
        weights = {}
        bytes_read = 0
        for name, index in keys:
            file = self._file(name)
            weight, scale = file.fetch(self._key(name), index), None
            bytes_read += weight.numel() * weight.element_size()
            if self.is_scaled(name):
                scale_name = f"{name}_scale_inv"
                scale = self._fitting(scale_name, weight, self._file(scale_name).fetch(self._key(scale_name), index))
                bytes_read += scale.numel() * scale.element_size()
            weights[name, index] = StoredWeight(weight, None if scale is None else scale.float())
        return Staged(weights), bytes_read

    def is_scaled(self, name: str) -> bool:
        """Whether there is such a key, with 8-bit weights and scales."""
        return f"{name}_scale_inv" in self._files and self.has(name) and self._entry(name).dtype.itemsize == 1

    def _scale(self, name: str, part: Tensor, index: int | None) -> Tensor:
        file = self._file(name)
        scale = file.view(self._key(name))
        scale = self._fitting(name, part, scale if index is None else scale[index])
        self._mark(name, scale.numel() * scale.element_size())
        return scale.float()

    def _fitting(self, name: str, part: Tensor, scale: Tensor) -> Tensor:
        expected = [-(-n // BLOCK) for n in part.shape]
        if part.dim() != 2 or list(scale.shape) != expected:
            raise CheckpointError(
                f"{self._file(name).path}: {name}: expected shape {expected}, got {list(scale.shape)}"
            )
        return scale

    def skip(self, name: str) -> None:
        """Mark a key (and its scales, if it has any) as deliberately not read. Its bytes are not touched."""
        self._file(name)
        self._mark(name)
        if f"{name}_scale_inv" in self._files:
            self._mark(f"{name}_scale_inv")

    def finish(self) -> None:
        """Raise CheckpointError if any key was neither read nor skipped, naming the first few, or if a file was changed
        while it was read."""
        for file in set(self._files.values()):
            file.check()
        if self._unused:
            first = ", ".join(sorted(self._unused)[:4])
            more = f" and {len(self._unused) - 4} more" if len(self._unused) > 4 else ""
            raise CheckpointError(f"{self.path}: keys that this model does not use: {first}{more}")

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.path}: missing key {name}")
        return file

    def _key(self, name: str) -> str:
        return self._keys.get(name, name)

    def _entry(self, name: str) -> TensorEntry:
        return self._files[name].entries[self._key(name)]

    def _mark(self, name: str, bytes_read: int = 0) -> None:
        with self._lock:
            self.bytes_read += bytes_read
            if name not in self._unused:
                return
            self._unused.remove(name)
            self._bytes_done += self._entry(name).num_bytes
            if self._progress is not None:
                self._progress(self._bytes_done, self._bytes_total)


def dequantize_blocks(weight_OI: Tensor, scale: Tensor, out_OI: Tensor) -> None:
    """out = weight * scale of its block. weight: any 8-bit float [O, I]; scale: float32 [ceil(O/128), ceil(I/128)]."""
    num_rows, num_columns = weight_OI.shape
    for first in range(0, num_rows, ROWS_AT_ONCE):
        last = min(num_rows, first + ROWS_AT_ONCE)
        scale_rows = scale[first // BLOCK : -(-last // BLOCK)].repeat_interleave(BLOCK, 1)[:, :num_columns]
        scale_rows = scale_rows.repeat_interleave(BLOCK, 0)[: last - first]
        torch.mul(weight_OI[first:last].float(), scale_rows, out=scale_rows)
        out_OI[first:last] = scale_rows
