"""What the fast layers must equal, written as plainly as possible.

Legend: T tokens, H query heads, Hkv key/value heads, D head size, Q queries of a sequence, L its tokens so far; of the
gated delta rule K the width of a key, V that of a value, W the taps of its convolution, C its channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layers.step import StepInput


def sequence_rows(step: StepInput, sequence: int) -> Tensor:
    """Rows of the paged cache that hold the tokens of one sequence, in order: int64 [L]."""
    position_L = torch.arange(step.kv_lens[sequence], device=step.block_table_BN.device)
    block_L = step.block_table_BN[sequence, position_L // step.block_size]
    return block_L * step.block_size + position_L % step.block_size


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: StepInput,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of every token to its own sequence. Caches [rows, Hkv, D] already hold this step's tokens.

    window: keys that a query sees, its own included; 0: all. Rows behind it are not looked at. sinks: of each head a
    score of no key, which takes part in the softmax and has no value (gpt-oss, arXiv:2309.17453).
    """
    out_THD = torch.empty_like(q_THD)
    repeat = q_THD.shape[1] // k_cache.shape[1]
    for sequence, kv_len in enumerate(step.kv_lens):
        queries = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
        num_queries = queries.stop - queries.start
        gone = max(0, kv_len - num_queries + 1 - window) if window else 0
        rows_L = sequence_rows(step, sequence)[gone:]
        k_LHD = k_cache[rows_L].repeat_interleave(repeat, dim=1).float()
        v_LHD = v_cache[rows_L].repeat_interleave(repeat, dim=1).float()
        position_L = torch.arange(gone, kv_len, device=rows_L.device)
        position_Q = torch.arange(kv_len - num_queries, kv_len, device=rows_L.device)
        hidden_QL = position_L > position_Q[:, None]
        if window:
            hidden_QL |= position_L <= position_Q[:, None] - window
        score_HQL = torch.einsum("qhd,lhd->hql", q_THD[queries].float(), k_LHD) * scale
        score_HQL = score_HQL.masked_fill(hidden_QL, float("-inf"))
        if sinks_H is not None:
            sink_HQ1 = sinks_H.float()[:, None, None].expand(-1, num_queries, 1)
            score_HQL = torch.cat((score_HQL, sink_HQ1), -1)
        weight_HQL = score_HQL.softmax(-1)[..., : kv_len - gone]
        out_THD[queries] = torch.einsum("hql,lhd->qhd", weight_HQL, v_LHD).to(q_THD.dtype)
    return out_THD


def apply_rope(x_THD: Tensor, angle_TR: Tensor) -> Tensor:
    """Rotation of each plane, dimensions (r, r + R), as a complex number: float32 in and out."""
    half = x_THD.shape[-1] // 2
    plane = torch.complex(x_THD[..., :half].contiguous(), x_THD[..., half:].contiguous())
    turned = plane * torch.polar(torch.ones_like(angle_TR), angle_TR)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def causal_convolution(x_TC: Tensor, tail: Tensor, weight_WC: Tensor) -> tuple[Tensor, Tensor]:
    """silu of the sum of each channel's last W inputs, its own included, each times its weight; float32. tail
    [W - 1, C]: the inputs before the first. Returns it too for what follows."""
    inputs = torch.cat([tail, x_TC])
    taps = weight_WC.shape[0]
    rows = [(inputs[token : token + taps].float() * weight_WC).sum(0) for token in range(x_TC.shape[0])]
    return F.silu(torch.stack(rows)), inputs[x_TC.shape[0] :]


def gated_delta_rule(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, decay_THK: Tensor, beta_TH: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence (arXiv 2412.06464, and 2510.26692 with a decay for each channel of a key), one token after another
    in float32: the state decays, what it holds under the key moves towards the value, and the query reads it.

    decay: what rows of the state are multiplied by, [T, H, K] or [T, H, 1]; beta: how far it moves. Queries and keys
    are as they are multiplied. Returns ([T, H, V], the state behind the last token).
    """
    state, out_THV = state_HKV.float().clone(), torch.empty_like(v_THV, dtype=torch.float32)
    for token in range(q_THK.shape[0]):
        q_HK, k_HK, v_HV = (x[token].float() for x in (q_THK, k_THK, v_THV))
        state *= decay_THK[token][..., None]
        missing_HV = v_HV - torch.einsum("hk,hkv->hv", k_HK, state)
        state += torch.einsum("hk,hv->hkv", k_HK, missing_HV * beta_TH[token][:, None])
        out_THV[token] = torch.einsum("hk,hkv->hv", q_HK, state)
    return out_THV, state
