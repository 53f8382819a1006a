"""What all models with routed experts have in common: experts that change their ranks between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ep.experts import WeightFormat
from ep.moe import MoE
from ep.parallel import Parallel
from ep.place import SlotTable, slot_tables
from layers.linear import Linear
from layers.weights import Key
from models.base import ExpertSource, Observer, WeightSource
from models.expert_weights import expert_keys, read_expert, read_experts
from models.fewer_bits import pack_linear
from models.parts import Part, expert_units, whole
from store.filling import Piece, take_all
from store.memory import Store


class ExpertParallelMixin(nn.Module):
    """One rank's part of a model. parallel: its place among the ranks, as it is now."""

    def __init__(self, parallel: Parallel, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.parallel = parallel
        self._hidden_size = hidden_size
        self._device = device
        self._linear_form = WeightFormat.PLAIN
        self._moe_layer_ids: tuple[int, ...] = ()
        self._hosts: list[tuple[str, MoE]] = []  # the keys of a layer's experts begin with the first
        self._whole: list[tuple[str, MoE]] = []  # the same of layers that do not exchange

    def register_moe_layers(self, mlps: Sequence[nn.Module]) -> None:
        """Called once by the model, with the feed-forward part of each of its layers."""
        ids = []
        for number, moe in enumerate(mlps):
            if isinstance(moe, MoE):
                moe.number = number
                (self._hosts if moe.exchanges else self._whole).append((f"model.layers.{number}.mlp.experts.", moe))
                ids += [number] * moe.exchanges
        self._moe_layer_ids = tuple(ids)

    def keep_experts(self, form: WeightFormat, backend: str = "auto") -> None:
        """How experts are kept in memory, and what multiplies by them (moe_kernels/backends.py); before they are
        loaded."""
        for _, moe in self._hosts + self._whole:
            moe.experts.keep_as(form, backend)

    def keep_linears(self, form: WeightFormat) -> None:
        """How the matrices outside the experts are kept in memory; before they are loaded. Embeddings, routers and what
        the native kernels cannot keep so stay as they are."""
        self._linear_form = form
        for module in self.modules():
            if isinstance(module, Linear):
                module.keeps_stored = form in (WeightFormat.PLAIN, WeightFormat.BF16)

    def pack_linears(self, part: nn.Module) -> None:
        """Bring the linear layers of a loaded part into the form in which they are kept."""
        for module in part.modules():
            if isinstance(module, Linear):
                pack_linear(module, self._linear_form)

    def load_parts(self, parts: Sequence[Part], source: WeightSource, num_experts: int, store: Store | None) -> None:
        """Fill them and the experts of this rank: from `source` alone, or together with the other ranks of a store,
        where all ranks have all experts: slot s has expert s."""
        if store is not None:
            pieces: list[Piece] = [whole(part, source, self.pack_linears) for part in parts]
            pieces += [expert_units(source, prefix, moe.experts) for prefix, moe in self._hosts + self._whole]
            take_all(store, pieces)
            return
        for part in parts:
            part.read(source)
            self.pack_linears(part.module)
        for layer, (prefix, moe) in enumerate(self._hosts):
            assert self.parallel.placement is not None
            hosted = self.parallel.placement.experts_of(layer, self.parallel.rank)
            read_experts(source, prefix, moe.experts, hosted, num_experts)
        for prefix, moe in self._whole:
            read_experts(source, prefix, moe.experts, tuple(range(num_experts)), num_experts)

    def update_group(self, parallel: Parallel) -> None:
        """Exchange in the ranks and by the placement of `parallel` from now on; between steps only.

        The weights stay as they are: `read_expert` fills the slots whose expert has changed.
        """
        self.parallel = parallel
        if not self._hosts:
            return
        placement = parallel.placement
        assert placement is not None
        lanes = parallel.make_lanes(placement.slots_per_rank, self._hidden_size)
        tables = slot_tables(placement, parallel.rank, self._device)
        for (_, moe), table in zip(self._hosts, tables, strict=True):
            moe.update_group(lanes, table)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """The numbers of the layers with routed experts, among all layers."""
        return self._moe_layer_ids

    def count(self, load: Callable[[int], Observer], arrivals: Callable[[int], Observer]) -> None:
        """For each MoE layer, what is shown its routing and the rows that arrive (ep/moe.py), from now on."""
        for layer, (_, moe) in enumerate(self._hosts):
            moe.load, moe.arrivals = load(layer), arrivals(layer)

    def update_expert_map(self, parallel: Parallel, tables: Sequence[SlotTable]) -> None:
        """Route by the placement of `parallel` from now on, between the same ranks; between steps only.

        tables: the placement's own, one per MoE layer.
        """
        self.parallel = parallel
        for (_, moe), table in zip(self._hosts, tables, strict=True):
            if moe.table is not None:
                table.follow(moe.table)
            moe.table = table

    @property
    def moe_layers(self) -> Sequence[tuple[int, MoE]]:
        """The layers with routed experts, each with its number among all layers."""
        return [(layer, moe) for layer, (_, moe) in zip(self._moe_layer_ids, self._hosts, strict=True)]

    def expert_storage(self, layer: int, slot: int) -> tuple[Tensor, ...]:
        """Everything that makes up the expert in `slot` of this rank, in the layer-th MoE layer: contiguous views."""
        return self._hosts[layer][1].experts.slot_storage(slot)

    def read_expert(self, source: ExpertSource, layer: int, slot: int, expert: int) -> None:
        """Read `expert` of the layer-th MoE layer into `slot` of this rank."""
        prefix, moe = self._hosts[layer]
        read_expert(source, prefix, moe.experts, slot, expert)

    def expert_keys(self, source: ExpertSource, layer: int, expert: int) -> Sequence[Key]:
        """What `read_expert` borrows for it."""
        return expert_keys(source, self._hosts[layer][0], expert)
