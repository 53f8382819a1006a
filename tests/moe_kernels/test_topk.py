"""Expert choice: every variant equals the reference."""

from __future__ import annotations

import pytest
import torch
from isas import TORCH_AND_ISAS
from rounding import FUNCTION_ULPS, assert_within, bound
from torch import Tensor

from moe_kernels import grouped_sigmoid_topk, grouped_softmax_topk, reference, softmax_topk
from native import Isa, limit_isa


def assert_same_choice(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], num_experts: int) -> None:
    """Same experts with the same weights; a token's experts come in any order."""
    for expert_TK, weight_TK in (ours, theirs):
        assert expert_TK.dtype == torch.int64 and weight_TK.dtype == torch.float32
    (our_ids, our_order), (their_ids, their_order) = ours[0].sort(-1), theirs[0].sort(-1)
    assert torch.equal(our_ids, their_ids)
    weight_TK = theirs[1].gather(1, their_order)
    # A weight is a function of one logit, divided by a sum over all experts at most.
    assert_within(ours[1].gather(1, our_order), weight_TK, bound(num_experts + FUNCTION_ULPS, weight_TK))


def distinct_logits(num_tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Random, but no two of a token equal even in bfloat16: among equals any choice is right."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    ranks = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)])
    return ((ranks - num_experts // 2) * (6 / num_experts)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 1), (16, 4), (128, 8), (5, 5)])
def test_softmax(num_experts: int, top_k: int, renormalize: bool, dtype: torch.dtype) -> None:
    logits_TE = distinct_logits(33, num_experts, dtype)
    ours = softmax_topk(logits_TE, top_k, renormalize)
    assert_same_choice(ours, reference.softmax_topk(logits_TE, top_k, renormalize), num_experts)
    if renormalize:
        torch.testing.assert_close(ours[1].sum(-1), torch.ones(33))


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "topk_groups"),
    [(16, 4, 4, 2), (64, 6, 8, 3), (64, 6, 1, 1), (8, 8, 2, 2), (15, 2, 5, 2)],
)
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("level", TORCH_AND_ISAS)
def test_grouped(level: Isa, num_experts: int, top_k: int, num_groups: int, topk_groups: int, scale: float) -> None:
    limit_isa(level)
    logits_TE = distinct_logits(33, num_experts, torch.float32)
    softmax_args = (logits_TE, top_k, num_groups, topk_groups, scale)
    assert_same_choice(grouped_softmax_topk(*softmax_args), reference.grouped_softmax_topk(*softmax_args), num_experts)
    bias_E = torch.randn(num_experts, generator=torch.Generator().manual_seed(1)) * 0.1
    for renormalize in (False, True):
        sigmoid_args = (logits_TE, bias_E, top_k, num_groups, topk_groups, renormalize, scale)
        assert_same_choice(
            grouped_sigmoid_topk(*sigmoid_args), reference.grouped_sigmoid_topk(*sigmoid_args), num_experts
        )


def test_only_the_best_groups_are_used() -> None:
    logits_TE = torch.tensor([[9.0, -9.0, 5.0, 5.5, 8.0, 7.5]])
    bias_E = torch.zeros(6)
    by_best, _ = grouped_softmax_topk(logits_TE, 2, 3, 1, 1.0)
    by_two_best, _ = grouped_sigmoid_topk(logits_TE, bias_E, 2, 3, 1, True, 1.0)
    assert sorted(by_best[0].tolist()) == [0, 1]
    assert sorted(by_two_best[0].tolist()) == [4, 5]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits_TE = torch.zeros(1, 4)
    bias_E = torch.tensor([0.0, 0.0, 3.0, 0.0])
    expert_TK, weight_TK = grouped_sigmoid_topk(logits_TE, bias_E, 1, 1, 1, False, 1.0)
    assert expert_TK.tolist() == [[2]] and weight_TK.tolist() == [[0.5]]


def test_no_tokens() -> None:
    empty = torch.empty(0, 16)
    for expert_TK, weight_TK in (
        softmax_topk(empty, 4, True),
        softmax_topk(empty, 4, False),
        grouped_softmax_topk(empty, 4, 4, 2, 2.0),
        grouped_sigmoid_topk(empty, torch.zeros(16), 4, 4, 2, True, 2.0),
    ):
        assert expert_TK.shape == weight_TK.shape == (0, 4)
