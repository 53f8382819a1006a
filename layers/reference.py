"""What the fast layers must equal, written as plainly as possible.

Legend: T tokens, H query heads, Hkv key/value heads, D head size, L tokens of a sequence so far.
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
        first, last = step.query_starts[sequence], step.query_starts[sequence + 1]
        for token in range(first, last):
            seen = kv_len - (last - 1 - token)
            score_HL = torch.einsum("hd,lhd->hl", q_THD[token].float(), k_LHD[:seen]) * scale
            out_THD[token] = torch.einsum("hl,lhd->hd", score_HL.softmax(-1), v_LHD[:seen]).to(q_THD.dtype)
    return out_THD


def apply_rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool) -> Tensor:
    """Rotation of each plane as a complex number."""
    x = x_THD.reshape(*x_THD.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
    x = x if interleaved else x.transpose(-1, -2)
    turned = torch.view_as_complex(x.contiguous()) * torch.complex(cos_TR, sin_TR)[:, None]
    out = torch.view_as_real(turned)
    return out.flatten(-2) if interleaved else out.transpose(-1, -2).flatten(-2)
