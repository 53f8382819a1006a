"""What the decoder-only families share: layers of attention and a feed-forward part, each behind its norm, between the embedding and
the head. A family adds its attention, its routers, its cache, and how its checkpoints are read.

Legend: T tokens, D hidden size, P rows sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dbo.steps import Steps
from ep.moe import MoE
from ep.parallel import Parallel
from layers.embed import Embedding
from layers.head import Head
from layers.mlp import GatedMLP
from layers.norm import RMSNorm
from layers.paged_kv import PagedKV
from layers.rope import Rope
from layers.rope_parameters import RopeParameters
from layers.step import StepInput
from models.base import WeightSource
from models.cuts import UNCUT, Cuts, Prepare
from models.hosting import ExpertHost
from models.loading import read_ends

A = TypeVar("A", bound=nn.Module)
Mlp = GatedMLP | MoE


class DecoderConfig(Protocol):
    """What the frame needs of a family's config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def rope(self) -> RopeParameters: ...


class DecoderLayer(nn.Module, Generic[A]):
    """attention(x [T, D], rope, the layer's cache, slots_T, attend) -> [T, D]."""

    def __init__(
        self, attention: A, mlp: Mlp, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.input_norm = RMSNorm(hidden_size, eps, dtype, device)
        self.attention = attention
        self.post_norm = RMSNorm(hidden_size, eps, dtype, device)
        self.mlp = mlp

    def mlp_steps(self, x_TD: Tensor, lane: int, cuts: Cuts) -> Steps[Tensor]:
        """The feed-forward layer; only routed experts yield."""
        if isinstance(self.mlp, GatedMLP):
            out_TD: Tensor = self.mlp(x_TD)
            return out_TD
        return (yield from cuts.experts(self.mlp.steps, x_TD, lane))


class Decoder(ExpertHost, Generic[A]):
    """Implements the forward pass of models.base.CausalLM."""

    def __init__(
        self,
        config: DecoderConfig,
        make_attention: Callable[[], A],
        mlps: Sequence[Mlp],
        parallel: Parallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """mlps: of each layer."""
        super().__init__(parallel, config.hidden_size, device)
        self.dtype = dtype
        self._tied = config.tie_word_embeddings
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed = Embedding(config.vocab_size, size, dtype, device)
        self.host(mlps)
        self.decoders = [DecoderLayer(make_attention(), mlp, size, eps, dtype, device) for mlp in mlps]
        self.layers = nn.ModuleList(self.decoders)  # the same, where nn.Module finds their parameters
        self.norm = RMSNorm(size, eps, dtype, device)
        self.head = Head(size, config.vocab_size, self.embed.weight if self._tied else None, dtype, device)
        self.rope = Rope(config.rope, dtype, device)

    def attending(self) -> tuple[Prepare, int]:
        """What prepares a step's attention, and how many of its arguments have a row per token (models/cuts.py)."""
        raise NotImplementedError

    def steps(self, step: StepInput, kv: PagedKV, lane: int = 0, cuts: Cuts = UNCUT) -> Steps[Tensor]:
        """The hidden state after the last norm, [T, D]. Each norm also adds to the residual stream, in place."""
        residual_TD = self.embed(step.token_ids_T)
        rope = self.rope(step.positions_T)
        prepare, num_queries = self.attending()
        attend = cuts.attention(prepare, step, num_queries)
        x_TD: Tensor = self.decoders[0].input_norm(residual_TD)
        for index, layer in enumerate(self.decoders):
            attended_TD = layer.attention(x_TD, rope, kv.layers[index], step.slots_T, attend)
            x_TD = layer.post_norm.add(attended_TD, residual_TD)
            mlp_TD = yield from layer.mlp_steps(x_TD, lane, cuts)
            following = self.decoders[index + 1].input_norm if index + 1 < len(self.decoders) else self.norm
            x_TD = following.add(mlp_TD, residual_TD)
        return x_TD

    def logits(self, hidden_PD: Tensor) -> Tensor:
        """[P, D] -> [P, V], in the model's dtype."""
        values_PV: Tensor = self.head(hidden_PD)
        return values_PV

    def best_tokens(self, hidden_PD: Tensor, num_valid_tokens: int) -> Tensor:
        """int64 [P]: of the first num_valid_tokens logits the largest, the first of equals."""
        return self.head.best_tokens(hidden_PD, num_valid_tokens)

    def load_ends(self, source: WeightSource) -> None:
        """Embedding, last norm and head."""
        read_ends(source, self.embed.weight, self.norm, self.head.matrix, self._tied)
        self.settle(self.head)
