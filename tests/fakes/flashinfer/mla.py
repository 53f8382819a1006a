"""A fake of flashinfer.mla (0.6) for the CPU: latents of 512 numbers and keys of 64, in pages.

Legend: N queries, H heads, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer: Tensor, use_cuda_graph: bool = False, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype is torch.uint8 and float_workspace_buffer.numel() >= 128 << 20
        self._planned = False

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, num_heads: int,
        head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: torch.dtype,
        kv_data_type: torch.dtype, use_profiler: bool = False,
    ) -> None:  # fmt: skip
        assert all(t.dtype is torch.int32 and t.dim() == 1 for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        assert q_data_type in (torch.bfloat16, torch.float16) and kv_data_type is q_data_type
        pages = kv_indptr.diff()
        assert torch.equal(pages, -(-kv_len_arr // page_size).to(torch.int32)) and kv_indptr[-1] == len(kv_indices)
        self._queries, self._pages = qo_indptr.tolist(), kv_indptr.tolist()
        self._indices, self._lens = kv_indices.long(), kv_len_arr.tolist()
        self._heads, self._size, self._causal, self._scale = num_heads, page_size, causal, sm_scale
        self._dtype, self._planned = q_data_type, True

    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False,
    ) -> Tensor:  # fmt: skip
        assert self._planned, "plan comes first"
        num = self._queries[-1]
        assert q_nope.shape == (num, self._heads, 512) and q_pe.shape == (num, self._heads, 64)
        assert q_nope.is_contiguous() and q_pe.is_contiguous()
        assert all(t.dtype is self._dtype for t in (q_nope, q_pe, ckv_cache, kpe_cache))
        assert ckv_cache.shape[1:] == (self._size, 512) and kpe_cache.shape[1:] == (self._size, 64)
        result = torch.full((num, self._heads, 512), float("nan"), dtype=self._dtype)
        for b, length in enumerate(self._lens):
            pages = self._indices[self._pages[b] : self._pages[b + 1]]
            latent = ckv_cache[pages].flatten(0, 1)[:length].float()
            key = kpe_cache[pages].flatten(0, 1)[:length].float()
            rows = slice(self._queries[b], self._queries[b + 1])
            score = torch.einsum("nhc,sc->hns", q_nope[rows].float(), latent)
            score = (score + torch.einsum("nhp,sp->hns", q_pe[rows].float(), key)) * self._scale
            if self._causal:
                last = torch.arange(length - (rows.stop - rows.start), length)
                score.masked_fill_(torch.arange(length) > last[:, None], float("-inf"))
            result[rows] = torch.einsum("hns,sc->nhc", score.softmax(-1), latent).to(self._dtype)
        return result
