"""Which experts a token goes to. Same results as moe_kernels/reference.py in fewer operations.

Legend: T tokens, K experts per token, E logical experts, G groups of experts.
The order of a token's experts is not defined.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from native import fixed_order, routing, rows
from native.linear import linear

MAX_DOT_ROWS = 512  # with more torch's product is the faster one


def router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """[T, D] x [E, D] + [E] -> [T, E], in x's dtype."""
    return linear(x_TD, weight_ED, bias_E)


def router_logits32(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """The same in float32: x of any float dtype, weight float32."""
    few = x_TD.shape[0] <= MAX_DOT_ROWS or fixed_order()
    if few and rows.can_run(x_TD) and x_TD.stride(1) == 1:
        return rows.dots(x_TD, weight_ED)
    return F.linear(x_TD.float(), weight_ED)


def softmax_topk(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] of any float dtype -> (expert int64 [T, K], weight float32 [T, K]).

    Probabilities are taken over all experts, in float32; renormalize: the weights of a token sum to 1.
    """
    if rows.can_run(logits_TE):
        return routing.softmax_topk(logits_TE, top_k, renormalize)
    if renormalize:
        # The probabilities of the chosen ones, made to sum to 1, are a softmax over the chosen ones alone.
        top_TK, expert_TK = logits_TE.topk(top_k, sorted=False)
        return expert_TK, top_TK.softmax(-1, dtype=torch.float32)
    weight_TK, expert_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(top_k, sorted=False)
    return expert_TK, weight_TK


def grouped_softmax_topk(
    logits_TE: Tensor, top_k: int, num_groups: int, topk_groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V2: as softmax_topk without renormalisation, from the `topk_groups` groups with the highest best
    probability; weights times `scale`. num_groups 1: no groups."""
    if logits_TE.dtype is torch.float32 and rows.can_run(logits_TE):
        return routing.grouped_softmax_topk(logits_TE, top_k, num_groups, topk_groups, scale)
    probability_TE = logits_TE.softmax(-1, dtype=torch.float32)
    if topk_groups < num_groups:
        probability_TGE = probability_TE.view(-1, num_groups, logits_TE.shape[1] // num_groups)
        best_TG = probability_TGE.amax(-1)
        kept_TG = torch.zeros_like(best_TG).scatter_(1, best_TG.topk(topk_groups, sorted=False).indices, 1.0)
        probability_TGE.mul_(kept_TG.unsqueeze(-1))
    weight_TK, expert_TK = probability_TE.topk(top_k, sorted=False)
    return expert_TK, weight_TK if scale == 1.0 else weight_TK.mul_(scale)


def biased_softmax_topk(logits_TE: Tensor, bias_E: Tensor, top_k: int, smallest_sum: float) -> tuple[Tensor, Tensor]:
    """ERNIE: softmax of float32 logits; the bias (float32 [E]) takes part in the choice only; weights are divided by
    their sum, or by smallest_sum if that is more."""
    if logits_TE.dtype is torch.float32 and rows.can_run(logits_TE):
        return routing.biased_softmax_topk(logits_TE, bias_E, top_k, smallest_sum)
    score_TE = logits_TE.softmax(-1)
    expert_TK = (score_TE + bias_E).topk(top_k, dim=-1, sorted=False).indices
    weight_TK = score_TE.gather(-1, expert_TK)
    return expert_TK, weight_TK / weight_TK.sum(-1, keepdim=True).clamp_min(smallest_sum)


def grouped_sigmoid_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3: sigmoid scores of float32 logits; the bias (float32 [E]) takes part in the choice only; a group's
    score is the sum of its two best biased scores. num_groups 1: no groups."""
    if logits_TE.dtype is torch.float32 and rows.can_run(logits_TE):
        return routing.grouped_sigmoid_topk(logits_TE, bias_E, top_k, num_groups, topk_groups, renormalize, scale)
    score_TE = logits_TE.sigmoid()
    biased_TE = score_TE + bias_E
    if topk_groups < num_groups:
        biased_TGE = biased_TE.view(-1, num_groups, logits_TE.shape[1] // num_groups)
        best_TG = biased_TGE.topk(2, sorted=False).values.sum(-1)
        barred_TG = torch.full_like(best_TG, float("-inf"))
        barred_TG.scatter_(1, best_TG.topk(topk_groups, sorted=False).indices, 0.0)
        biased_TGE.add_(barred_TG.unsqueeze(-1))
    expert_TK = biased_TE.topk(top_k, sorted=False).indices
    weight_TK = score_TE.gather(1, expert_TK)
    if renormalize:
        return expert_TK, weight_TK.mul_(scale / weight_TK.sum(-1, keepdim=True).add_(1e-20))
    return expert_TK, weight_TK if scale == 1.0 else weight_TK.mul_(scale)
