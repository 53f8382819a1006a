"""A GGUF file as a checkpoint's file: weights under the names of Hugging Face, in the forms of layers/stored.py.

What lies beside it says which they are: GGUF_INDEX, {"files": {its name in the same directory: {name: [name in the
file, part along the first dimension or null, heads or 0]}}}, of each part of a model; models/gguf writes it. heads: the
rows of each head lie in pairs that rotate together, where Hugging Face has first ones and then second ones.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from layers.gguf.blocks import DTYPES, FORMS, Converted, convert
from layers.gguf.header import GgufTensor, parse_header
from layers.identity import GGUF_INDEX, CheckpointError
from layers.safetensors_file import SafetensorsFile
from layers.safetensors_header import TensorEntry
from layers.stored import StoredForm

PACKED = {StoredForm.INT4: "_packed", StoredForm.INT4_ZERO: "_packed", StoredForm.INT8: "_rounded"}
GgufNames = dict[str, tuple[str, int | None, int]]  # name -> what GGUF_INDEX says of it
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Place(NamedTuple):
    """Where a weight lies. what: which of its tensors."""

    tensor: GgufTensor
    part: int | None
    heads: int
    what: str


class _Last(threading.local):
    """What was made last of blocks, by where they begin: its scales are asked for after its numbers. Of each thread."""

    start = -1
    made: Converted


class GgufFile(SafetensorsFile):
    """entries: of a weight of fewer bits two or three, by its name and a suffix (`PACKED`; layers/weights.py). They are
    made of the file's blocks when they are asked for; `start` and `num_bytes` of the first are the blocks'."""

    def __init__(self, path: Path, names: GgufNames, known: tuple[int, int, int, str] | None = None) -> None:
        """names: what is read of it."""
        self._names = names
        self._places: dict[str, _Place] = {}
        self._last = _Last()
        super().__init__(path, known)

    def _parse(self, file: BinaryIO, size: int) -> dict[str, TensorEntry]:
        tensors = parse_header(file, self.path).tensors
        entries: dict[str, TensorEntry] = {}
        for name, (key, part, heads) in self._names.items():
            if key not in tensors:
                raise CheckpointError(f"{self.path}: missing tensor {key}")
            tensor = tensors[key]
            shape = tensor.shape if part is None else tensor.shape[1:]
            count = tensor.num_bytes if part is None else tensor.num_bytes // tensor.shape[0]
            start = tensor.start + (part or 0) * count
            form = FORMS[tensor.kind]
            if form is StoredForm.PLAIN:
                entries[name] = TensorEntry(_PLAIN[tensor.kind], shape, start, count)
                self._places[name] = _Place(tensor, part, heads, "weight")
                continue
            packed = (shape[0], shape[1] // 2) if form is not StoredForm.INT8 else shape
            made = {PACKED[form]: TensorEntry(DTYPES[form], packed, start, count)}
            group = 128 if form is StoredForm.INT8 else 32
            beside = TensorEntry(torch.float32, (shape[0], -(-shape[1] // group)), start, 0)
            made["_rounded_scale" if form is StoredForm.INT8 else "_scale"] = beside
            if form is StoredForm.INT4_ZERO:
                made["_zero_point"] = beside
            for (suffix, entry), what in zip(made.items(), ("weight", "scale", "zero"), strict=False):
                entries[name + suffix] = entry
                self._places[name + suffix] = _Place(tensor, part, heads, what)
        return entries

    def view(self, name: str) -> Tensor:
        return self._made(name, read=False)

    def fetch(self, name: str, index: int | None = None) -> Tensor:
        whole = self._made(name, read=True)
        return whole if index is None else whole[index]

    def _made(self, name: str, read: bool) -> Tensor:
        tensor, part, heads, what = self._places[name]
        first = tensor.start if part is None else tensor.start + part * (tensor.num_bytes // tensor.shape[0])
        if self._last.start != first:
            count = tensor.num_bytes if part is None else tensor.num_bytes // tensor.shape[0]
            shape = tensor.shape if part is None else tensor.shape[1:]
            if read:
                data = torch.frombuffer(self._read_again(first, count), dtype=torch.uint8)
            else:
                data = self._bytes[first : first + count]
            rows = data.view(shape[0], -1) if len(shape) > 1 else data.view(1, -1)
            made = convert(tensor.kind, _in_halves(rows, heads) if heads else rows)
            self._last.made = made if len(shape) > 1 else Converted(made.weight.flatten())
            self._last.start = first
        found: Tensor | None = getattr(self._last.made, what)
        assert found is not None
        return found


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Of each head first the even rows, then the odd ones."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def read_index(directory: Path) -> dict[str, GgufNames] | None:
    """By file, of a directory that stands for a GGUF file or its parts; None: of another. Raises CheckpointError."""
    index = directory / GGUF_INDEX
    if not os.path.isfile(index):
        return None
    try:
        return {
            str(file): dict(names) for file, names in json.loads(index.read_text(encoding="utf-8"))["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: corrupt index: {error!r}") from None
