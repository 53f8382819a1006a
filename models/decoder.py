"""What the decoder-only families share: layers of attention and a feed-forward part, each behind its norm, between the
embedding and the head. A family adds its attention, its routers, its cache, and how its checkpoints are read.

Legend: T tokens, D hidden size, P rows sampled, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol

import torch
from torch import Tensor, nn

from cache.memory import CacheMemory
from cache.residuals import Residuals
from cache.spec import CacheSpec
from dbo.alive import mark
from dbo.steps import Steps
from ep.parallel import Parallel
from layers.embed import Embedding
from layers.head import LMHead
from layers.norm import RMSNorm
from layers.residual import keep
from layers.rope import Rope
from layers.rope_parameters import RopeParameters
from layers.step import StepInput
from models.base import WeightSource
from models.decoder_layer import A, DecoderLayer, LayerContext, Mlp
from models.eagle3.config import Eagle3Config
from models.eagle3.layer import Eagle3
from models.expert_parallel import ExpertParallelMixin
from models.graph_breaks import EAGER, GraphBreaks, Operation
from models.loading import read_head
from models.mtp import MtpLayer
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
    @property
    def eagle3(self) -> Eagle3Config | None: ...
    def cache_spec(self, dtype: str, fp8: bool = False) -> CacheSpec: ...


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
        """make_mixer(layer): the one of that layer. mlps: of each layer, and of one that drafts behind them."""
        super().__init__(parallel, config.hidden_size, device)
        self.dtype = dtype
        self.config = config
        self.fp8_cache = False
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed = Embedding(config.vocab_size, size, dtype, device)
        self.register_moe_layers(mlps)
        layers = [DecoderLayer(make_mixer(layer), mlp, size, eps, dtype, device) for layer, mlp in enumerate(mlps)]
        self.decoders = layers[: config.num_layers]
        self.depth = len(self.decoders)  # so many of them take part in a step
        self.mtp: MtpLayer[A] | None = None
        if len(layers) > config.num_layers:
            self.mtp = MtpLayer(layers[-1], config.num_layers, size, eps, dtype, device)
        # Where the residual stream is kept (cache/residuals.py): everywhere, if no rank waits for others.
        exchanging = [at for at, layer in enumerate(self.decoders) if layer.mlp.exchanges]
        waited = exchanging or list(range(config.num_layers))
        kept = [at for at in waited if self.can_begin_at(at)]
        behind = [config.num_layers] if waited[-1] == config.num_layers - 1 else []
        self._kept = {at: number for number, at in enumerate([*kept, *behind]) if at}  # the first has the embedding's
        self.layers = nn.ModuleList(self.decoders)  # the same, where nn.Module finds their parameters
        self.norm = RMSNorm(size, eps, dtype, device)
        tied = self.embed.weight if config.tie_word_embeddings else None
        self.head = LMHead(size, config.vocab_size, tied, dtype, device, head_bias)
        self.rope = Rope(config.rope, dtype, device)
        self.eagle3: Eagle3 | None = None
        if config.eagle3 is not None:
            self.eagle3 = Eagle3(config.eagle3, config.num_layers, dtype, device, self.embed, self.head)

    def cache_spec(self) -> CacheSpec:
        """In the model's dtype, or in FP8 where the family's class has been told so."""
        return self.config.cache_spec(str(self.dtype).removeprefix("torch."), self.fp8_cache)

    def can_begin_at(self, layer: int) -> bool:
        """Whether a step may go on at this layer: of earlier layers, it and those behind it use nothing but what they
        have added to the residual stream."""
        return True

    @abstractmethod
    def prepare(self, step: StepInput, breaks: GraphBreaks) -> tuple[Operation, ...]:
        """What this family's sublayers do by the lengths of the step's sequences, prepared once for all layers."""

    def steps(self, step: StepInput, cache: CacheMemory, lane: int = 0, breaks: GraphBreaks = EAGER) -> Steps[Tensor]:
        """The hidden state after the last norm, [T, D]. Each norm also adds to the residual stream, in place."""
        layers = self.decoders[: self.depth]
        first = 0 if step.resumed is None else step.resumed.layer
        if not step.num_tokens:
            return (yield from self._idle_steps(layers[first:], lane))
        residual_TD = self.embed(step.token_ids_T) if step.resumed is None else step.resumed.residual_TD
        context = LayerContext(step, self.rope(step.positions_T), self.prepare(step, breaks), breaks, lane)
        if self.eagle3 is not None:
            for before in range(first):  # what these began with is no longer there
                self.eagle3.note(before, residual_TD, lane)
        x_TD: Tensor = (layers[first].input_norm if first < len(layers) else self.norm)(residual_TD)
        for index, layer in enumerate(layers[first:], first):
            mark()
            self._keep(index, residual_TD, cache.residuals, lane)
            mixed_TD = yield from layer.mixer.steps(x_TD, context, cache.layers[index])
            x_TD = layer.post_norm.add(mixed_TD, residual_TD)
            mlp_TD = yield from layer.mlp_steps(x_TD, context)
            following = layers[index + 1].input_norm if index + 1 < len(layers) else self.norm
            x_TD = following.add(mlp_TD, residual_TD)
        self._keep(len(layers), residual_TD, cache.residuals, lane)
        return x_TD

    def _keep(self, layer: int, residual_TD: Tensor, residuals: Residuals, lane: int) -> None:
        """At the start of a layer, or behind the last one."""
        if self.eagle3 is not None:
            self.eagle3.note(layer, residual_TD, lane)
        number, num_tokens = self._kept.get(layer), len(residual_TD)
        if number is not None and num_tokens <= residuals.num_tokens:
            rows_TD, there = residuals.place(number, self.dtype)
            keep(residual_TD, rows_TD[:num_tokens], there, layer)

    def shorten(self, on: bool) -> None:
        """Layers are of one kind that have the same classes of sublayers and lie in the same group of the cache."""
        self.depth = len(self.decoders)
        if on:
            group_of = {layer: number for number, group in enumerate(self.cache_spec()) for layer in group.layers}
            kinds = [(type(it.mixer), type(it.mlp), group_of.get(at)) for at, it in enumerate(self.decoders)]
            self.depth = 1 + max(kinds.index(kind) for kind in kinds)

    def keep_states(self, num_parts: int, num_tokens: int) -> None:
        """From now on steps of at most so many tokens keep what the layer that drafts is to see."""
        if self.eagle3 is not None:
            self.eagle3.keep(num_parts, num_tokens)

    def draft_input(self, hidden_TD: Tensor, lane: int = 0) -> Tensor:
        """The hidden_TD of `draft_steps` behind a pass of `steps`, which gave this one."""
        if self.eagle3 is None or not len(hidden_TD):
            return hidden_TD
        return self.eagle3.noted(len(hidden_TD), lane)

    def draft_tokens(self, hidden_SD: Tensor, num_valid_tokens: int, out_S: Tensor) -> Tensor:
        """int64 [S], in out_S: the best tokens after what `draft_steps` gave."""
        if self.eagle3 is not None:
            return self.eagle3.tokens(hidden_SD, out_S)
        return self.greedy_tokens(hidden_SD, num_valid_tokens, out_S)

    @property
    def drafts_exchange(self) -> bool:
        """Whether the layer that drafts has experts on other ranks."""
        return self.mtp is not None and self.mtp.layer.mlp.exchanges

    def draft_steps(
        self,
        step: StepInput,
        hidden_TD: Tensor,
        cache: CacheMemory,
        lane: int = 0,
        breaks: GraphBreaks = EAGER,
        rows_S: Tensor | None = None,
    ) -> Steps[Tensor]:
        """A pass of the layer that drafts (models/mtp.py, models/eagle3/layer.py), behind one of `steps` or of its
        own."""
        if self.eagle3 is not None:
            return (
                (yield from self.eagle3.steps(step, hidden_TD, rows_S, breaks, cache)) if step.num_tokens else hidden_TD
            )
        assert self.mtp is not None
        if not step.num_tokens:
            return (yield from self._idle_steps([self.mtp.layer], lane))
        context = LayerContext(step, self.rope(step.positions_T), self.prepare(step, breaks), breaks, lane)
        return (yield from self.mtp.steps(self.embed(step.token_ids_T), hidden_TD, rows_S, context, cache))

    def _idle_steps(self, layers: Sequence[DecoderLayer[A]], lane: int) -> Steps[Tensor]:
        """A rank without tokens: its experts serve the tokens of others, and nothing else is to be computed."""
        none_TD = torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.norm.weight.device)
        for layer in layers:
            mark()
            if layer.mlp.exchanges:
                yield from layer.mlp.steps(none_TD, lane)
        return none_TD

    def logits(self, hidden_PD: Tensor) -> Tensor:
        """[P, D] -> [P, V], in the model's dtype."""
        values_PV: Tensor = self.head(hidden_PD)
        return values_PV

    def logits_part(self, hidden_PD: Tensor, first: int, last: int) -> Tensor:
        """[P, D] -> [P, last - first]: of `logits` those from `first`, a multiple of 64, up to `last`."""
        return self.head.part(hidden_PD, first, last)

    def greedy_tokens(self, hidden_PD: Tensor, num_valid_tokens: int, out_P: Tensor | None = None) -> Tensor:
        """int64 [P]: of the first num_valid_tokens logits the largest, the first of equals; in out_P if there is
        one."""
        return self.head.greedy_tokens(hidden_PD, num_valid_tokens, out_P)

    def _read_embedding(self, source: WeightSource) -> None:
        source.read("model.embed_tokens.weight", self.embed.weight)

    def _read_tied(self, source: WeightSource) -> None:
        self._read_embedding(source)
        read_head(source, self.head)

    def load(self, source: WeightSource, store: Store | None = None) -> None:
        """Fill every parameter, and the experts that this rank hosts."""
        ends = [Part(self.norm, self.read_norm)]
        if self.head.tied is None:
            ends += [
                Part(self.embed, self._read_embedding),
                Part(self.head, lambda source: read_head(source, self.head)),
            ]
        else:  # what the head is made of must have been read by the same rank
            ends.append(Part(nn.ModuleList([self.embed, self.head]), self._read_tied))
        layers: list[Part] = [Part(layer, partial(self.read_layer, at)) for at, layer in enumerate(self.decoders)]
        if self.mtp is not None:
            layers.append(Part(self.mtp, partial(self.read_mtp, self.mtp)))
        if self.eagle3 is not None:
            layers.append(Part(self.eagle3, self.eagle3.read))
        self.load_parts([*ends, *layers], source, self.config.num_experts, store)
        self.skip_rest(source)

    def read_norm(self, source: WeightSource) -> None:
        """Fill the last norm."""
        source.read("model.norm.weight", self.norm.weight)

    def read_mtp(self, mtp: MtpLayer[A], source: WeightSource) -> None:
        """Fill the layer that drafts."""
        mtp.read(source, self.config.tie_word_embeddings, self.config.vocab_size)
        self.read_layer(mtp.index, source)

    def layer(self, index: int) -> DecoderLayer[A]:
        """One of the main model's, or the one behind them, which drafts."""
        return self.decoders[index] if self.mtp is None or index < self.mtp.index else self.mtp.layer

    @abstractmethod
    def read_layer(self, index: int, source: WeightSource) -> None:
        """Fill the parameters of one layer; its experts are none."""

    def skip_rest(self, source: WeightSource) -> None:
        """Skip the keys that the model does not use."""
