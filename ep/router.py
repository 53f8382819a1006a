"""Routers: which experts each token goes to, and with what weight.

Legend: T tokens, D hidden size, K experts per token, E logical experts.
Every forward: x [T, D] -> (expert int64 [T, K], weight float32 [T, K]); the experts of a token are distinct and in no
defined order.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from moe_kernels import (
    biased_softmax_topk,
    grouped_sigmoid_topk,
    grouped_softmax_topk,
    router_logits,
    router_logits32,
    softmax_topk,
)

Device = torch.device | str | None


class Router(nn.Module):
    """`weight` [E, D]; `bias_E`, where there is one, takes part in the choice only. Logits of routers with a float32
    weight are computed in float32: converting once is exact."""

    bias_E: nn.Parameter

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, device: Device, dtype: torch.dtype, bias: bool = False
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k is {top_k}; it must be 1 to {num_experts} (the number of experts)")
        self.top_k = top_k
        weight = torch.empty(num_experts, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias:
            zeros_E = torch.zeros(num_experts, dtype=torch.float32, device=device)
            self.bias_E = nn.Parameter(zeros_E, requires_grad=False)


class SoftmaxRouter(Router):
    """Qwen3-MoE: logits in the model's dtype, softmax over all experts in float32, top-k, optionally renormalised.

    Weights stay float32 (transformers rounds them to the model's dtype). gpt-oss: the logits have a bias.
    """

    logit_bias_E: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        dtype: torch.dtype,
        device: Device = None,
        logit_bias: bool = False,
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, device, dtype)
        self.renormalize = renormalize
        bias_E = torch.empty(num_experts, dtype=dtype, device=device) if logit_bias else None
        self.logit_bias_E = None if bias_E is None else nn.Parameter(bias_E, requires_grad=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return softmax_topk(router_logits(x_TD, self.weight, self.logit_bias_E), self.top_k, self.renormalize)


class SoftmaxBiasRouter(Router):
    """ERNIE 4.5: softmax in float32; weights are divided by their sum, but by no less than `smallest_sum`. `weight` and
    `bias_E` are float32 whatever the model's dtype."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, smallest_sum: float, device: Device = None
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, device, torch.float32, bias=True)
        self.smallest_sum = smallest_sum

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = router_logits32(x_TD, self.weight)
        return biased_softmax_topk(logits_TE, self.bias_E, self.top_k, self.smallest_sum)


class DeepseekV2Router(Router):
    """DeepSeek-V2: softmax in float32, greedy or limited to groups by their best expert, no renormalisation. `weight`
    is float32 whatever the model's dtype."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        topk_method: Literal["greedy", "group_limited_greedy"],
        num_groups: int,
        topk_groups: int,
        routed_scaling_factor: float,
        device: Device = None,
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, device, torch.float32)
        if topk_method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"topk_method is {topk_method!r}; it must be 'greedy' or 'group_limited_greedy'")
        groups = (num_groups, topk_groups) if topk_method == "group_limited_greedy" else (1, 1)
        self.num_groups, self.topk_groups = _checked_groups(num_experts, top_k, *groups, fewest=1)
        self.scale = routed_scaling_factor

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = router_logits32(x_TD, self.weight)
        return grouped_softmax_topk(logits_TE, self.top_k, self.num_groups, self.topk_groups, self.scale)


class DeepseekV3Router(Router):
    """DeepSeek-V3/R1: sigmoid in float32; `bias_E` is e_score_correction_bias; groups by the sum of their two best.
    `weight` and `bias_E` are float32 whatever the model's dtype."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        num_groups: int,
        topk_groups: int,
        norm_topk_prob: bool,
        routed_scaling_factor: float,
        device: Device = None,
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, device, torch.float32, bias=True)
        self._groups = _checked_groups(num_experts, top_k, num_groups, topk_groups, fewest=2)
        self._scale = norm_topk_prob, routed_scaling_factor

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = router_logits32(x_TD, self.weight)
        return grouped_sigmoid_topk(logits_TE, self.bias_E, self.top_k, *self._groups, *self._scale)


def _checked_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int, fewest: int) -> tuple[int, int]:
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}; it must divide the number of experts, {num_experts}")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups is {topk_groups}; it must be 1 to {num_groups} (the number of groups)")
    size = num_experts // num_groups
    if topk_groups < num_groups and size < fewest:
        raise ValueError(f"num_groups is {num_groups}: a group has {size} expert(s); it must have {fewest} or more")
    if top_k > topk_groups * size:
        raise ValueError(f"top_k is {top_k}; it must be 1 to {topk_groups * size} (the number of experts)")
    return num_groups, topk_groups
