"""Qwen3 (dense and mixture of experts), and Qwen2, Llama and Mistral by its switches.

Legend: T tokens, D hidden size, H query heads, Hkv key/value heads, Dh head size, R rope planes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dbo.steps import Steps
from ep.moe import MoE, MoELayers
from ep.parallel import Parallel
from ep.router import SoftmaxRouter
from layers.attention import AttentionPlan, Heads, paged_attention, place_heads
from layers.linear import Linear, MergedLinear, parameter
from layers.mlp import GatedMLP
from layers.step import StepInput
from models.base import WeightSource
from models.decoder import Decoder, LayerContext
from models.graph_breaks import GraphBreaks, Operation
from models.loading import read_mlp
from models.qwen3 import weights
from models.qwen3.config import Qwen3Config


class Attention(nn.Module):
    """Grouped-query attention. qk_norm [H + Hkv, Dh]: the weight of the norm of each query and key head, or None."""

    qk_norm: nn.Parameter | None

    def __init__(self, config: Qwen3Config, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = MergedLinear(config.hidden_size, parts, config.qkv_bias, dtype, device)
        self.out = Linear(q_size, config.hidden_size, config.o_bias, dtype, device)
        qk_shape = (config.num_heads + config.num_kv_heads, config.head_dim)
        self.qk_norm = parameter(qk_shape, dtype, device) if config.qk_norm else None
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5

    def steps(self, x_TD: Tensor, context: LayerContext, cache: tuple[Tensor, ...]) -> Steps[Tensor]:
        """Writes the step's keys and values to `cache`, then attends over it."""
        yield from ()  # nothing of it is ever in flight
        qkv = self.qkv(x_TD).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        q_THD = place_heads(qkv, self.num_heads, self.qk_norm, self.eps, context.rope, cache, context.step.slots_T)
        k_cache, v_cache = cache
        attend = context.operations[0]
        attended = attend(q_THD, k_cache, v_cache, self.scale)
        out_TD: Tensor = self.out(attended.reshape(-1, self.num_heads * self.head_dim))
        return out_TD


class Qwen3ForCausalLM(Decoder[Attention]):
    """Implements models.base.CausalLM."""

    config: Qwen3Config

    def __init__(self, config: Qwen3Config, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        mlps = _mlps(config, parallel, dtype, device)
        super().__init__(config, lambda layer: Attention(config, dtype, device), mlps, parallel, dtype, device)
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)

    def prepare(self, step: StepInput, breaks: GraphBreaks) -> tuple[Operation, ...]:
        return (breaks.operation(self._attention, step, 1),)

    def _attention(self, step: StepInput) -> Operation:
        plan = AttentionPlan(step, self.heads, self.dtype)
        return lambda q_THD, k_cache, v_cache, scale: paged_attention(q_THD, k_cache, v_cache, plan, scale)

    def read_layer(self, index: int, source: WeightSource) -> None:
        layer, prefix = self.decoders[index], f"model.layers.{index}."
        source.read(f"{prefix}input_layernorm.weight", layer.input_norm.weight)
        source.read(f"{prefix}post_attention_layernorm.weight", layer.post_norm.weight)
        attention = layer.mixer
        weights.read_attention(
            source, f"{prefix}self_attn.", attention.qkv, attention.out, attention.qk_norm, attention.num_heads
        )
        if isinstance(layer.mlp, GatedMLP):
            read_mlp(source, f"{prefix}mlp.", layer.mlp)
            return
        router = layer.mlp.router
        assert isinstance(router, SoftmaxRouter)
        source.read(f"{prefix}mlp.gate.weight", router.weight)


def _mlps(config: Qwen3Config, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> list[GatedMLP | MoE]:
    """The feed-forward layer of each decoder layer."""
    moe_layers = MoELayers(parallel, config.hidden_size, dtype, device) if config.moe_layers else None
    mlps: list[GatedMLP | MoE] = []
    for layer in range(config.num_layers):
        if moe_layers is None or layer not in config.moe_layers:
            mlps.append(GatedMLP(config.hidden_size, config.mlp_width, dtype, device, config.mlp_bias))
            continue
        router = SoftmaxRouter(
            config.hidden_size, config.num_experts, config.experts_per_token, config.norm_topk_prob, dtype, device
        )
        mlps.append(moe_layers.make(router, config.expert_width))
    return mlps
