"""MLA written for reading: the specification, and the oracle of the tests. One sequence at a time, float32 inside.

Legend: T tokens of the step, Q queries of one sequence, S cached tokens of one sequence, H heads, N, P, C, X, V widths
(mla/protocol.py), R rows of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layers.step import StepInput


def naive(
    q_nope_THN: Tensor, q_pe_THP: Tensor, cache_RX: Tensor, step: StepInput, w_uk_HNC: Tensor, w_uv_HVC: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Build keys and values of every head, then attend. Returns [T, H, V]."""
    out_THV = q_nope_THN.new_empty((*q_nope_THN.shape[:2], w_uv_HVC.shape[1]))
    for sequence in range(step.num_sequences):
        queries, latent_SC, k_pe_SP, hidden_QS = _one_sequence(cache_RX, step, sequence, w_uk_HNC.shape[2])
        k_nope_SHN = torch.einsum("sc,hnc->shn", latent_SC, w_uk_HNC.float())
        v_SHV = torch.einsum("sc,hvc->shv", latent_SC, w_uv_HVC.float())
        scores_HQS = torch.einsum("qhn,shn->hqs", q_nope_THN[queries].float(), k_nope_SHN)
        scores_HQS += torch.einsum("qhp,sp->hqs", q_pe_THP[queries].float(), k_pe_SP)
        weights_HQS = (scores_HQS * scale).masked_fill(hidden_QS, -torch.inf).softmax(-1)
        out_THV[queries] = torch.einsum("hqs,shv->qhv", weights_HQS, v_SHV).to(out_THV.dtype)
    return out_THV


def absorbed(
    q_nope_THN: Tensor, q_pe_THP: Tensor, cache_RX: Tensor, step: StepInput, w_uk_HNC: Tensor, w_uv_HVC: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Move W_UK to the queries and W_UV behind the attention; heads share the latents. Returns [T, H, V]."""
    out_THV = q_nope_THN.new_empty((*q_nope_THN.shape[:2], w_uv_HVC.shape[1]))
    for sequence in range(step.num_sequences):
        queries, latent_SC, k_pe_SP, hidden_QS = _one_sequence(cache_RX, step, sequence, w_uk_HNC.shape[2])
        q_latent_QHC = torch.einsum("qhn,hnc->qhc", q_nope_THN[queries].float(), w_uk_HNC.float())
        scores_HQS = torch.einsum("qhc,sc->hqs", q_latent_QHC, latent_SC)
        scores_HQS += torch.einsum("qhp,sp->hqs", q_pe_THP[queries].float(), k_pe_SP)
        weights_HQS = (scores_HQS * scale).masked_fill(hidden_QS, -torch.inf).softmax(-1)
        mixed_QHC = torch.einsum("hqs,sc->qhc", weights_HQS, latent_SC)
        out_THV[queries] = torch.einsum("qhc,hvc->qhv", mixed_QHC, w_uv_HVC.float()).to(out_THV.dtype)
    return out_THV


def _one_sequence(
    cache_RX: Tensor, step: StepInput, sequence: int, latent_dim: int
) -> tuple[slice, Tensor, Tensor, Tensor]:
    """Its tokens in the step, its latents [S, C] and rotated keys [S, P], and which keys each query may not see."""
    queries = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
    length = step.kv_lens[sequence]
    positions_S = torch.arange(length, device=cache_RX.device)
    rows_SX = _rows_of(cache_RX, step, sequence)
    query_positions_Q = torch.arange(length - (queries.stop - queries.start), length, device=cache_RX.device)
    hidden_QS = positions_S > query_positions_Q[:, None]
    return queries, rows_SX[:, :latent_dim], rows_SX[:, latent_dim:], hidden_QS


def _rows_of(cache_RX: Tensor, step: StepInput, sequence: int) -> Tensor:
    """float32 [S, X]."""
    positions_S = torch.arange(step.kv_lens[sequence], device=cache_RX.device)
    blocks_S = step.block_table_BN[sequence][positions_S // step.block_size]
    return cache_RX[blocks_S * step.block_size + positions_S % step.block_size].float()


def sparse(
    q_nope_THN: Tensor, q_pe_THP: Tensor, index_q_THI: Tensor, index_weight_TH: Tensor, cache_RX: Tensor,
    index_cache_RI: Tensor, step: StepInput, w_uk_HNC: Tensor, w_uv_HVC: Tensor, scale: float, topk: int,
) -> Tensor:  # fmt: skip
    """`naive` over the keys that the indexer chooses for each query (mla/index.py). Returns [T, H, V]."""
    out_THV = q_nope_THN.new_empty((*q_nope_THN.shape[:2], w_uv_HVC.shape[1]))
    for sequence in range(step.num_sequences):
        queries, latent_SC, k_pe_SP, hidden_QS = _one_sequence(cache_RX, step, sequence, w_uk_HNC.shape[2])
        keys_SI = _rows_of(index_cache_RI, step, sequence)
        dots_QHS = torch.einsum("qhi,si->qhs", index_q_THI[queries].float(), keys_SI).relu()
        index_scores_QS = torch.einsum("qh,qhs->qs", index_weight_TH[queries], dots_QHS)
        index_scores_QS.masked_fill_(hidden_QS, -torch.inf)
        order_QS = index_scores_QS.sort(dim=-1, descending=True, stable=True).indices
        hidden_QS = hidden_QS.clone().scatter_(1, order_QS[:, topk:], True)
        k_nope_SHN = torch.einsum("sc,hnc->shn", latent_SC, w_uk_HNC.float())
        v_SHV = torch.einsum("sc,hvc->shv", latent_SC, w_uv_HVC.float())
        scores_HQS = torch.einsum("qhn,shn->hqs", q_nope_THN[queries].float(), k_nope_SHN)
        scores_HQS += torch.einsum("qhp,sp->hqs", q_pe_THP[queries].float(), k_pe_SP)
        weights_HQS = (scores_HQS * scale).masked_fill(hidden_QS, -torch.inf).softmax(-1)
        out_THV[queries] = torch.einsum("hqs,shv->qhv", weights_HQS, v_SHV).to(out_THV.dtype)
    return out_THV
