"""A Hugging Face checkpoint directory, read key by key straight into a model's parameters.

A weight of fewer bits has a name that the files need not have: what lies under it and beside it (packed numbers,
scales) is `_PACKINGS`' business. Legend: O output features, I input features.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from layers.gguf.file import GgufFile, read_index
from layers.identity import DRAFTER_FILES, CheckpointError, Identities
from layers.int4_layouts import CENTRE, codes, in_order, is_awq, zero_points
from layers.safetensors_file import SafetensorsFile
from layers.safetensors_header import TensorEntry
from layers.stored import BLOCK, MX_GROUP, StoredForm, StoredWeight

__all__ = ["BLOCK", "Checkpoint", "CheckpointError", "Key", "Staged", "StoredForm", "StoredWeight"]

INDEX = "model.safetensors.index.json"


class _Packing(NamedTuple):
    """Suffixes of a weight's name: of what is stored in its place, and of its scales. One that begins with a dot takes
    the place of ".weight"."""

    form: StoredForm
    weight: str
    scale: str


# Of `name`, in this order: DeepSeek's FP8, compressed-tensors' (whose names are those of transformers' FP8 too), MXFP4,
# and layers/gguf/file.py's.
_PACKINGS = (
    _Packing(StoredForm.FP8, "", "_scale_inv"),
    _Packing(StoredForm.FP8, "", "_scale"),
    _Packing(StoredForm.INT4, "_packed", "_scale"),
    _Packing(StoredForm.MXFP4, "_blocks", "_scales"),
    _Packing(StoredForm.INT8, "_rounded", "_rounded_scale"),
    _Packing(StoredForm.INT4_ZERO, ".qweight", ".scales"),  # AWQ and GPTQ
)
_ZERO = "_zero_point"
_ZEROS, _ORDER = ".qzeros", ".g_idx"  # AWQ's and GPTQ's
_BESIDE = ("_shape", _ZERO, _ZEROS, _ORDER)  # of a weight's name: what says nothing new
_SCALES_OF_INPUTS = (".input_scale", ".output_scale")  # of a layer's name; products here need none

Progress = Callable[[int, int], None]
Key = tuple[str, int | None]  # a tensor's name, and which part of it along the first dimension; None: all of it


def _beside(name: str, suffix: str) -> str:
    """The key of what belongs to a weight of this name."""
    return name.removesuffix(".weight") + suffix if suffix.startswith(".") else name + suffix


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
        if stored.shape != shape:
            raise CheckpointError(f"{name}: expected shape {list(shape)}, got {list(stored.shape)}")
        return stored

    def form_of(self, name: str) -> StoredForm:
        return next(stored.form for (key, _), stored in self._weights.items() if key == name)

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
        self._packings: dict[str, _Packing | None] = {}
        for key, file in chain(self._find(), self._of_drafter()):
            if file.path.name.startswith(DRAFTER_FILES):
                name: str | None = DRAFTER_FILES + key
            else:
                name = key if names is None else names(key)
            if name is None:
                continue
            if name in self._files:
                raise CheckpointError(f"{file.path}: {key}: the checkpoint has this tensor under another key too")
            self._files[name] = file
            if name != key:
                self._keys[name] = key
        # Tensors without numbers, such as those of 0 shared experts, need not be read.
        self._unused = {name for name in self._files if self._entry(name).num_bytes}
        self._progress = progress
        self._bytes_done = 0
        self._bytes_total = sum(self._entry(name).num_bytes for name in self._files)
        self._lock = threading.Lock()  # of what is counted: several threads may borrow
        self.bytes_read = 0

    # ---- finding the files ----

    def _find(self) -> Iterable[tuple[str, SafetensorsFile]]:
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such directory")
        parts = read_index(self.path)
        if parts is not None:
            for name, names in parts.items():
                part = GgufFile(self.path / name, names, self._known.get(name))
                yield from ((key, part) for key in part.entries)
            return
        if (self.path / INDEX).exists():
            yield from self._from_index(self.path / INDEX)
            return
        paths = sorted(set(self.path.glob("*.safetensors")).difference(self.path.glob(f"{DRAFTER_FILES}*")))
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

    def _of_drafter(self) -> Iterable[tuple[str, SafetensorsFile]]:
        for path in sorted(self.path.glob(f"{DRAFTER_FILES}*")):
            file = SafetensorsFile(path, self._known.get(path.name))
            yield from ((key, file) for key in file.entries)

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
        return name in self._files or self._packing(name) is not None

    def form_of(self, name: str) -> StoredForm:
        """How the weight of that name is stored. There must be such a name."""
        packing = self._packing(name)
        if packing is not None and packing.form is StoredForm.INT4 and name + _ZERO in self._files:
            return StoredForm.INT4_ZERO
        if packing is not None and packing.form is StoredForm.INT4_ZERO:
            views = (self._file(key).view(self._key(key)) for key in (_beside(name, end) for end in _AWQ_KEYS))
            return StoredForm.INT4 if _is_centred(*views) else StoredForm.INT4_ZERO
        return StoredForm.PLAIN if packing is None else packing.form

    def dtype_of(self, name: str) -> torch.dtype:
        """In which a tensor of plain numbers is stored. There must be one of that name."""
        return self._entry(name).dtype

    def _packing(self, name: str) -> _Packing | None:
        """None: a plain tensor, or none."""
        if name not in self._packings:  # it is asked for several times for each tensor that is read
            self._packings[name] = self._found_packing(name)
        return self._packings[name]

    def _found_packing(self, name: str) -> _Packing | None:
        for packing in _PACKINGS:
            key = _beside(name, packing.weight)
            if key in self._files and _beside(name, packing.scale) in self._files:
                dtype = self._entry(key).dtype
                if packing.weight or (dtype.is_floating_point and dtype.itemsize == 1):
                    return packing
        return None

    def read(self, name: str, out: Tensor, index: int | None = None) -> None:
        """Read tensor `name`, or its part `index` along the first dimension, into `out`; marks it used.

        Shapes must be equal; the dtype is converted to out's, and weights of fewer bits are multiplied by their scales.
        """
        self.borrow(name, tuple(out.shape), index).widen_into(out)
        self.give_back(name)

    def borrow(self, name: str, shape: tuple[int, ...], index: int | None = None) -> StoredWeight:
        """Tensor `name`, or its part `index` along the first dimension, as it lies in the mapped file; not to be
        written to, nor used after `give_back`. Marks it (and its scales) used. shape: of what it stands for."""
        packing = self._packing(name)

        def tensor(key: str) -> Tensor:
            part = self._file(key).view(self._key(key))
            part = part if index is None else part[index]
            with self._lock:
                self.bytes_read += part.numel() * part.element_size()
            return part

        stored = self._stored(name, packing, tensor)
        if stored.shape != shape:
            stored_as = _beside(name, packing.weight if packing else "")
            path = self._file(stored_as).path
            raise CheckpointError(f"{path}: {stored_as}: expected shape {list(shape)}, got {list(stored.shape)}")
        self.skip(name)
        return stored

    def give_back(self, name: str) -> None:
        """What was borrowed is no longer used: its memory may go."""
        packing = self._packing(name)
        key = _beside(name, packing.weight if packing else "")
        self._file(key).release(self._key(key))

    def stage(self, keys: Sequence[Key]) -> tuple[Staged, int]:
        """Copies of these, with their scales, and the bytes that were read. May be called in a thread. Raises
        CheckpointError."""
        weights, bytes_read = {}, 0
        for name, index in keys:
            tensors: list[Tensor] = []

            def tensor(key: str, index: int | None = index, tensors: list[Tensor] = tensors) -> Tensor:
                tensors.append(self._file(key).fetch(self._key(key), index))
                return tensors[-1]

            weights[name, index] = self._stored(name, self._packing(name), tensor)
            bytes_read += sum(part.numel() * part.element_size() for part in tensors)
        return Staged(weights), bytes_read

    def _stored(self, name: str, packing: _Packing | None, tensor: Callable[[str], Tensor]) -> StoredWeight:
        """tensor: what lies under a key."""
        if packing is None:
            plain = tensor(name)
            if plain.dtype.is_floating_point and plain.dtype.itemsize == 1:
                raise CheckpointError(f"{self._file(name).path}: {name}: {plain.dtype} without {name}_scale_inv")
            return StoredWeight.plain(plain)
        if packing.form is StoredForm.INT4_ZERO:
            return self._from_inputs_first(name, tensor)
        weight, scale = tensor(_beside(name, packing.weight)), tensor(_beside(name, packing.scale))
        shape, wanted = _shapes(packing.form, weight, scale)
        if not scale.dim() and packing.form is StoredForm.FP8:
            scale = scale.view(1)
        if scale.dim() == 1 and packing.form is StoredForm.FP8:
            scale = scale[:, None]
        if list(scale.shape) not in wanted:
            scale_key = _beside(name, packing.scale)
            expected = " or ".join(map(str, wanted))
            raise CheckpointError(
                f"{self._file(scale_key).path}: {scale_key}: expected shape {expected}, got {list(scale.shape)}"
            )
        if packing.form is StoredForm.INT4:
            return self._with_zero(
                name, StoredWeight(weight.view(torch.uint8), scale.float(), packing.form, shape), tensor
            )
        return StoredWeight(weight, scale if packing.form is StoredForm.MXFP4 else scale.float(), packing.form, shape)

    def _with_zero(self, name: str, stored: StoredWeight, tensor: Callable[[str], Tensor]) -> StoredWeight:
        """With zero points, if there are: int32 [O/8, G], eight numbers each, the first in the lowest bits, 8 more than
        meant; or float32 [O, G]."""
        if name + _ZERO not in self._files:
            return stored
        assert stored.scale is not None
        zero_OG = tensor(name + _ZERO)
        if not zero_OG.is_floating_point():
            bits = torch.arange(0, 32, 4, dtype=torch.int32)
            zero_OG = ((zero_OG[:, None] >> bits[:, None]) & 15).flatten(0, 1)[: stored.shape[0]].float() - 8
        if zero_OG.shape != stored.scale.shape:
            raise CheckpointError(f"{self._file(name + _ZERO).path}: {name + _ZERO}: expected a number for each scale")
        return replace(stored, form=StoredForm.INT4_ZERO, zero=zero_OG)

    def _from_inputs_first(self, name: str, tensor: Callable[[str], Tensor]) -> StoredWeight:
        """AWQ and GPTQ."""
        qweight, scales, qzeros = (tensor(_beside(name, end)) for end in _AWQ_KEYS)
        awq, where = is_awq(qweight, scales), f"{self._file(_beside(name, '.qweight')).path}: {name}"
        num_inputs, groups = qweight.shape[0] * (1 if awq else 8), scales.shape[0]
        if (not awq and qweight.shape[1] != scales.shape[1]) or num_inputs % groups:
            raise CheckpointError(f"{where}: qweight {list(qweight.shape)} and scales {list(scales.shape)} do not fit")
        if tuple(qzeros.shape) != (groups, scales.shape[1] // 8):
            raise CheckpointError(f"{where}: qzeros {list(qzeros.shape)} do not fit scales {list(scales.shape)}")
        order = _beside(name, _ORDER)
        if order in self._files and not in_order(tensor(order), groups):
            raise CheckpointError(f"{where}: its inputs are reordered (act-order, g_idx), which is not supported")
        form = StoredForm.INT4 if _is_centred(qweight, scales, qzeros) else StoredForm.INT4_ZERO
        zero = None if form is StoredForm.INT4 else (zero_points(qzeros, awq).float() - CENTRE).T.contiguous()
        shape = (scales.shape[1], num_inputs)
        return StoredWeight(codes(qweight, awq), scales.float().T.contiguous(), form, shape, zero)

    def skip(self, name: str) -> None:
        """Mark a key (and its scales, if it has any) as used, or as deliberately not read. Its bytes are not
        touched."""
        packing = self._packing(name)
        keys = [name]
        if packing is not None:
            beside = [_beside(name, suffix) for suffix in (packing.weight, packing.scale, *_BESIDE)]
            inputs = [name.removesuffix(".weight") + suffix for suffix in _SCALES_OF_INPUTS if name.endswith(".weight")]
            keys = [beside[0], *(key for key in (*beside[1:], *inputs) if key in self._files)]
        self._file(keys[0])
        for key in keys:
            self._mark(key)

    def finish(self) -> None:
        """Raise CheckpointError if any key was neither read nor skipped, naming the first few, or if a file was changed
        while it was read. Its memory may go."""
        for file in set(self._files.values()):
            file.check()
            file.release_all()
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


_AWQ_KEYS = (".qweight", ".scales", _ZEROS)


def _is_centred(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> bool:
    """Whether the zero points of AWQ or GPTQ are all the middle of the codes."""
    return bool((zero_points(qzeros, is_awq(qweight, scales)) == CENTRE).all())


def _shapes(form: StoredForm, weight: Tensor, scale: Tensor) -> tuple[tuple[int, ...], list[list[int]]]:
    """Of what is stored so: what it stands for, and the shapes that its scales may have."""
    if form is StoredForm.FP8:
        shape = tuple(weight.shape)
        return shape, [[-(-n // BLOCK) for n in shape], [shape[0], 1], [1, 1]]
    rows = weight.shape[0]
    if form is StoredForm.INT8:
        return tuple(weight.shape), [[rows, -(-weight.shape[1] // BLOCK)]]
    if form is StoredForm.INT4:
        num_inputs = 2 * weight.itemsize * weight.shape[1]
        groups = [[rows, scale.shape[-1]]] if scale.dim() == 2 and num_inputs % scale.shape[1] == 0 else []
        return (rows, num_inputs), groups or [[rows, num_inputs // MX_GROUP]]
    return (rows, weight.shape[1] * MX_GROUP), [list(weight.shape[:2])]
