"""MLA decode by FlashMLA (github.com/deepseek-ai/FlashMLA, 1.0; Hopper, bfloat16, blocks of 64 tokens); prompts go the
way that mla/backend.py would choose without it.

Legend: T tokens of the step, B sequences with one query each, H heads; N, P, C, X, V widths (mla/protocol.py), R rows
of the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from layers.optional import load
from layers.step import StepInput
from mla.protocol import MlaBackend, MlaShape, PreparedStep
from mla.requirements import FLASHMLA_BLOCK, PIP


class FlashMla:
    """Implements mla.protocol.MlaBackend. Raises ImportError that names the line to type where it is not installed."""

    def __init__(self, shape: MlaShape, scale: float, rest: MlaBackend) -> None:
        """rest: what prompts are left to."""
        self.library: Any = load("flash_mla", PIP["flashmla"])
        self.shape, self.scale = shape, scale
        self.rest = rest

    def prepare(self, step: StepInput) -> FlashMlaStep:
        """ValueError where the cache's blocks are not of 64 tokens."""
        if step.block_size != FLASHMLA_BLOCK:
            raise ValueError(f"FlashMLA needs a block_size of {FLASHMLA_BLOCK}, not {step.block_size}")
        rest = self.rest.prepare(_without_decodes(step)) if step.num_decodes < step.num_sequences else None
        return FlashMlaStep(self, step, rest)


class FlashMlaStep:
    """Implements mla.protocol.PreparedStep. rest: the attention of all sequences but the decodes; None: there are
    none."""

    def __init__(self, backend: FlashMla, step: StepInput, rest: PreparedStep | None) -> None:
        n = step.num_decodes
        self._backend, self._rest, self._num_decodes = backend, rest, n
        self._table = step.block_table_BN[:n].to(torch.int32)
        self._lens = step.kv_lens_B[:n].to(torch.int32)
        self._schedule = backend.library.get_mla_metadata()[0]  # filled by the first layer, read by the others

    def __call__(
        self, q_nope_THN: Tensor, q_pe_THP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        n = self._num_decodes
        weights = cache_RX, w_uk_HNC, w_uv_HVC
        if n == 0 and self._rest is not None:
            return self._rest(q_nope_THN, q_pe_THP, *weights)
        if n == 0:
            return q_nope_THN.new_empty(0, *w_uv_HVC.shape[:2])
        out_BHV = self._decode(q_nope_THN[:n], q_pe_THP[:n], *weights)
        return (
            out_BHV if self._rest is None else torch.cat([out_BHV, self._rest(q_nope_THN[n:], q_pe_THP[n:], *weights)])
        )

    def _decode(
        self, q_nope_BHN: Tensor, q_pe_BHP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        shape = self._backend.shape
        q_latent_BHC = torch.bmm(q_nope_BHN.transpose(0, 1), w_uk_HNC).transpose(0, 1)
        mixed_B1HC, _ = self._backend.library.flash_mla_with_kvcache(
            torch.cat([q_latent_BHC, q_pe_BHP], -1)[:, None],
            cache_RX.view(-1, FLASHMLA_BLOCK, 1, shape.cache_dim),
            self._table,
            self._lens,
            shape.latent_dim,
            self._schedule,
            softmax_scale=self._backend.scale,
            causal=True,
        )
        return torch.bmm(mixed_B1HC[:, 0].transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)


def _without_decodes(step: StepInput) -> StepInput:
    """The sequences after the decodes as a step of their own."""
    n = step.num_decodes
    return replace(
        step,
        token_ids_T=step.token_ids_T[n:],
        positions_T=step.positions_T[n:],
        slots_T=step.slots_T[n:],
        query_starts=tuple(start - n for start in step.query_starts[n:]),
        kv_lens=step.kv_lens[n:],
        kv_lens_B=step.kv_lens_B[n:],
        block_table_BN=step.block_table_BN[n:],
        num_decodes=0,
    )
