"""DeepSeek-V2, V3 and V3.2: latent attention, routed and shared experts behind the first dense layers."""

from __future__ import annotations

from functools import partial

import torch

from ep.moe import MoE, MoELayers
from ep.parallel import Parallel
from layers.mlp import GatedMLP
from layers.step import StepInput
from mla.backend import make_backend
from mla.index import IndexShape
from mla.protocol import MlaBackend, MlaShape, PrefillMode
from mla.sparse import SparseMla
from models.base import WeightSource
from models.decoder import Decoder
from models.deepseek import weights
from models.deepseek.attention import Attention
from models.deepseek.config import DeepseekConfig
from models.graph_breaks import EAGER, GraphBreaks, Operation
from models.loading import read_mlp, skip_mtp
from models.routers import make_router


class DeepseekForCausalLM(Decoder[Attention]):
    """Implements models.base.CausalLM. mla_prefill: how prompts attend (mla/protocol.py); results are the same.
    mla_backend: a name of mla/requirements.py. fp8_cache: the cache has latents in FP8 (mla/latent_fp8.py)."""

    config: DeepseekConfig

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
        mlps = make_mlps(config, parallel, dtype, device)
        super().__init__(config, lambda layer: Attention(config, layer, dtype, device), mlps, parallel, dtype, device)
        self.fp8_cache = fp8_cache
        self.mla: MlaBackend | None = None
        self.sparse: SparseMla | None = None
        shape, scale = MlaShape(*config.mla_dims), config.attention_scale
        if config.index is None:
            self.mla = make_backend(shape, scale, mla_prefill, dtype, device, mla_backend, fp8_cache)
        else:
            index = IndexShape(*config.index.dims)
            self.sparse = SparseMla(shape, index, scale, mla_prefill, dtype, device, mla_backend, fp8_cache)

    def can_begin_at(self, layer: int) -> bool:
        """A layer without an indexer uses what the last one with one has chosen."""
        return self.config.index is None or self.config.has_indexer(layer)

    def prepare(self, step: StepInput, breaks: GraphBreaks) -> tuple[Operation, ...]:
        if self.sparse is not None:
            captured = breaks is not EAGER
            return (breaks.operation(partial(self.sparse.prepare, captured=captured), step, 4),)
        assert self.mla is not None
        return (breaks.operation(self.mla.prepare, step, 2),)

    def read_layer(self, index: int, source: WeightSource) -> None:
        layer, prefix = self.layer(index), f"model.layers.{index}."
        weights.load_attention(source, prefix, layer.mixer, self.config)
        weights.load_norms(source, prefix, layer.input_norm, layer.post_norm)
        read_feed_forward(source, prefix, layer.mlp)

    def skip_rest(self, source: WeightSource) -> None:
        skip_mtp(source, self.config.num_layers, self.config.num_mtp_layers, self.config.drafts)


def read_feed_forward(source: WeightSource, prefix: str, mlp: GatedMLP | MoE) -> None:
    if isinstance(mlp, GatedMLP):
        read_mlp(source, f"{prefix}mlp.", mlp)
    else:
        weights.load_moe(source, prefix, mlp)


def make_mlps(
    config: DeepseekConfig, parallel: Parallel, dtype: torch.dtype, device: torch.device
) -> list[GatedMLP | MoE]:
    """The feed-forward layer of each decoder layer."""
    moe_layers = MoELayers(parallel, config.hidden_size, dtype, device) if config.num_moe_layers else None
    shared_width = config.num_shared_experts * config.moe_intermediate_size
    mlps: list[GatedMLP | MoE] = []
    for layer in range(config.num_layers + config.drafts):
        if moe_layers is None or not config.has_experts(layer):
            mlps.append(GatedMLP(config.hidden_size, config.intermediate_size, dtype, device))
            continue
        assert config.router is not None
        shared = GatedMLP(config.hidden_size, shared_width, dtype, device) if shared_width else None
        router = make_router(config.router, config.hidden_size, config.num_experts, dtype, device)
        whole = config.whole_drafts and layer == config.num_layers
        mlps.append(moe_layers.make(router, config.moe_intermediate_size, shared, whole=whole))
    return mlps
