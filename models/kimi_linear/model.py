"""Kimi-Linear and Ling-3: layers with Kimi delta attention, some with latent attention (Kimi's without positions),
DeepSeek-V3's experts.

Legend: T tokens, D hidden size, C channels of a convolution, H heads, K width of a key and of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dbo.steps import Steps
from ep.parallel import Parallel
from layers.gated_delta import DeltaShape, GatedDelta, GatedDeltaStep
from layers.linear import Linear, MergedLinear
from layers.step import StepInput
from mla.backend import make_backend
from mla.protocol import MlaBackend, MlaShape, PrefillMode
from models.base import WeightSource
from models.decoder import Decoder
from models.decoder_layer import LayerContext
from models.deepseek.attention import Attention
from models.deepseek.model import make_mlps, read_feed_forward
from models.deepseek.weights import load_attention, load_norms
from models.graph_breaks import GraphBreaks, Operation
from models.kimi_linear.config import KimiLinearConfig
from models.loading import read_linear, read_merged, skip_mtp

LATENT, DELTA = 0, 1  # the operations of a step


class KimiDeltaAttention(nn.Module):
    """down: queries, keys, values, beta, the decay [H * K] and the output's gate [H * K]; with narrow_gates the last
    two come from narrow vectors in it, by f_b and g_b."""

    f_b: Linear | None
    g_b: Linear | None

    def __init__(self, config: KimiLinearConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        heads, width = config.linear_heads, config.linear_dim
        size = heads * width
        parts = {"q_proj": size, "k_proj": size, "v_proj": size, "b_proj": heads}
        self.f_b = self.g_b = None
        if config.narrow_gates:
            parts |= {"f_a_proj": width, "g_a_proj": width}
            self.f_b, self.g_b = (Linear(width, size, False, dtype, device) for _ in range(2))
        else:
            parts |= {"f_proj": size, "g_proj": size}
        *_, decay, gate = parts.values()
        self.sizes = [3 * size, heads, decay, gate]
        self.down = MergedLinear(config.hidden_size, parts, False, dtype, device)
        shape = DeltaShape(heads, heads, width, width, config.conv_taps, channel_decay=True)
        self.delta = GatedDelta(shape, config.rms_norm_eps, device, True, config.lower_bound)
        self.out = Linear(size, config.hidden_size, False, dtype, device)

    def steps(self, x_TD: Tensor, context: LayerContext, cache: tuple[Tensor, ...]) -> Steps[Tensor]:
        """[T, D] -> [T, D]. Reads the sequences' records and writes others."""
        yield from ()  # nothing of it is ever in flight
        qkv_TC, beta_TH, decay_T, gate_T = torch.split(self.down(x_TD), self.sizes, dim=1)
        if self.f_b is not None and self.g_b is not None:
            decay_T, gate_T = self.f_b(decay_T), self.g_b(gate_T)
        out_TD: Tensor = self.out(context.operations[DELTA](qkv_TC, gate_T, beta_TH, decay_T, self.delta, cache))
        return out_TD

    def read(self, source: WeightSource, prefix: str) -> None:
        read_merged(source, prefix, self.down)
        for name, linear in (("f_b_proj", self.f_b), ("g_b_proj", self.g_b), ("o_proj", self.out)):
            if linear is not None:
                read_linear(source, f"{prefix}{name}", linear)
        delta, start = self.delta, 0
        size = delta.shape.key_size
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            conv = torch.empty((size, 1, delta.shape.taps), dtype=torch.float32, device=delta.conv.device)
            source.read(f"{prefix}{name}.weight", conv)
            delta.conv[:, start : start + size] = conv[:, 0].T
            start += size
        rate = delta.rate if self.f_b is None else delta.rate.view(1, 1, -1, 1)
        source.read(f"{prefix}A_log", rate)
        delta.rate.exp_()
        source.read(f"{prefix}dt_bias", delta.dt_bias)
        source.read(f"{prefix}o_norm.weight", delta.norm)


class KimiLinearForCausalLM(Decoder[Attention | KimiDeltaAttention]):
    """Implements models.base.CausalLM. The choices are those of models.deepseek.model.DeepseekForCausalLM."""

    config: KimiLinearConfig

    def __init__(
        self,
        config: KimiLinearConfig,
        parallel: Parallel,
        dtype: torch.dtype,
        device: torch.device,
        mla_prefill: PrefillMode = "auto",
        mla_backend: str = "auto",
        fp8_cache: bool = False,
    ) -> None:
        def make_mixer(layer: int) -> Attention | KimiDeltaAttention:
            if layer in config.full_layers:
                return Attention(config, layer, dtype, device)
            return KimiDeltaAttention(config, dtype, device)

        mlps = make_mlps(config, parallel, dtype, device)
        super().__init__(config, make_mixer, mlps, parallel, dtype, device)
        self.fp8_cache = fp8_cache
        self.mla: MlaBackend = make_backend(
            MlaShape(*config.mla_dims), config.attention_scale, mla_prefill, dtype, device, mla_backend, fp8_cache
        )

    def prepare(self, step: StepInput, breaks: GraphBreaks) -> tuple[Operation, ...]:
        latent = breaks.operation(self.mla.prepare, step, 2)
        return (latent,) if step.state is None else (latent, breaks.operation(GatedDeltaStep, step, 4))

    def read_layer(self, index: int, source: WeightSource) -> None:
        layer, prefix = self.decoders[index], f"model.layers.{index}."
        if isinstance(layer.mixer, Attention):
            load_attention(source, prefix, layer.mixer, self.config)
        else:
            layer.mixer.read(source, f"{prefix}self_attn.")
        load_norms(source, prefix, layer.input_norm, layer.post_norm)
        read_feed_forward(source, prefix, layer.mlp)

    def skip_rest(self, source: WeightSource) -> None:
        skip_mtp(source, self.config.num_layers, self.config.num_mtp_layers)
