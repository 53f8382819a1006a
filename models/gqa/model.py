"""Decoders with grouped-query attention, dense or with routed experts; families differ by switches (config.py).

Legend: T tokens, D hidden size, H query heads, Hkv key/value heads, Dh head size, R rope planes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from cache.spec import token_groups
from dbo.steps import Steps
from ep.experts import Activation, ExpertKind
from ep.moe import MoE, MoELayers
from ep.parallel import Parallel
from layers.attention import AttentionPlan, HeadCounts, paged_attention, qk_norm_rope_cache
from layers.linear import Linear, MergedLinear, parameter
from layers.mlp import GatedMLP, WeightedMLP, sigmoid_gate
from layers.norm import rms_norm_in_place
from layers.step import StepInput
from models.base import WeightSource
from models.decoder import Decoder
from models.decoder_layer import LayerContext
from models.gqa import weights
from models.gqa.config import GqaConfig
from models.graph_breaks import GraphBreaks, Operation
from models.loading import read_mlp, read_shared, skip_mtp
from models.routers import make_router, read_router


class Attention(nn.Module):
    """Grouped-query attention. qk_norm [H + Hkv, Dh]: the weight of the norm of queries and keys, or None;
    norms_vectors: it is that of all heads as one vector. sinks float32 [H] (layers/reference.py), or None. gate: what
    every head gives is multiplied by its sigmoid."""

    qk_norm: nn.Parameter | None
    sinks: nn.Parameter | None
    gate: Linear | None

    def __init__(self, config: GqaConfig, group: int, dtype: torch.dtype, device: torch.device) -> None:
        """group: of the cache."""
        super().__init__()
        self.group = group
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = MergedLinear(config.hidden_size, parts, config.qkv_bias, dtype, device)
        self.out = Linear(q_size, config.hidden_size, config.o_bias, dtype, device)
        qk_shape = (config.num_heads + config.num_kv_heads, config.head_dim)
        self.qk_norm = None if config.qk_norm == "none" else parameter(qk_shape, dtype, device)
        self.norms_vectors = config.qk_norm == "vector"
        self.gate = Linear(config.hidden_size, q_size, config.qkv_bias, dtype, device) if config.output_gate else None
        self.sinks = parameter((config.num_heads,), torch.float32, device) if config.sinks else None
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5

    def steps(self, x_TD: Tensor, context: LayerContext, cache: tuple[Tensor, ...]) -> Steps[Tensor]:
        """Writes the step's keys and values to `cache`, then attends over it."""
        yield from ()  # nothing of it is ever in flight
        qkv = self.qkv(x_TD)
        qk_norm = self.qk_norm
        if self.norms_vectors:
            self._norm_vectors(qkv)
            qk_norm = None
        qkv = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        slots_T = context.step.slots_of(self.group)
        q_THD = qk_norm_rope_cache(qkv, self.num_heads, qk_norm, self.eps, context.rope, cache, slots_T)
        k_cache, v_cache = cache
        attend = context.operations[self.group]
        attended = attend(q_THD, k_cache, v_cache, self.scale, self.sinks).reshape(-1, self.num_heads * self.head_dim)
        if self.gate is not None:
            attended = sigmoid_gate(attended, self.gate(x_TD))
        out_TD: Tensor = self.out(attended)
        return out_TD

    def _norm_vectors(self, qkv: Tensor) -> None:
        """In place, of queries, keys and values side by side."""
        assert self.qk_norm is not None
        start = 0
        for heads in (slice(0, self.num_heads), slice(self.num_heads, None)):
            weight = self.qk_norm[heads].flatten()
            part = qkv[:, start : start + weight.shape[0]]
            rms_norm_in_place(part, weight, self.eps)
            start += weight.shape[0]


class GqaForCausalLM(Decoder[Attention]):
    """Implements models.base.CausalLM."""

    config: GqaConfig

    def __init__(self, config: GqaConfig, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        mlps = make_mlps(config, parallel, dtype, device)
        groups = token_groups(config.cache_spec("float32"))
        group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}

        def attention(layer: int) -> Attention:
            return Attention(config, group_of.get(layer, 0), dtype, device)

        super().__init__(config, attention, mlps, parallel, dtype, device, config.head_bias)
        self.heads = HeadCounts(config.num_heads, config.num_kv_heads, config.head_dim)
        self._windows = [group.window for group in groups]

    def prepare(self, step: StepInput, breaks: GraphBreaks) -> tuple[Operation, ...]:
        """The attention of each group of the cache."""
        groups = range(len(self._windows))
        return tuple(breaks.operation(partial(self._attention, group), step, 1) for group in groups)

    def _attention(self, group: int, step: StepInput) -> Operation:
        plan = AttentionPlan(step.of_group(group), self.heads, self.dtype, self._windows[group])
        return lambda q_THD, k_cache, v_cache, scale, sinks_H: paged_attention(
            q_THD, k_cache, v_cache, plan, scale, sinks_H
        )

    def read_layer(self, index: int, source: WeightSource) -> None:
        layer, prefix = self.layer(index), f"model.layers.{index}."
        source.read(f"{prefix}input_layernorm.weight", layer.input_norm.weight)
        source.read(f"{prefix}post_attention_layernorm.weight", layer.post_norm.weight)
        read_mixer(source, f"{prefix}self_attn.", self.config, layer.mixer)
        read_feed_forward(source, f"{prefix}mlp.", layer.mlp)

    def skip_rest(self, source: WeightSource) -> None:
        skip_mtp(source, self.config.num_layers, self.config.num_mtp_layers, self.config.drafts)


def read_mixer(source: WeightSource, prefix: str, config: GqaConfig, attention: Attention) -> None:
    weights.read_attention(source, prefix, config, attention.qkv, attention.out, attention.qk_norm, attention.gate)
    if attention.sinks is not None:
        source.read(f"{prefix}sinks", attention.sinks)


def read_feed_forward(source: WeightSource, prefix: str, mlp: GatedMLP | MoE) -> None:
    """Dense, or the router and the shared expert of routed ones."""
    if isinstance(mlp, GatedMLP):
        read_mlp(source, prefix, mlp)
        return
    read_router(source, f"{prefix}gate.", mlp.router)
    read_shared(source, prefix, mlp.shared)


def make_mlps(config: GqaConfig, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> list[GatedMLP | MoE]:
    """The feed-forward layer of each decoder layer."""
    moe_layers = MoELayers(parallel, config.hidden_size, dtype, device) if config.moe_layers else None
    kind = ExpertKind(Activation(*config.activation), config.expert_biases)
    mlps: list[GatedMLP | MoE] = []
    for layer in range(config.num_layers + config.drafts):
        if moe_layers is None or not config.has_experts(layer):
            mlps.append(GatedMLP(config.hidden_size, config.intermediate_size, dtype, device, config.mlp_bias))
            continue
        assert config.router is not None
        router = make_router(config.router, config.hidden_size, config.num_experts, dtype, device)
        whole = config.whole_drafts and layer == config.num_layers
        shared = _shared(config, dtype, device)
        mlps.append(moe_layers.make(router, config.moe_intermediate_size, shared, kind, whole))
    return mlps


def _shared(config: GqaConfig, dtype: torch.dtype, device: torch.device) -> GatedMLP | None:
    """The expert that every token takes."""
    if not config.shared_width:
        return None
    kind = WeightedMLP if config.has_shared_gate else GatedMLP
    return kind(config.hidden_size, config.shared_width, dtype, device, config.mlp_bias)
