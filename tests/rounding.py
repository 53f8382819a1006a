"""How far two results of the same arithmetic may lie apart when their sums are taken in another order.

A bound comes from the terms that are added, never from what one machine showed. Every rounding moves a number
by at most its unit roundoff u (half the dtype's eps) times the number, up or down; those of a sum of n terms
are taken as independent. The partial sums of terms of either sign, x_1 to x_n, are of the size of their norm,
so that the error of the whole has a standard deviation of at most u * sqrt(n) * norm(x), whatever the order.
Sums of sums (matrix after matrix) obey the same with the norm over all elementary products, which is the root
of the same expression over squares.

Legend: T tokens, H query heads, D head size, Q queries of a sequence, L its tokens so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layers import reference
from layers.step import StepInput
from moe_kernels.activation import SILU, Activation

STANDARD_DEVIATIONS = 5.0  # beyond them: not once in a million numbers, and what is called one here is more than one
FUNCTION_ULPS = 4.0  # exp and sigmoid: what a polynomial in the same dtype may lose, in units of u


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff."""
    return torch.finfo(dtype).eps / 2


def bound(terms: float, magnitude: Tensor | float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of the error of a sum of `terms` terms taken in `dtype`. magnitude: the norm of the terms if they are of either
    sign (the sum of their absolute values always will do)."""
    return STANDARD_DEVIATIONS * unit(dtype) * terms**0.5 * torch.as_tensor(magnitude, dtype=torch.float64)


def assert_within(ours: Tensor, wanted: Tensor, allowed: Tensor | float) -> None:
    """Both computed, both within `allowed` of the exact result and then rounded to their own dtype."""
    assert ours.shape == wanted.shape, (ours.shape, wanted.shape)
    assert ours.isfinite().all() and wanted.isfinite().all()
    exact = wanted.double()
    rounding = sum((unit(side.dtype) for side in (ours, wanted)), torch.finfo(torch.float32).tiny)
    limit = 2 * allowed + 1.01 * rounding * torch.maximum(exact.abs(), ours.double().abs())
    excess = (ours.double() - exact).abs() - limit
    if excess.numel() and bool((excess > 0).any()):
        worst = int(excess.argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape)]
        raise AssertionError(
            f"{int((excess > 0).sum())} of {excess.numel()} numbers lie too far apart; the worst at {index}: "
            f"{ours.flatten()[worst].item()!r} and {wanted.flatten()[worst].item()!r}, "
            f"allowed are {torch.as_tensor(limit).expand_as(exact).flatten()[worst].item():.3g}"
        )


def matmul_bound(x: Tensor, w: Tensor, bias: Tensor | None = None, weights: torch.dtype | None = None) -> Tensor:
    """Of x @ w.T + bias with sums in float32. weights: what w may be rounded to before."""
    squares = x.double().square() @ w.double().square().T
    if bias is not None:
        squares += bias.double().square()
    of_sums = bound(x.shape[1] + 1, squares.sqrt())
    return of_sums if weights is None else of_sums + bound(1, squares.sqrt(), weights)


WHOLE, WHOLE_OF_8_BITS = 16256, 127  # the largest of the whole numbers that rows become (native/src/experts.h)


def whole_rows_bound(x: Tensor, w: Tensor, largest: int = WHOLE) -> Tensor:
    """Of x @ w.T where 32 numbers of a row are rounded to whole numbers times a scale, up to `largest`."""
    most = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).abs().amax(2)
    half_step = most.repeat_interleave(32, 1)[:, : x.shape[1]] / (2 * largest)
    return STANDARD_DEVIATIONS * (half_step.square() @ w.double().square().T).sqrt()


def attention_bound(
    score_HQL: Tensor,
    score_error_HQL: Tensor,
    value_HLD: Tensor,
    square_HLD: Tensor,
    value_terms: float,
    weight_dtype: torch.dtype,
) -> Tensor:
    """Of softmax(score) @ value, float64 [H, Q, D]. Scores that nothing may see are -inf.

    score_error: of the scores; square: the squares of the values, or of the products that they are sums of;
    value_terms: how many numbers are added for one of the result; weight_dtype: the weights are rounded to it
    before they are added.
    """
    weight_HQL = score_HQL.softmax(-1)
    below_HQL = (score_HQL.amax(-1, keepdim=True) - score_HQL).masked_fill(weight_HQL == 0, 0.0)
    moved_HQL = weight_HQL * (score_error_HQL + unit(torch.float32) * (FUNCTION_ULPS + 2 * below_HQL))
    out_HQD = (weight_HQL @ value_HLD).abs()
    norm_HQD = (weight_HQL.square() @ square_HLD).sqrt()
    # A weight that moves by a share of itself moves the result towards its value, or away from it;
    # each by its own share.
    through_weights = (moved_HQL.square() @ value_HLD.square()).sqrt() + moved_HQL.norm(dim=-1, keepdim=True) * out_HQD
    few = STANDARD_DEVIATIONS
    of_value = torch.minimum(few * norm_HQD, weight_HQL @ value_HLD.abs())
    of_total = out_HQD * (few * weight_HQL.norm(dim=-1, keepdim=True)).clamp(max=1.0)
    rounded_weights = unit(weight_dtype) * (of_value + of_total)
    return (
        through_weights + rounded_weights + bound(value_terms, norm_HQD) + FUNCTION_ULPS * unit(torch.float32) * out_HQD
    )


def paged_attention_bound(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: StepInput,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Of layers.reference.paged_attention, float64 [T, H, D], where sums are taken in float32."""
    bound_THD = torch.zeros(q_THD.shape, dtype=torch.float64)
    repeat = q_THD.shape[1] // k_cache.shape[1]
    for sequence, kv_len in enumerate(step.kv_lens):
        queries = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
        q_HQD = q_THD[queries].double().transpose(0, 1)
        gone = max(0, kv_len - q_HQD.shape[1] + 1 - window) if window else 0
        rows_L = reference.sequence_rows(step, sequence)[gone:]
        k_HLD, v_HLD = (
            cache[rows_L].double().repeat_interleave(repeat, 1).transpose(0, 1) for cache in (k_cache, v_cache)
        )
        position_L = torch.arange(gone, kv_len)
        position_Q = torch.arange(kv_len)[kv_len - q_HQD.shape[1] :]
        hidden_QL = position_L > position_Q[:, None]
        if window:
            hidden_QL |= position_L <= position_Q[:, None] - window
        score_HQL = (scale * (q_HQD @ k_HLD.mT)).masked_fill(hidden_QL, -torch.inf)
        norm_HQL = scale * (q_HQD.square() @ k_HLD.square().mT).sqrt()
        error_HQL = bound(q_HQD.shape[2] + 2, norm_HQL)
        if sinks_H is not None:  # a key whose value is zero
            sink_HQ1 = sinks_H.double()[:, None, None].expand(-1, q_HQD.shape[1], 1)
            score_HQL, error_HQL = torch.cat((score_HQL, sink_HQ1), -1), torch.cat((error_HQL, 0 * sink_HQ1), -1)
            v_HLD = torch.cat((v_HLD, torch.zeros_like(v_HLD[:, :1])), 1)
        of_sequence = attention_bound(score_HQL, error_HQL, v_HLD, v_HLD.square(), kv_len + 2, q_THD.dtype)
        bound_THD[queries] = of_sequence.transpose(0, 1)
    return bound_THD


def mla_bound(tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], step: StepInput, scale: float) -> Tensor:
    """Of mla.reference, float64 [T, H, V], whichever matrices are multiplied first. tensors: as it takes them."""
    q_nope_THN, q_pe_THP, cache_RX, w_uk_HNC, w_uv_HVC = tensors
    latent_dim = w_uk_HNC.shape[2]
    bound_THV = torch.zeros((*q_nope_THN.shape[:2], w_uv_HVC.shape[1]), dtype=torch.float64)
    for sequence, kv_len in enumerate(step.kv_lens):
        row_LX = cache_RX[reference.sequence_rows(step, sequence)].double()
        latent_LC, k_pe_LP = row_LX[:, :latent_dim], row_LX[:, latent_dim:]
        queries = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
        position_Q = torch.arange(kv_len)[kv_len - (queries.stop - queries.start) :]

        def scores(
            power: int, queries: slice = queries, latent_LC: Tensor = latent_LC, k_pe_LP: Tensor = k_pe_LP
        ) -> Tensor:
            q_nope, q_pe = q_nope_THN[queries].double() ** power, q_pe_THP[queries].double() ** power
            q_latent_HQC = torch.einsum("qhn,hnc->hqc", q_nope, w_uk_HNC.double() ** power)
            return q_latent_HQC @ (latent_LC**power).T + q_pe.transpose(0, 1) @ (k_pe_LP**power).T

        score_HQL = (scale * scores(1)).masked_fill(torch.arange(kv_len) > position_Q[:, None], -torch.inf)
        error_HQL = bound(w_uk_HNC.shape[1] + row_LX.shape[1] + 2, scale * scores(2).sqrt())
        # What is rounded on the way in a narrower dtype: queries or keys, values or sums of latents.
        if q_nope_THN.dtype is not torch.float32:
            error_HQL = error_HQL + bound(2, scale * scores(2).sqrt(), q_nope_THN.dtype)
        value_HLV = latent_LC @ w_uv_HVC.double().mT
        square_HLV = latent_LC.square() @ w_uv_HVC.double().square().mT
        bound_HQV = attention_bound(
            score_HQL, error_HQL, value_HLV, square_HLV, kv_len + latent_dim + 2, q_nope_THN.dtype
        )
        if q_nope_THN.dtype is not torch.float32:
            bound_HQV = bound_HQV + bound(2, (score_HQL.softmax(-1).square() @ square_HLV).sqrt(), q_nope_THN.dtype)
        bound_THV[queries] = bound_HQV.transpose(0, 1)
    return bound_THV


