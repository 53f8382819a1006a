"""A model's weights in parts: each is read and packed at once, into a rank's own memory, or into the store of a
machine, which other ranks fill and use too (store/filling.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from msgspec import Struct
from torch import Tensor, nn

from ep.experts import Experts, WeightFormat
from layers.linear import Linear
from layers.stored import StoredForm, StoredWeight
from models.base import WeightSource
from models.expert_weights import expert_keys, keep_scaled, read_expert
from store.filling import Units, Whole

PACKED = "packed-"  # and a WeightFormat: the name of a linear layer's packed weights


class Part(Struct, frozen=True):
    """read: fills the tensors of `module` from a checkpoint. Experts in it are no tensors of it."""

    module: nn.Module
    read: Callable[[WeightSource], None]


def whole(part: Part, source: WeightSource, pack: Callable[[nn.Module], None]) -> Whole:
    """A part as a piece of a store. pack: makes packed weights of what has been read."""

    def make() -> Sequence[str]:
        noted = Noted(source)
        part.read(noted)
        pack(part.module)
        return sorted(noted.used)

    def skip(keys: Sequence[str]) -> None:
        for key in keys:
            source.skip(key)

    return Whole(make, lambda: kept_tensors(part.module), lambda tensors: take_tensors(part.module, tensors), skip)


def expert_units(source: WeightSource, prefix: str, experts: Experts) -> Units:
    """The experts of a layer as a piece of a store: slot s has expert s. prefix: of their keys."""

    def like(form: str) -> Sequence[Tensor]:
        experts.keep_as(WeightFormat(form))
        return experts.memory

    def form() -> str:
        keep_scaled(source, prefix, experts, experts.num_slots)
        return experts.format.value

    made: dict[int, Experts] = {}  # a slot for each thread

    def make(expert: int) -> Sequence[Tensor]:
        thread = threading.get_ident()
        if thread not in made:
            made[thread] = experts.one_slot()
        read_expert(source, prefix, made[thread], 0, expert)
        return made[thread].memory

    def skip(expert: int) -> None:
        for key, _ in expert_keys(source, prefix, expert):
            source.skip(key)

    return Units(
        count=experts.num_slots,
        form=form,
        like=like,
        take=experts.lie_in,
        make=make,
        skip=skip,
    )


def kept_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Whatever a part keeps, by name: parameters, buffers and packed weights. What is empty is left out."""
    found: dict[str, Tensor] = {}
    for prefix, layer in module.named_modules():
        for name, tensor in _own_tensors(layer):
            if tensor.numel():
                found[f"{prefix}.{name}"] = tensor
        if isinstance(layer, Linear) and layer.packed is not None:
            found[f"{prefix}.{PACKED}{layer.packed.form.value}"] = layer.packed.packed_B
    return found


def take_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Use these in the place of the module's own; what `kept_tensors` of an equal module has found."""
    left = dict(tensors)
    for prefix, layer in module.named_modules():
        for name in [name for name in left if name.startswith(f"{prefix}.{PACKED}")]:
            assert isinstance(layer, Linear)
            layer.take_packed(left.pop(name), WeightFormat(name.rpartition(PACKED)[2]))
        for name, tensor in _own_tensors(layer):
            if tensor.numel():
                taken = left.pop(f"{prefix}.{name}")
                assert taken.shape == tensor.shape and taken.dtype is tensor.dtype, name
                tensor.data = taken
    assert not left, f"the model does not know {sorted(left)}"


def _own_tensors(layer: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from layer.named_parameters(recurse=False)
    yield from layer.named_buffers(recurse=False)


class Noted:
    """A WeightSource that notes which keys were used."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.used: set[str] = set()

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def borrow(self, name: str, shape: tuple[int, ...], index: int | None = None) -> StoredWeight:
        self.used.add(name)
        return self._source.borrow(name, shape, index)

    def give_back(self, name: str) -> None:
        self._source.give_back(name)

    def read(self, name: str, out: Tensor, index: int | None = None) -> None:
        self.used.add(name)
        self._source.read(name, out, index)

    def form_of(self, name: str) -> StoredForm:
        return self._source.form_of(name)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._source.dtype_of(name)

    def skip(self, name: str) -> None:
        self.used.add(name)
        self._source.skip(name)

    def names(self) -> Iterable[str]:
        return self._source.names()

    def finish(self) -> None:
        self._source.finish()
