"""Plain torch: what every other file of this room must compute, written to be read. The oracle of the tests.

Legend: T tokens, D hidden size, K experts per token, E logical experts, S slots, R rows, C rows per padded slot,
F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.layout import ExpertBatch, Layout
from moe_kernels.quant import BLOCK, dequantize_rows, quantize_rows


def softmax_topk(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The K likeliest experts of each token and their probabilities (Qwen3-MoE).

    Returns (expert int64 [T, K], weight float32 [T, K]); renormalize: weights of a token sum to 1.
    """
    weight_TK, expert_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(top_k)
    if renormalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return expert_TK, weight_TK


def grouped_softmax_topk(
    logits_TE: Tensor, top_k: int, num_groups: int, topk_groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """As softmax_topk, from the groups of experts with the highest best probability (DeepSeek-V2, arXiv:2405.04434).

    Weights are the probabilities over all experts times `scale`, not renormalised.
    """
    probability_TE = logits_TE.softmax(-1, dtype=torch.float32)
    group_TG = torch.stack(probability_TE.chunk(num_groups, 1), 1).amax(-1)
    chosen_TE = _keep_groups(probability_TE, group_TG, topk_groups, 0.0)
    weight_TK, expert_TK = chosen_TE.topk(top_k)
    return expert_TK, weight_TK * scale


def grouped_sigmoid_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sigmoid scores; the bias takes part in the choice only (DeepSeek-V3, arXiv:2412.19437).

    A group's score is the sum of its two best biased scores.
    """
    score_TE = logits_TE.float().sigmoid()
    biased_TE = score_TE + bias_E
    group_TG = torch.stack(biased_TE.chunk(num_groups, 1), 1).topk(2).values.sum(-1)
    expert_TK = _keep_groups(biased_TE, group_TG, topk_groups, float("-inf")).topk(top_k).indices
    weight_TK = score_TE.gather(1, expert_TK)
    if renormalize:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
    return expert_TK, weight_TK * scale


def _keep_groups(score_TE: Tensor, group_TG: Tensor, topk_groups: int, fill: float) -> Tensor:
    kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    kept_TG.scatter_(1, group_TG.topk(topk_groups).indices, True)
    size = score_TE.shape[1] // group_TG.shape[1]
    return score_TE.masked_fill(~kept_TG.repeat_interleave(size, 1), fill)


def permute(x_TD: Tensor, slot_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """One row per (token, k) whose slot is here (0 <= slot < num_slots), sorted by slot, in token order within a slot.

    Returns (x [R, D], rows int32 [S], pair int64 [R]): pair says which flat (token, k) a row is.
    """
    pairs = [
        pair for slot in range(num_slots) for pair, wanted in enumerate(slot_TK.flatten().tolist()) if wanted == slot
    ]
    pair_R = torch.tensor(pairs, dtype=torch.int64)
    rows_S = torch.stack([(slot_TK == slot).sum() for slot in range(num_slots)]).to(torch.int32)
    return x_TD[pair_R // slot_TK.shape[1]], rows_S, pair_R


def unpermute(y_RD: Tensor, pair_R: Tensor, weight_TK: Tensor, out_TD: Tensor) -> Tensor:
    """out_TD = for each token the weighted sum of its rows, in float32, then in out's dtype."""
    sum_TD = torch.zeros(out_TD.shape, dtype=torch.float32)
    for row, pair in enumerate(pair_R.tolist()):
        token, k = divmod(pair, weight_TK.shape[1])
        sum_TD[token] += weight_TK[token, k] * y_RD[row].float()
    return out_TD.copy_(sum_TD)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2F] -> [..., F]: silu(first half) * second half."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """[..., 2F] -> [..., F]: both clamped, then gate * sigmoid(alpha * gate) * (up + offset)."""
    if activation == SILU:  # the same, but for rounding
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * (activation.alpha * gate).sigmoid() * (up + activation.offset)


def expert(
    x_RD: Tensor,
    gate_up_2FD: Tensor,
    down_DF: Tensor,
    gate_up_bias_2F: Tensor | None = None,
    down_bias_D: Tensor | None = None,
    activation: Activation = SILU,
) -> Tensor:
    """One expert: [R, D] -> [R, D]."""
    return F.linear(gated(F.linear(x_RD, gate_up_2FD, gate_up_bias_2F), activation), down_DF, down_bias_D)


def experts(
    batch: ExpertBatch,
    gate_up_S2FD: Tensor,
    down_SDF: Tensor,
    gate_up_bias_S2F: Tensor | None = None,
    down_bias_SD: Tensor | None = None,
    activation: Activation = SILU,
) -> Tensor:
    """Every slot's expert on its rows; the result has the layout of batch.x. Rows past a padded slot's count are 0."""
    y = torch.zeros_like(batch.x)
    start = 0
    for slot, rows in enumerate(batch.rows_S.tolist()):
        x, out = (batch.x, y) if batch.layout is Layout.RAGGED else (batch.x[slot], y[slot])
        first = start if batch.layout is Layout.RAGGED else 0
        gate_up_bias, down_bias = (None if bias is None else bias[slot] for bias in (gate_up_bias_S2F, down_bias_SD))
        matrices = gate_up_S2FD[slot], down_SDF[slot]
        out[first : first + rows] = expert(x[first : first + rows], *matrices, gate_up_bias, down_bias, activation)
        start += rows
    return y


def dequantize_blocks(value_SOI: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn [S, O, I], one scale for 128 x 128 numbers, float32 [S, ceil(O / 128), ceil(I / 128)] ->
    float32."""
    num_outputs, num_inputs = value_SOI.shape[1:]
    scale_SOI = scale.repeat_interleave(BLOCK, 1)[:, :num_outputs].repeat_interleave(BLOCK, 2)[..., :num_inputs]
    return value_SOI.float() * scale_SOI


def experts_fp8(
    batch: ExpertBatch, gate_up_S2FD: Tensor, gate_up_scale: Tensor, down_SDF: Tensor, down_scale: Tensor
) -> Tensor:
    """As `experts`, with weights in FP8: bfloat16. Rows that are not in FP8 and what stands between the two products
    are rounded to it. gate_up_scale [S, 2 * ceil(F / 128), ceil(D / 128)]: the blocks of gate, then those of up."""
    x, scale = quantize_rows(batch.x.flatten(0, -2)) if batch.scale is None else (batch.x, batch.scale)
    plain = ExpertBatch(batch.layout, dequantize_rows(x, scale, torch.float32).view(batch.x.shape), batch.rows_S)
    halves = zip(gate_up_S2FD.chunk(2, 1), gate_up_scale.chunk(2, 1), strict=True)
    gate_SFD, up_SFD = (dequantize_blocks(value, scale) for value, scale in halves)
    down = dequantize_blocks(down_SDF, down_scale)
    y = torch.zeros(batch.x.shape, dtype=torch.bfloat16)
    starts_S = batch.rows_S.cumsum(0) - batch.rows_S
    for slot, (start, rows) in enumerate(zip(starts_S.tolist(), batch.rows_S.tolist(), strict=True)):
        here = slice(start, start + rows) if batch.layout is Layout.RAGGED else (slot, slice(rows))
        hidden = silu_mul(F.linear(plain.x[here], torch.cat((gate_SFD[slot], up_SFD[slot]))))
        y[here] = F.linear(dequantize_rows(*quantize_rows(hidden), torch.float32), down[slot]).to(torch.bfloat16)
    return y
