"""MLA on a GPU: decodes by the Triton kernel, prefills in torch.

Legend: T tokens of the step, H heads; N, P, C, X, V widths (mla/protocol.py), R rows of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layers.step import StepInput
from mla.attention import TorchMla, TorchMlaStep
from mla.protocol import MlaShape, PrefillMode
from mla.triton_configs import DecodeConfig
from mla.triton_decode import decode


class TritonMla:
    """Implements mla.protocol.MlaBackend. scale: what scores are multiplied by; config: instead of the table's."""

    def __init__(
        self,
        shape: MlaShape,
        scale: float,
        prefill: PrefillMode,
        dtype: torch.dtype,
        config: DecodeConfig | None = None,
    ) -> None:
        self.torch_form = TorchMla(shape, scale, prefill, dtype)
        self.config = config

    def prepare(self, step: StepInput) -> TritonMlaStep:
        rest = self.torch_form.prepare(_without_decodes(step)) if step.num_decodes < step.num_sequences else None
        return TritonMlaStep(step, self.torch_form.scale, self.config, rest)


class TritonMlaStep:
    """Implements mla.protocol.PreparedStep. rest: the attention of all sequences but the decodes; None: there are none."""

    def __init__(self, step: StepInput, scale: float, config: DecodeConfig | None, rest: TorchMlaStep | None) -> None:
        self.step, self.scale, self.config, self.rest = step, scale, config, rest

    def __call__(
        self, q_nope_THN: Tensor, q_pe_THP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        n = self.step.num_decodes
        if n == 0 and self.rest is not None:
            return self.rest(q_nope_THN, q_pe_THP, cache_RX, w_uk_HNC, w_uv_HVC)
        out = self._decode(q_nope_THN[:n], q_pe_THP[:n], cache_RX, w_uk_HNC, w_uv_HVC)
        if self.rest is None:
            return out
        return torch.cat([out, self.rest(q_nope_THN[n:], q_pe_THP[n:], cache_RX, w_uk_HNC, w_uv_HVC)])

    def _decode(
        self, q_nope_BHN: Tensor, q_pe_BHP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        step, n = self.step, self.step.num_decodes
        q_latent_BHC = torch.bmm(q_nope_BHN.transpose(0, 1), w_uk_HNC).transpose(0, 1)
        mixed_BHC = decode(
            q_latent_BHC, q_pe_BHP, cache_RX, step.block_table_BN[:n], step.kv_lens_B[:n], step.block_size,
            max(step.kv_lens[:n], default=0), self.scale, self.config,
        )  # fmt: skip
        return torch.bmm(mixed_BHC.transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)


def _without_decodes(step: StepInput) -> StepInput:
    """The sequences after the decodes as a step of their own."""
    n = step.num_decodes
    return StepInput(
        token_ids_T=step.token_ids_T[n:],
        positions_T=step.positions_T[n:],
        slots_T=step.slots_T[n:],
        query_starts=tuple(start - n for start in step.query_starts[n:]),
        kv_lens=step.kv_lens[n:],
        kv_lens_B=step.kv_lens_B[n:],
        block_table_BN=step.block_table_BN[n:],
        num_decodes=0,
        block_size=step.block_size,
        logits_rows_P=step.logits_rows_P,
    )
