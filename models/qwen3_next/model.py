"""Qwen3-Next, Qwen3.5 and 3.6 (text): layers of gated delta nets, every fourth with gated attention, behind each a
dense feed-forward layer or routed experts and a shared one.

Legend: T tokens, D hidden size, C channels of a convolution.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from dbo.steps import Steps
from ep.parallel import Parallel
from layers.attention import AttentionPlan, HeadCounts, paged_attention
from layers.gated_delta import DeltaShape, GatedDelta, GatedDeltaStep
from layers.linear import Linear, MergedLinear
from layers.step import StepInput
from models.base import WeightSource
from models.decoder import Decoder
from models.decoder_layer import LayerContext
from models.gqa.model import Attention, make_mlps, read_feed_forward, read_mixer
from models.graph_breaks import GraphBreaks, Operation
from models.loading import skip_mtp
from models.mtp import MtpLayer
from models.qwen3_next import weights
from models.qwen3_next.config import Qwen3NextConfig

ATTENTION, DELTA = 0, 1  # the operations of a step


class GatedDeltaNet(nn.Module):
    """down: queries, keys and values (C), the gate of the output, beta and the decay, side by side."""

    def __init__(self, config: Qwen3NextConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = shape = DeltaShape(
            config.linear_key_heads,
            config.linear_value_heads,
            config.linear_key_dim,
            config.linear_value_dim,
            config.conv_taps,
            channel_decay=False,
        )
        heads = shape.num_heads
        self.sizes = {"qkv": shape.channels, "z": shape.value_size, "b": heads, "a": heads}
        self.down = MergedLinear(config.hidden_size, self.sizes, False, dtype, device)
        self.delta = GatedDelta(shape, config.rms_norm_eps, device)
        self.out = Linear(shape.value_size, config.hidden_size, False, dtype, device)

    def steps(self, x_TD: Tensor, context: LayerContext, cache: tuple[Tensor, ...]) -> Steps[Tensor]:
        """[T, D] -> [T, D]. Reads the sequences' records and writes others."""
        yield from ()  # nothing of it is ever in flight
        parts = self.down(x_TD).split(list(self.sizes.values()), dim=1)
        out_TD: Tensor = self.out(context.operations[DELTA](*parts, self.delta, cache))
        return out_TD


class Qwen3NextForCausalLM(Decoder[Attention | GatedDeltaNet]):
    """Implements models.base.CausalLM."""

    config: Qwen3NextConfig

    def __init__(self, config: Qwen3NextConfig, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        def make_mixer(layer: int) -> Attention | GatedDeltaNet:
            if layer in config.full_layers or layer == config.num_layers:  # what drafts attends to everything
                return Attention(config, 0, dtype, device)
            return GatedDeltaNet(config, dtype, device)

        mlps = make_mlps(config, parallel, dtype, device)
        super().__init__(config, make_mixer, mlps, parallel, dtype, device)
        self.heads = HeadCounts(config.num_heads, config.num_kv_heads, config.head_dim)

    def prepare(self, step: StepInput, breaks: GraphBreaks) -> tuple[Operation, ...]:
        attention = breaks.operation(self._attention, step, 1)
        return (attention,) if step.state is None else (attention, breaks.operation(GatedDeltaStep, step, 4))

    def _attention(self, step: StepInput) -> Operation:
        plan = AttentionPlan(step, self.heads, self.dtype)
        return partial(_attend, plan)

    def read_layer(self, index: int, source: WeightSource) -> None:
        layer, prefix = self.layer(index), f"model.layers.{index}."
        for name, norm in (("input_layernorm", layer.input_norm), ("post_attention_layernorm", layer.post_norm)):
            weights.read_centred(source, f"{prefix}{name}.weight", norm.weight)
        if isinstance(layer.mixer, Attention):
            read_mixer(source, f"{prefix}self_attn.", self.config, layer.mixer)
            assert layer.mixer.qk_norm is not None
            layer.mixer.qk_norm.add_(1)
        else:
            weights.read_delta_net(source, f"{prefix}linear_attn.", self.config, layer.mixer.down, layer.mixer.delta)
            source.read(f"{prefix}linear_attn.out_proj.weight", layer.mixer.out.weight)
        read_feed_forward(source, f"{prefix}mlp.", layer.mlp)

    def read_mtp(self, mtp: MtpLayer[Attention | GatedDeltaNet], source: WeightSource) -> None:
        if not source.has(f"model.layers.{mtp.index}.eh_proj.weight"):
            raise ValueError(
                "speculative_config: method mtp needs an MTP layer in the checkpoint; it has no mtp.fc.weight"
            )
        super().read_mtp(mtp, source)
        for norm in (mtp.embedding_norm, mtp.hidden_norm, mtp.norm):
            norm.weight.add_(1)

    def skip_rest(self, source: WeightSource) -> None:
        skip_mtp(source, self.config.num_layers, self.config.num_mtp_layers, self.config.drafts)

    def read_norm(self, source: WeightSource) -> None:
        weights.read_centred(source, "model.norm.weight", self.norm.weight)


def _attend(
    plan: AttentionPlan, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, sinks_H: Tensor | None
) -> Tensor:
    return paged_attention(q_THD, k_cache, v_cache, plan, scale, sinks_H)
