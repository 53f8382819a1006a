"""A fake of FlashMLA 1.0 for the CPU: its dense decode, bfloat16, blocks of 64 tokens.

Legend: B sequences, Q queries of each, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class FlashMLASchedMeta:
    """Filled by the first call; later ones must be for the same shapes."""

    shape: tuple[int, ...] | None = None


def get_mla_metadata(*_: object) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta, num_splits: None = None, softmax_scale: float | None = None,
    causal: bool = False, is_fp8_kvcache: bool = False, indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert block_table is not None and cache_seqlens is not None and indices is None and not is_fp8_kvcache
    batch, num_queries, heads, width = q.shape
    assert width == 576 and head_dim_v == 512 and k_cache.shape[1:] == (64, 1, 576)
    assert q.dtype is k_cache.dtype is torch.bfloat16 and q.stride(-1) == 1 and k_cache.is_contiguous()
    assert block_table.dtype is cache_seqlens.dtype is torch.int32 and block_table.shape[0] == batch
    assert num_splits is None and tile_scheduler_metadata.shape in (None, tuple(q.shape))
    tile_scheduler_metadata.shape = tuple(q.shape)
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    out = torch.full((batch, num_queries, heads, 512), float("nan"), dtype=q.dtype)
    lse = torch.empty(batch, heads, num_queries)
    for b, length in enumerate(cache_seqlens.tolist()):
        keys = k_cache[block_table[b, : -(-length // 64)].long()].flatten(0, 2)[:length].float()
        score = torch.einsum("qhx,sx->hqs", q[b].float(), keys) * scale
        if causal:
            last = torch.arange(length - num_queries, length)
            score.masked_fill_(torch.arange(length) > last[:, None], float("-inf"))
        lse[b] = score.logsumexp(-1)
        out[b] = torch.einsum("hqs,sc->qhc", score.softmax(-1), keys[:, :512]).to(q.dtype)
    return out, lse
