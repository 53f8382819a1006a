"""MLA by FlashInfer's BatchMLAPagedAttentionWrapper (0.6.18; 0.7.2 takes the same calls, with a warning): prompts and
decodes of a step in one call, all of them absorbed.

Legend: T tokens of the step, B sequences, N blocks per sequence, H heads; N, P, C, X, V widths (mla/protocol.py), R
rows of the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layers.optional import load
from layers.step import StepInput
from mla.protocol import MlaShape
from mla.requirements import PIP

_WORKSPACE_BYTES = 128 << 20


class FlashInferMla:
    """Implements mla.protocol.MlaBackend. Raises ImportError that names the line to type where it is not installed."""

    def __init__(self, shape: MlaShape, scale: float, dtype: torch.dtype, device: torch.device) -> None:
        library: Any = load("flashinfer.mla", PIP["flashinfer"])
        self._shape, self._scale, self._dtype = shape, scale, dtype
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend="auto")

    def prepare(self, step: StepInput) -> FlashInferMlaStep:
        """The wrapper has one plan: a step is prepared when the one before it is through."""
        device, size = step.slots_T.device, step.block_size
        pages = [-(-length // size) for length in step.kv_lens]
        width = step.block_table_BN.shape[1]
        places = [b * width + page for b, count in enumerate(pages) for page in range(count)]
        page_starts = [0]
        for count in pages:
            page_starts.append(page_starts[-1] + count)
        table = step.block_table_BN.flatten().index_select(0, torch.tensor(places, dtype=torch.int64, device=device))
        if step.num_tokens:
            # What is read on the host stays there: the wrapper would fetch it back.
            self._wrapper.plan(
                qo_indptr=torch.tensor(step.query_starts, dtype=torch.int32),
                kv_indptr=torch.tensor(page_starts, dtype=torch.int32),
                kv_indices=table.to(torch.int32),
                kv_len_arr=torch.tensor(step.kv_lens, dtype=torch.int32),
                num_heads=self._shape.num_heads,
                head_dim_ckv=self._shape.latent_dim,
                head_dim_kpe=self._shape.qk_rope_head_dim,
                page_size=size,
                causal=True,
                sm_scale=self._scale,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        return FlashInferMlaStep(self._wrapper, self._shape, size)


class FlashInferMlaStep:
    """Implements mla.protocol.PreparedStep."""

    def __init__(self, wrapper: Any, shape: MlaShape, block_size: int) -> None:
        self._wrapper, self._shape, self._block_size = wrapper, shape, block_size

    def __call__(
        self, q_nope_THN: Tensor, q_pe_THP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        if not q_nope_THN.shape[0]:
            return q_nope_THN.new_empty(0, self._shape.num_heads, self._shape.v_head_dim)
        q_latent_THC = torch.bmm(q_nope_THN.transpose(0, 1), w_uk_HNC).transpose(0, 1).contiguous()
        pages = cache_RX.view(-1, self._block_size, self._shape.cache_dim)
        latents, keys = pages[..., : self._shape.latent_dim], pages[..., self._shape.latent_dim :]
        mixed_THC = self._wrapper.run(
            q_nope=q_latent_THC, q_pe=q_pe_THP.contiguous(), ckv_cache=latents, kpe_cache=keys
        )
        return torch.bmm(mixed_THC.transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)
