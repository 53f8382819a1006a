"""What the fast layers must equal, written as plainly as possible.

Legend: T tokens, H query heads, Hkv key/value heads, D head size, Q queries of a sequence, L its tokens so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layers.step import StepInput


def sequence_rows(step: StepInput, sequence: int) -> Tensor:
    """Rows of the paged cache that hold the tokens of one sequence, in order: int64 [L]."""
    position_L = torch.arange(step.kv_lens[sequence], device=step.block_table_BN.device)
    block_L = step.block_table_BN[sequence, position_L // step.block_size]
    return block_L * step.block_size + position_L % step.block_size


def paged_attention(q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, step: StepInput, scale: float) -> Tensor:
    """Causal attention of every token to its own sequence. Caches [rows, Hkv, D] already hold this step's tokens."""
    out_THD = torch.empty_like(q_THD)
    repeat = q_THD.shape[1] // k_cache.shape[1]
    for sequence, kv_len in enumerate(step.kv_lens):
        rows_L = sequence_rows(step, sequence)
        k_LHD = k_cache[rows_L].repeat_interleave(repeat, dim=1).float()
        v_LHD = v_cache[rows_L].repeat_interleave(repeat, dim=1).float()
        queries = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
        position_Q = torch.arange(kv_len, device=rows_L.device)[kv_len - (queries.stop - queries.start) :]
        future_QL = torch.arange(kv_len, device=rows_L.device) > position_Q[:, None]
        score_HQL = torch.einsum("qhd,lhd->hql", q_THD[queries].float(), k_LHD) * scale
        weight_HQL = score_HQL.masked_fill(future_QL, float("-inf")).softmax(-1)
        out_THD[queries] = torch.einsum("hql,lhd->qhd", weight_HQL, v_LHD).to(q_THD.dtype)
    return out_THD


def apply_rope(x_THD: Tensor, angle_TR: Tensor) -> Tensor:
    """Rotation of each plane, dimensions (r, r + R), as a complex number: float32 in and out."""
    half = x_THD.shape[-1] // 2
    plane = torch.complex(x_THD[..., :half].contiguous(), x_THD[..., half:].contiguous())
    turned = plane * torch.polar(torch.ones_like(angle_TR), angle_TR)[:, None]
    return torch.cat((turned.real, turned.imag), -1)
