"""The router that a config asks for, and its keys in a checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from ep.router import DeepseekV2Router, DeepseekV3Router, SoftmaxBiasRouter, SoftmaxRouter
from models.base import WeightSource
from models.router_config import RouterConfig

Router = SoftmaxRouter | SoftmaxBiasRouter | DeepseekV2Router | DeepseekV3Router


def make_router(
    config: RouterConfig, hidden_size: int, num_experts: int, dtype: torch.dtype, device: torch.device
) -> Router:
    """With uninitialised weights. dtype: the model's."""
    top_k, groups = config.experts_per_token, (config.num_groups, config.topk_groups)
    scale = config.routed_scaling_factor
    if config.method == "softmax":
        norm, bias = config.norm_topk_prob, config.logit_bias
        return SoftmaxRouter(hidden_size, num_experts, top_k, norm, dtype, device, bias)
    if config.method == "softmax_bias":
        return SoftmaxBiasRouter(hidden_size, num_experts, top_k, config.smallest_sum, device)
    if config.method == "noaux_tc":
        norm = config.norm_topk_prob
        return DeepseekV3Router(hidden_size, num_experts, top_k, *groups, norm, scale, device)
    return DeepseekV2Router(hidden_size, num_experts, top_k, config.method, *groups, scale, device)


def read_router(source: WeightSource, prefix: str, router: nn.Module) -> None:
    """`prefix`weight, and `prefix`e_score_correction_bias ([E], or [1, E] as ERNIE has it) or `prefix`bias where there
    is such a bias."""
    assert isinstance(router, Router)
    source.read(f"{prefix}weight", router.weight)
    if isinstance(router, DeepseekV3Router):
        source.read(f"{prefix}e_score_correction_bias", router.bias_E)
    elif isinstance(router, SoftmaxRouter) and router.logit_bias_E is not None:
        source.read(f"{prefix}bias", router.logit_bias_E)
    elif isinstance(router, SoftmaxBiasRouter):
        source.read(f"{prefix}e_score_correction_bias", router.bias_E[None])
