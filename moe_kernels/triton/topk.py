# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Which experts a token goes to, in Triton: moe_kernels/topk.py in one launch.

Legend: T tokens, K experts per token, E logical experts, G groups of experts, N = E / G experts of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ONE_WARP = 512  # experts, up to which one warp chooses alone, without the others' results through shared memory


@triton.jit
def _take_best(score, index, taken: tl.constexpr):
    """(place of the largest, score without it); of equal ones the first."""
    best = tl.argmax(score, 0)
    return best, tl.where(index == best, taken, score)


@triton.jit
def _keep_groups(score, SIGMOID: tl.constexpr, TOPK_GROUPS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """score [GROUPS, SIZE] with -inf in all but the best groups. A group counts as much as its best expert, or, with
    SIGMOID, as its two best together."""
    low = float("-inf")
    group = tl.max(score, 1)
    if SIGMOID:
        second = tl.where(tl.arange(0, SIZE)[None, :] == tl.argmax(score, 1)[:, None], low, score)
        group += tl.max(second, 1)
    group_index = tl.arange(0, GROUPS)
    kept = tl.zeros((GROUPS,), tl.int1)
    for _ in tl.static_range(TOPK_GROUPS):
        best, group = _take_best(group, group_index, low)
        kept |= group_index == best
    return tl.where(kept[:, None], score, low)


@triton.jit
def _topk_kernel(
    logits_ptr, bias_ptr, expert_ptr, weight_ptr, num_experts, group_size, num_groups, scale, SIGMOID: tl.constexpr,
    TOPK_GROUPS: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One token. Scores are softmax over all experts or, with SIGMOID, sigmoid; TOPK_GROUPS 0: no groups."""
    low = float("-inf")
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    there = (group < num_groups) & (member < group_size)
    expert = group * group_size + member
    logits = tl.load(logits_ptr + token * num_experts + expert, mask=there, other=low).to(tl.float32)
    if SIGMOID:
        score = tl.where(there, tl.sigmoid(logits), 0.0)
        choice = score + tl.load(bias_ptr + expert, mask=there, other=0.0)
    else:
        power = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        score = power / tl.sum(tl.sum(power, 1), 0)
        choice = score
    # Nothing that is not a number is chosen before what is.
    choice = tl.where(there & (choice == choice), choice, low)
    if TOPK_GROUPS > 0:
        choice = _keep_groups(choice, SIGMOID, TOPK_GROUPS, GROUPS, SIZE)
    flat = tl.arange(0, GROUPS * SIZE)
    choice = tl.reshape(choice, (GROUPS * SIZE,))
    score = tl.reshape(score, (GROUPS * SIZE,))
    k = tl.arange(0, triton.next_power_of_2(TOP_K))
    chosen = tl.zeros(k.shape, tl.int64)
    weight = tl.zeros(k.shape, tl.float32)
    for i in tl.static_range(TOP_K):
        best, choice = _take_best(choice, flat, low)
        # With scores that are not numbers the best may be padding: the expert must exist all the same.
        found = tl.minimum(best // SIZE * group_size + best % SIZE, num_experts - 1)
        chosen = tl.where(k == i, found, chosen)
        weight = tl.where(k == i, tl.sum(tl.where(flat == best, score, 0.0), 0), weight)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    place = token * TOP_K + k
    tl.store(expert_ptr + place, chosen, mask=k < TOP_K)
    tl.store(weight_ptr + place, weight * scale, mask=k < TOP_K)


def _topk(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, num_groups: int, topk_groups: int, renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_tokens, num_experts = logits_TE.shape
    assert num_experts % num_groups == 0 and top_k <= num_experts
    grouped = topk_groups < num_groups
    groups = num_groups if grouped else 1
    expert_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    weight_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    if num_tokens:
        _topk_kernel[(num_tokens,)](
            logits_TE.contiguous(), bias_E, expert_TK, weight_TK, num_experts, num_experts // groups, groups, scale,
            SIGMOID=bias_E is not None, TOPK_GROUPS=topk_groups if grouped else 0, TOP_K=top_k, RENORMALIZE=renormalize,
            GROUPS=triton.next_power_of_2(groups), SIZE=triton.next_power_of_2(num_experts // groups),
            num_warps=1 if num_experts <= _ONE_WARP else 4,
        )  # fmt: skip
    return expert_TK, weight_TK


def softmax_topk(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """As moe_kernels.topk.softmax_topk."""
    return _topk(logits_TE, None, top_k, 1, 1, renormalize, 1.0)


def grouped_softmax_topk(
    logits_TE: Tensor, top_k: int, num_groups: int, topk_groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """As moe_kernels.topk.grouped_softmax_topk."""
    return _topk(logits_TE, None, top_k, num_groups, topk_groups, False, scale)


def grouped_sigmoid_topk(
    logits_TE: Tensor, bias_E: Tensor, top_k: int, num_groups: int, topk_groups: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """As moe_kernels.topk.grouped_sigmoid_topk."""
    return _topk(logits_TE, bias_E.contiguous(), top_k, num_groups, topk_groups, renormalize, scale)
