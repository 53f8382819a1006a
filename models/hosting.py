"""What all models with routed experts have in common: experts that change their ranks between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ep.moe import MoE
from ep.parallel import Parallel
from ep.place import SlotTable
from models.base import WeightSource
from models.loading import read_expert


class ExpertHost(nn.Module):
    """One rank's part of a model. parallel: its place among the ranks, as it is now."""

    def __init__(self, parallel: Parallel, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.parallel = parallel
        self._hidden_size = hidden_size
        self._device = device
        self._hosts: list[tuple[str, MoE]] = []  # the keys of a layer's experts begin with the first

    def host(self, mlps: Sequence[nn.Module]) -> None:
        """Called once by the model, with the feed-forward part of each of its layers."""
        self._hosts = [(f"model.layers.{i}.mlp.experts.", mlp) for i, mlp in enumerate(mlps) if isinstance(mlp, MoE)]

    def rehost(self, parallel: Parallel) -> None:
        """Exchange in the ranks and by the placement of `parallel` from now on; between steps only.

        The weights stay as they are: `read_expert` fills the slots whose expert has changed.
        """
        self.parallel = parallel
        if not self._hosts:
            return
        placement = parallel.placement
        assert placement is not None
        lanes = parallel.make_lanes(placement.slots_per_rank, self._hidden_size)
        for layer, (_, moe) in enumerate(self._hosts):
            moe.rehost(lanes, SlotTable(placement, layer, parallel.rank, self._device))

    def read_expert(self, source: WeightSource, layer: int, slot: int, expert: int) -> None:
        """Read `expert` of the layer-th MoE layer into `slot` of this rank."""
        prefix, moe = self._hosts[layer]
        read_expert(source, prefix, moe.experts, slot, expert)