def expert_bound(
    x_RD: Tensor,
    gate_FD: Tensor,
    up_FD: Tensor,
    down_DF: Tensor,
    dtype: torch.dtype,
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
    activation: Activation = SILU,
    weights: torch.dtype | None = None,
    whole: tuple[int | None, int | None] = (None, None),
) -> Tensor:
    """Of moe_kernels.reference.expert, float64 [R, D], with sums in float32 and what lies between the matrices in
    `dtype`. biases: of gate, up and down. weights: what the matrices may be rounded to before. whole: where rows are
    rounded to whole numbers, the largest of them: of the first matrices' rows, and of the last one's."""
    x_RD, gate_FD, up_FD, down_DF = (tensor.double() for tensor in (x_RD, gate_FD, up_FD, down_DF))
    gate_F, up_F, down_D = (None, None, None) if biases is None else (bias.double() for bias in biases)
    gate_RF = torch.nn.functional.linear(x_RD, gate_FD, gate_F).clamp(max=activation.limit)
    up_RF = torch.nn.functional.linear(x_RD, up_FD, up_F).clamp(-activation.limit, activation.limit)
    gated_RF, factor_RF = gate_RF * (activation.alpha * gate_RF).sigmoid(), up_RF + activation.offset
    of_gate_RF, of_up_RF = matmul_bound(x_RD, gate_FD, gate_F, weights), matmul_bound(x_RD, up_FD, up_F, weights)
    if whole[0] is not None:
        of_gate_RF += whole_rows_bound(x_RD, gate_FD, whole[0])
        of_up_RF += whole_rows_bound(x_RD, up_FD, whole[0])
    # No slope of silu is steeper than 1.1, whatever alpha.
    error_RF = 1.1 * factor_RF.abs() * of_gate_RF + gated_RF.abs() * of_up_RF
    ulps_RF = FUNCTION_ULPS + (activation.alpha * gate_RF).abs() * (activation != SILU)
    error_RF += (ulps_RF * unit(torch.float32) + unit(dtype)) * (gated_RF * factor_RF).abs()
    of_down_RD = matmul_bound(gated_RF * factor_RF, down_DF, down_D, weights)
    if whole[1] is not None:
        of_down_RD += whole_rows_bound(gated_RF * factor_RF, down_DF, whole[1])
    return error_RF @ down_DF.abs().T + of_down_RD
