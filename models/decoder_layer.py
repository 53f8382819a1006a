"""One layer of a decoder: a mixer of tokens and a feed-forward part, each behind its norm; and what all layers of a
forward pass share.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
from msgspec import Struct
from torch import Tensor, nn

from dbo.steps import Steps
from ep.moe import MoE
from layers.mlp import GatedMLP
from layers.norm import RMSNorm
from layers.step import StepInput
from models.graph_breaks import GraphBreaks, Operation


class LayerContext(Struct, frozen=True):
    """What the sublayers of one forward pass share. rope: of its positions. operations: what the family has prepared
    for this step (`Decoder.prepare`). lane: of the exchanges between ranks."""

    step: StepInput
    rope: tuple[Tensor, Tensor]
    operations: tuple[Operation, ...]
    breaks: GraphBreaks
    lane: int


class Mixer(Protocol):
    """A sublayer that mixes tokens of a sequence: attention over a cache, or a recurrent state. It reads and writes its
    layer's part of the cache and may yield wherever its bytes are in flight."""

    def steps(self, x_TD: Tensor, context: LayerContext, cache: tuple[Tensor, ...]) -> Steps[Tensor]: ...


A = TypeVar("A", bound=Mixer)
Mlp = GatedMLP | MoE


class DecoderLayer(nn.Module, Generic[A]):
    """mixer and mlp, each behind its norm."""

    def __init__(
        self, mixer: A, mlp: Mlp, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.input_norm = RMSNorm(hidden_size, eps, dtype, device)
        self.mixer = mixer
        self.post_norm = RMSNorm(hidden_size, eps, dtype, device)
        self.mlp = mlp

    def mlp_steps(self, x_TD: Tensor, context: LayerContext) -> Steps[Tensor]:
        """The feed-forward sublayer; where it exchanges rows with other ranks, a graph may break."""
        if self.mlp.exchanges:
            return context.breaks.exchange(self.mlp.steps, x_TD, context.lane)
        return self.mlp.steps(x_TD, context.lane)
