"""An EAGLE-3 drafter: one layer of attention over grouped heads, which sees the embedding of the token that follows and
what the model's residual stream was at the start of some layers, projected to one state; or, for a token further, its
own state before. It has its own norm and head, whose tokens may be some of the model's. Source: arXiv 2503.01840; vLLM
has it as `Eagle3LlamaForCausalLM`.

What products take [embedding; state] or several states side by side is kept as a matrix for each, so that nothing is
brought together first. Legend: T tokens, S of them of which something is wanted, D hidden size, H query heads, Hkv
key/value heads, Dh head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cache.memory import CacheMemory
from dbo.alive import mark
from dbo.steps import Steps
from layers.attention import AttentionPlan, HeadCounts, paged_attention, qk_norm_rope_cache
from layers.embed import Embedding, take_rows
from layers.greedy import translated
from layers.head import LMHead
from layers.identity import DRAFTER_FILES
from layers.linear import Linear, MergedLinear
from layers.mlp import GatedMLP
from layers.norm import RMSNorm
from layers.residual import add, copy
from layers.rope import Rope
from layers.step import StepInput
from models.base import WeightSource
from models.eagle3.config import Eagle3Config
from models.graph_breaks import GraphBreaks, Operation
from models.loading import read_linear, read_mlp

_LAYER_NAMES = ("midlayer.", "layers.0.")  # the authors', and those of speculators


class Eagle3(nn.Module):
    """index: the number of its layer, behind the model's. states: of what was computed last, [layers, most tokens, D],
    for each part that a step may have; none before `keep`. token_of int64 [draft vocabulary, 1]: the model's token of
    each of the head's."""

    token_of: Tensor

    def __init__(
        self, config: Eagle3Config, index: int, dtype: torch.dtype, device: torch.device, embed: Embedding, head: LMHead
    ) -> None:
        """embed, head: the model's."""
        super().__init__()
        self.config, self.index = config, index
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed = Embedding(config.vocab_size, size, dtype, device) if config.own_embedding else None
        self.head = LMHead(size, config.draft_vocab_size, None, dtype, device) if config.own_head else None
        self._of_model = (embed, head)  # no parts of this module
        self.projections = nn.ModuleList([Linear(size, size, False, dtype, device) for _ in config.layers])
        self.state_norms = nn.ModuleList([RMSNorm(size, eps, dtype, device) for _ in config.layers if config.fc_norm])
        self.embedding_norm = RMSNorm(size, eps, dtype, device)
        self.hidden_norm = RMSNorm(size, eps, dtype, device)
        self.post_norm = RMSNorm(size, eps, dtype, device)
        self.norm = RMSNorm(size, eps, dtype, device)
        self.heads = HeadCounts(config.num_heads, config.num_kv_heads, config.head_dim)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.from_embedding = MergedLinear(size, parts, config.attention_bias, dtype, device)
        self.from_hidden = MergedLinear(size, parts, False, dtype, device)
        self.out = Linear(q_size, size, config.attention_bias, dtype, device)
        self.mlp = GatedMLP(size, config.intermediate_size, dtype, device)
        self.rope = Rope(config.rope, dtype, device)
        count = config.draft_vocab_size if config.maps_tokens else 0
        self.register_buffer("token_of", torch.zeros(count, 1, dtype=torch.int64, device=device))
        self.states: list[Tensor] = []

    def keep(self, num_parts: int, num_tokens: int) -> None:
        """From now on there is room for the states of steps of so many tokens."""
        like, shape = self.norm.weight, (len(self.config.layers), num_tokens, self.config.hidden_size)
        self.states = [like.new_zeros(shape) for _ in range(num_parts)]

    def note(self, layer: int, residual_TD: Tensor, part: int) -> None:
        """The residual stream of a step at the start of this layer, or behind the last one."""
        if layer in self.config.layers and self.states:
            copy(self.states[part][self.config.layers.index(layer)][: len(residual_TD)], residual_TD)

    def noted(self, num_tokens: int, part: int) -> Tensor:
        """[T, D]: the state of each token of the step that was computed last."""
        found: Tensor | None = None
        for number, projection in enumerate(self.projections):
            state_TD = self.states[part][number][:num_tokens]
            part_TD = projection(self.state_norms[number](state_TD) if self.config.fc_norm else state_TD)
            found = part_TD if found is None else add(found, part_TD)
        assert found is not None
        return found

    def steps(
        self,
        step: StepInput,
        hidden_TD: Tensor,
        rows_S: Tensor | None,
        breaks: GraphBreaks,
        cache: CacheMemory,
    ) -> Steps[Tensor]:
        """[S, D], as models.base.CausalLM.draft_steps has it; hidden_TD is no longer what it was then."""
        yield from ()  # nothing of it is ever in flight
        mark()
        attend = breaks.operation(self._attention, step, 1)
        embedded_TD = (self.embed or self._of_model[0])(step.token_ids_T)
        seen_TD = self.hidden_norm(hidden_TD)
        residual_TD = seen_TD if self.config.norm_before_residual else hidden_TD
        qkv = add(self.from_embedding(self.embedding_norm(embedded_TD)), self.from_hidden(seen_TD))
        qkv = qkv.view(-1, self.heads.num_heads + 2 * self.heads.num_kv_heads, self.heads.head_dim)
        keys, values = cache.layers[self.index]
        rope = self.rope(step.positions_T)
        q_THD = qk_norm_rope_cache(qkv, self.heads.num_heads, None, 0.0, rope, (keys, values), step.slots_T)
        attended = attend(q_THD, keys, values, self.heads.head_dim**-0.5, None)
        mixed_TD = self.out(attended.reshape(-1, self.heads.num_heads * self.heads.head_dim))
        if rows_S is not None:
            mixed_TD, residual_TD = take_rows(mixed_TD, rows_S), take_rows(residual_TD, rows_S)
            if not len(rows_S):
                return residual_TD
        x_TD = self.post_norm.add(mixed_TD, residual_TD)
        fed_TD = yield from self.mlp.steps(x_TD)
        normed_TD = self.norm.add(fed_TD, residual_TD)
        return normed_TD if self.config.norm_output else residual_TD

    def _attention(self, step: StepInput) -> Operation:
        plan = AttentionPlan(step, self.heads, self.norm.weight.dtype)
        return lambda q_THD, keys, values, scale, sinks_H: paged_attention(q_THD, keys, values, plan, scale, sinks_H)

    def tokens(self, hidden_SD: Tensor, out_S: Tensor) -> Tensor:
        """int64 [S], in out_S: the best tokens, the model's, after what `steps` gave."""
        if not self.config.norm_output:
            hidden_SD = self.norm(hidden_SD)
        head = self.head or self._of_model[1]
        if not self.config.maps_tokens:
            return head.greedy_tokens(hidden_SD, self.config.draft_vocab_size, out_S)
        best_S = head.greedy_tokens(hidden_SD, self.config.draft_vocab_size)
        return translated(best_S, self.token_of, out_S)

    # ---- loading ----

    def read(self, source: WeightSource) -> None:
        """Fill everything, from what the drafter's checkpoint calls so."""
        model = f"{DRAFTER_FILES}model."
        prefix = model if any(name.startswith(model) for name in source.names()) else DRAFTER_FILES
        named = [name for name in _LAYER_NAMES if source.has(f"{prefix}{name}hidden_norm.weight")]
        layer = prefix + (named or _LAYER_NAMES)[0]
        pairs = [
            (f"{layer}input_layernorm", self.embedding_norm.weight),
            (f"{layer}hidden_norm", self.hidden_norm.weight),
            (f"{layer}post_attention_layernorm", self.post_norm.weight),
            (f"{prefix}norm", self.norm.weight),
        ]
        for name, tensor in pairs:
            source.read(f"{name}.weight", tensor)
        for number, norm in enumerate(self.state_norms):
            source.read(f"{prefix}fc_norm.{number}.weight", norm.get_parameter("weight"))
        if self.embed is not None:
            source.read(f"{prefix}embed_tokens.weight", self.embed.weight)
        if self.head is not None:
            read_linear(source, f"{DRAFTER_FILES}lm_head", self.head)
        self._read_halves(source, f"{layer}self_attn.")
        self._read_states(source, f"{prefix}fc.weight")
        read_linear(source, f"{layer}self_attn.o_proj", self.out)
        read_mlp(source, f"{layer}mlp.", self.mlp)
        if self.config.maps_tokens:
            self._read_tokens(source, f"{DRAFTER_FILES}d2t")
        if source.has(f"{DRAFTER_FILES}t2d"):  # which tokens the head knows, as d2t tells
            source.skip(f"{DRAFTER_FILES}t2d")

    def _read_halves(self, source: WeightSource, prefix: str) -> None:
        size = self.config.hidden_size
        for part, num_outputs in self.from_embedding.parts.items():
            both = self.norm.weight.new_empty(num_outputs, 2 * size)
            source.read(f"{prefix}{part}.weight", both)
            self.from_embedding.weight_of(part).copy_(both[:, :size])
            self.from_hidden.weight_of(part).copy_(both[:, size:])
            if self.config.attention_bias:
                source.read(f"{prefix}{part}.bias", self.from_embedding.bias_of(part))

    def _read_states(self, source: WeightSource, name: str) -> None:
        size, count = self.config.hidden_size, len(self.projections)
        whole = self.norm.weight.new_empty(size, count * size)
        source.read(name, whole)
        if self.config.norm_before_fc:  # of that norm, which the next one undoes, only the weight counts
            weight = whole.new_empty(count * size)
            source.read(name.replace("fc.", "input_norm."), weight)
            whole *= weight
        for number, projection in enumerate(self.projections):
            projection.get_parameter("weight").copy_(whole[:, number * size : (number + 1) * size])

    def _read_tokens(self, source: WeightSource, name: str) -> None:
        """The checkpoint has how far each is behind its place. ValueError: the model has no such token."""
        further = torch.empty(len(self.token_of), dtype=torch.int64)
        source.read(name, further)
        tokens = torch.arange(len(further)) + further
        if not ((tokens >= 0) & (tokens < self.config.vocab_size)).all():
            raise ValueError(f"{name}: a token that is not below the model's {self.config.vocab_size}")
        self.token_of[:, 0] = tokens
