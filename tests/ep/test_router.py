"""Routers choose and weigh exactly as the models of transformers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rounding import FUNCTION_ULPS, assert_within, bound, matmul_bound
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ep.router import DeepseekV2Router, DeepseekV3Router, SoftmaxRouter

D = 48
T = 200


def random_case(num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_experts)
    x_TD = torch.randn(T, D, generator=generator).to(dtype)
    weight_ED = (torch.randn(num_experts, D, generator=generator) * D**-0.5).to(dtype)
    return x_TD, weight_ED, torch.randn(num_experts, generator=generator) * 0.2


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor, Tensor], logit_error: Tensor) -> None:
    """logit_error: of the logits [T, E], by which a weight moves relative to itself (at most twice: it is divided by the
    sum of others)."""
    (our_ids, our_order), (their_ids, their_order) = ours[0].sort(-1), theirs[2].sort(-1)
    our_weights, their_weights = ours[1].gather(1, our_order), theirs[1].gather(1, their_order)
    assert ours[0].dtype == torch.int64 and ours[1].dtype == torch.float32
    assert torch.equal(our_ids, their_ids)
    if their_weights.dtype != torch.float32:
        # transformers rounds the weights; ours, rounded, may fall on the neighbour only where they differ in the last bit.
        torch.testing.assert_close(our_weights.to(their_weights.dtype), their_weights, rtol=2**-7, atol=0)
        assert (our_weights.to(their_weights.dtype) == their_weights).float().mean() > 0.99
    else:
        roundings = bound(logit_error.shape[1] + FUNCTION_ULPS, 1.0)
        assert_within(our_weights, their_weights, their_weights * (2 * logit_error.max() + roundings))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (64, 8)])
def test_qwen3_moe(num_experts: int, top_k: int, norm_topk_prob: bool, dtype: torch.dtype) -> None:
    x_TD, weight_ED, _ = random_case(num_experts, dtype)
    config = Qwen3MoeConfig(
        hidden_size=D, num_experts=num_experts, num_experts_per_tok=top_k, norm_topk_prob=norm_topk_prob
    )
    theirs = Qwen3MoeTopKRouter(config).to(dtype)
    theirs.weight.copy_(weight_ED)
    ours = SoftmaxRouter(D, num_experts, top_k, norm_topk_prob, dtype)
    ours.weight.copy_(weight_ED)
    chosen, reference = ours(x_TD), theirs(x_TD)
    # bfloat16 logits have ties at the edge of the top k, where either choice is right.
    logits_TE = reference[0].float().sort(-1, descending=True).values
    clear = logits_TE[:, top_k - 1] > logits_TE[:, top_k]
    assert clear.float().mean() > (0.99 if dtype is torch.float32 else 0.8)
    assert_same(
        (chosen[0][clear], chosen[1][clear]), tuple(part[clear] for part in reference), matmul_bound(x_TD, weight_ED)
    )


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {"topk_method": "greedy"},
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0},
        {"topk_method": "group_limited_greedy", "n_group": 1, "topk_group": 1},
    ],
)
def test_deepseek_v2(changes: dict[str, Any], dtype: torch.dtype) -> None:
    x_TD, weight_ED, _ = random_case(32, dtype)
    config = DeepseekV2Config(
        hidden_size=D, num_attention_heads=4, n_routed_experts=32, num_experts_per_tok=6, **changes
    )
    theirs = DeepseekV2TopkRouter(config)
    theirs.weight.copy_(weight_ED)
    ours = DeepseekV2Router(
        D, 32, 6, config.topk_method, config.n_group or 1, config.topk_group or 1, config.routed_scaling_factor
    )
    ours.weight.copy_(weight_ED)
    assert_same(ours(x_TD), theirs(x_TD), matmul_bound(x_TD, weight_ED))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2), (8, 4), (4, 4)])
def test_deepseek_v3(n_group: int, topk_group: int, norm_topk_prob: bool, dtype: torch.dtype) -> None:
    x_TD, weight_ED, bias_E = random_case(32, dtype)
    config = DeepseekV3Config(
        hidden_size=D,
        n_routed_experts=32,
        num_experts_per_tok=6,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.5,
    )
    theirs = DeepseekV3TopkRouter(config)
    theirs.weight.copy_(weight_ED)
    theirs.e_score_correction_bias.copy_(bias_E)
    ours = DeepseekV3Router(D, 32, 6, n_group, topk_group, norm_topk_prob, 2.5)
    ours.weight.copy_(weight_ED)
    ours.bias_E.copy_(bias_E)
    assert_same(ours(x_TD), theirs(x_TD), matmul_bound(x_TD, weight_ED))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftmaxRouter(D, 8, 9, True, torch.float32), "top_k is 9; it must be 1 to 8"),
        (lambda: DeepseekV2Router(D, 8, 2, "noaux", 1, 1, 1.0), "topk_method is 'noaux'"),
        (lambda: DeepseekV3Router(D, 8, 2, 3, 1, True, 1.0), "num_groups is 3; it must divide"),
        (lambda: DeepseekV3Router(D, 8, 2, 4, 5, True, 1.0), "topk_groups is 5; it must be 1 to 4"),
        (lambda: DeepseekV3Router(D, 8, 2, 8, 2, True, 1.0), "a group has 1 expert"),
        (lambda: DeepseekV3Router(D, 8, 5, 4, 2, True, 1.0), "top_k is 5; it must be 1 to 4"),
    ],
)
def test_impossible_numbers_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
