"""DeepSeek-V2 and DeepSeek-V3: latent attention, routed and shared experts behind the first dense layers.

Legend: T tokens, D hidden size, P rows sampled, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dbo.steps import Steps
from ep.moe import MoE, MoELayers
from ep.parallel import Parallel
from ep.router import DeepseekV2Router, DeepseekV3Router
from layers.embed import Embedding
from layers.head import Head
from layers.mlp import GatedMLP
from layers.norm import RMSNorm
from layers.paged_kv import KVSpec, PagedKV
from layers.rope import Rope
from layers.step import StepInput
from mla.backend import make_backend
from mla.latent_fp8 import row_bytes
from mla.protocol import MlaBackend, PrefillMode
from models.base import WeightSource
from models.cuts import UNCUT, Cuts
from models.deepseek import weights
from models.deepseek.attention import Attention, mla_shape
from models.deepseek.config import DeepseekConfig
from models.hosting import ExpertHost
from models.loading import read_ends, read_mlp


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each behind its norm."""

    def __init__(self, config: DeepseekConfig, mlp: GatedMLP | MoE, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.attention = Attention(config, dtype, device)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = mlp

    def mlp_steps(self, x_TD: Tensor, lane: int, cuts: Cuts) -> Steps[Tensor]:
        """The feed-forward layer; only routed experts yield."""
        if isinstance(self.mlp, GatedMLP):
            out_TD: Tensor = self.mlp(x_TD)
            return out_TD
        return (yield from cuts.experts(self.mlp.steps, x_TD, lane))


class DeepseekForCausalLM(ExpertHost):
    """Implements models.base.CausalLM. mla_prefill: how prompts attend (mla/protocol.py); results are the same. mla_backend:
    a name of mla/backend.py. fp8_cache: the cache has latents in FP8 (mla/latent_fp8.py)."""

    def __init__(
        self,
        config: DeepseekConfig,
        parallel: Parallel,
        dtype: torch.dtype,
        device: torch.device,
        mla_prefill: PrefillMode = "auto",
        mla_backend: str = "auto",
        fp8_cache: bool = False,
    ) -> None:
        super().__init__(parallel, config.hidden_size, device)
        self.config = config
        self.dtype = dtype
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        dense = [GatedMLP(config.hidden_size, config.mlp_width, dtype, device) for _ in range(config.first_moe_layer)]
        mlps: list[GatedMLP | MoE] = [*dense, *_moe_layers(config, parallel, dtype, device)]
        self.host(mlps)
        self.decoders = [DecoderLayer(config, mlp, dtype, device) for mlp in mlps]
        self.layers = nn.ModuleList(self.decoders)  # the same, where nn.Module finds their parameters
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        tied = self.embed.weight if config.tie_word_embeddings else None
        self.head = Head(config.hidden_size, config.vocab_size, tied, dtype, device)
        self.rope = Rope(config.rope, dtype, device)
        self.fp8_cache = fp8_cache
        self.mla: MlaBackend = make_backend(
            mla_shape(config), config.attention_scale, mla_prefill, dtype, device, mla_backend, fp8_cache
        )

    def kv_spec(self) -> KVSpec:
        """One row per token and layer: the latent, then the rotated key."""
        if self.fp8_cache:
            width = row_bytes(self.config.kv_lora_rank, self.config.rope_dim)
            return KVSpec(self.config.num_layers, ((width,),), torch.uint8)
        return KVSpec(self.config.num_layers, ((self.config.kv_lora_rank + self.config.rope_dim,),), self.dtype)

    def steps(self, step: StepInput, kv: PagedKV, lane: int = 0, cuts: Cuts = UNCUT) -> Steps[Tensor]:
        """The hidden state after the last norm, [T, D]. Each norm also adds to the residual stream, in place."""
        residual_TD = self.embed(step.token_ids_T)
        rope = self.rope(step.positions_T)
        attend = cuts.attention(self.mla.prepare, step, 2)
        x_TD: Tensor = self.decoders[0].input_norm(residual_TD)
        for index, layer in enumerate(self.decoders):
            (cache_RX,) = kv.layers[index]
            attended_TD = layer.attention(x_TD, rope, cache_RX, step.slots_T, attend)
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

    def load(self, source: WeightSource) -> None:
        """Fill every parameter; of the experts only those that this rank hosts are read."""
        read_ends(source, self.embed.weight, self.norm, self.head.matrix, self.config.tie_word_embeddings)
        self.settle(self.head)
        for index, layer in enumerate(self.decoders):
            prefix = f"model.layers.{index}."
            weights.load_attention(source, prefix, layer.attention, self.config)
            weights.load_norms(source, prefix, layer.input_norm, layer.post_norm)
            if isinstance(layer.mlp, GatedMLP):
                read_mlp(source, f"{prefix}mlp.", layer.mlp)
            else:
                placement = self.parallel.placement
                assert placement is not None
                hosted = placement.experts_of(index - self.config.first_moe_layer, self.parallel.rank)
                weights.load_moe(source, prefix, layer.mlp, hosted, self.config.num_experts)
            self.settle(layer)
        weights.skip_mtp(source, self.config)


def _moe_layers(config: DeepseekConfig, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> list[MoE]:
    """The layers with routed experts."""
    if config.num_moe_layers == 0:
        return []
    layers = MoELayers(parallel, config.hidden_size, dtype, device)
    shared_width = config.num_shared_experts * config.expert_width
    made = []
    for _ in range(config.num_moe_layers):
        shared = GatedMLP(config.hidden_size, shared_width, dtype, device) if shared_width else None
        made.append(layers.make(_router(config, device), config.expert_width, shared))
    return made


def _router(config: DeepseekConfig, device: torch.device) -> DeepseekV2Router | DeepseekV3Router:
    router = config.router
    assert router is not None
    groups = (router.num_groups, router.topk_groups)
    if router.method == "noaux_tc":
        return DeepseekV3Router(
            config.hidden_size, config.num_experts, router.experts_per_token, *groups,
            router.norm_topk_prob, router.routed_scaling_factor, device,
        )  # fmt: skip
    return DeepseekV2Router(
        config.hidden_size, config.num_experts, router.experts_per_token, router.method, *groups,
        router.routed_scaling_factor, device,
    )  # fmt: skip
