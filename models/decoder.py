"""What the decoder-only families share: layers of attention and a feed-forward part, each behind its norm, between the
embedding and the head. A family adds its attention, its routers, its cache, and how its checkpoints are read.

Legend: T tokens, D hidden size, P rows sampled, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from cache.memory import CacheMemory
from cache.spec import CacheSpec
from dbo.alive import mark
from dbo.steps import Steps
from ep.moe import MoE
from ep.parallel import Parallel
from layers.embed import Embedding
from layers.head import LMHead
from layers.mlp import GatedMLP
from layers.norm import RMSNorm
from layers.rope import Rope
from layers.rope_parameters import RopeParameters
from layers.step import StepInput
from models.base import WeightSource
from models.expert_parallel import ExpertParallelMixin
from models.graph_breaks import EAGER, GraphBreaks, Operation
from models.loading import read_head
from models.parts import Part
from store.memory import Store


class DecoderConfig(Protocol):
    """What the frame needs of a family's config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def rope(self) -> RopeParameters: ...
    def cache_spec(self, dtype: str, fp8: bool = False) -> CacheSpec: ...


@dataclass(frozen=True, slots=True)
class LayerContext:
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


class Decoder(ExpertParallelMixin, ABC, Generic[A]):
    """Implements the forward pass of models.base.CausalLM."""

    config: DecoderConfig

    def __init__(
        self,
        config: DecoderConfig,
        make_mixer: Callable[[int], A],
        mlps: Sequence[Mlp],
        parallel: Parallel,
        dtype: torch.dtype,
        device: torch.device,
        head_bias: bool = False,
    ) -> None:
        """make_mixer(layer): the one of that layer. mlps: of each layer."""
        super().__init__(parallel, config.hidden_size, device)
        self.dtype = dtype
        self.config = config
        self.fp8_cache = False
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed = Embedding(config.vocab_size, size, dtype, device)
        self.register_moe_layers(mlps)
        self.decoders = [
            DecoderLayer(make_mixer(layer), mlp, size, eps, dtype, device) for layer, mlp in enumerate(mlps)
        ]
        self.layers = nn.ModuleList(self.decoders)  # the same, where nn.Module finds their parameters
        self.norm = RMSNorm(size, eps, dtype, device)
        tied = self.embed.weight if config.tie_word_embeddings else None
        self.head = LMHead(size, config.vocab_size, tied, dtype, device, head_bias)
        self.rope = Rope(config.rope, dtype, device)

    def cache_spec(self) -> CacheSpec:
        """In the model's dtype, or in FP8 where the family's class has been told so."""
        return self.config.cache_spec(str(self.dtype).removeprefix("torch."), self.fp8_cache)

    @abstractmethod
    def prepare(self, step: StepInput, breaks: GraphBreaks) -> tuple[Operation, ...]:
        """What this family's sublayers do by the lengths of the step's sequences, prepared once for all layers."""

    def steps(self, step: StepInput, cache: CacheMemory, lane: int = 0, breaks: GraphBreaks = EAGER) -> Steps[Tensor]:
        """The hidden state after the last norm, [T, D]. Each norm also adds to the residual stream, in place."""
        residual_TD = self.embed(step.token_ids_T)
        context = LayerContext(step, self.rope(step.positions_T), self.prepare(step, breaks), breaks, lane)
        x_TD: Tensor = self.decoders[0].input_norm(residual_TD)
        for index, layer in enumerate(self.decoders):
            mark()
            mixed_TD = yield from layer.mixer.steps(x_TD, context, cache.layers[index])
            x_TD = layer.post_norm.add(mixed_TD, residual_TD)
            mlp_TD = yield from layer.mlp_steps(x_TD, context)
            following = self.decoders[index + 1].input_norm if index + 1 < len(self.decoders) else self.norm
            x_TD = following.add(mlp_TD, residual_TD)
        return x_TD

    def logits(self, hidden_PD: Tensor) -> Tensor:
        """[P, D] -> [P, V], in the model's dtype."""
        values_PV: Tensor = self.head(hidden_PD)
        return values_PV

    def greedy_tokens(self, hidden_PD: Tensor, num_valid_tokens: int) -> Tensor:
        """int64 [P]: of the first num_valid_tokens logits the largest, the first of equals."""
        return self.head.greedy_tokens(hidden_PD, num_valid_tokens)

    def load(self, source: WeightSource, store: Store | None = None) -> None:
        """Fill every parameter, and the experts that this rank hosts."""
        ends = [
            Part(self.embed, lambda source: source.read("model.embed_tokens.weight", self.embed.weight)),
            Part(self.norm, lambda source: source.read("model.norm.weight", self.norm.weight)),
            Part(self.head, lambda source: read_head(source, self.head)),
        ]
        layers = [Part(layer, partial(self.read_layer, index)) for index, layer in enumerate(self.decoders)]
        self.load_parts([*ends, *layers], source, self.config.num_experts, store)
        self.skip_rest(source)

    @abstractmethod
    def read_layer(self, index: int, source: WeightSource) -> None:
        """Fill the parameters of one layer; its experts are none."""

    def skip_rest(self, source: WeightSource) -> None:
        """Skip the keys that the model does not use."""
