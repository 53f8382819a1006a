"""MLA on a GPU in Triton: decodes absorbed, prompts naive; prompts of few queries are absorbed too, query by query.

A step of decodes alone is prepared and run without copies from the host and without waiting for the device, so that it
can be captured in a graph.

Legend: T tokens of the step, B queries that are absorbed, H heads; N, P, C, X, V widths (mla/protocol.py), R rows of
the cache.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from layers.step import StepInput
from mla.protocol import MlaShape, PrefillMode
from mla.triton.configs import DecodeConfig, PrefillConfig
from mla.triton.decode import decode
from mla.triton.prefill import BUILT_BYTES, PrefillPlan

FEW_QUERIES = 8  # up to which a prompt's queries are absorbed: building its context would cost more


class TritonMla:
    """Implements mla.protocol.MlaBackend. scale: what scores are multiplied by; configs: instead of the tables';
    max_keys: built at a time by the naive form."""

    def __init__(
        self,
        shape: MlaShape,
        scale: float,
        prefill: PrefillMode,
        dtype: torch.dtype,
        config: DecodeConfig | None = None,
        prefill_config: PrefillConfig | None = None,
        max_keys: int | None = None,
    ) -> None:
        self.shape, self.scale, self.dtype = shape, scale, dtype
        self.few = {"naive": 0, "auto": FEW_QUERIES, "absorbed": 1 << 62}[prefill]
        self.config, self.prefill_config = config, prefill_config
        built = shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim) * dtype.itemsize
        self.max_keys = max_keys or max(1024, BUILT_BYTES // built)

    def prepare(self, step: StepInput) -> TritonMlaStep:
        n = step.num_decodes
        first = None
        if n:
            longest = max(step.kv_lens[:n])
            first = _Absorbed(slice(0, n), step.block_table_BN[:n], step.kv_lens_B[:n], longest)
        counts = [step.query_starts[b + 1] - step.query_starts[b] for b in range(step.num_sequences)]
        few = [b for b in range(n, step.num_sequences) if 0 < counts[b] <= self.few]
        more = [b for b in range(n, step.num_sequences) if counts[b] > self.few]
        heads = self.shape.num_heads
        prompts = PrefillPlan(step, more, heads, self.max_keys, self.dtype, self.prefill_config) if more else None
        return TritonMlaStep(self, step, first, _absorb(step, few) if few else None, prompts)


class _Absorbed(Struct, frozen=True):
    """tokens: of the step, int64 [B] or a slice; table [B, N] and lens [B]: of each; longest: no lens is more."""

    tokens: slice | Tensor
    table_BN: Tensor
    lens_B: Tensor
    longest: int


def _absorb(step: StepInput, members: list[int]) -> _Absorbed:
    """Each query as a sequence of its own, which ends with it."""
    tokens: list[int] = []
    sequences: list[int] = []
    for b in members:
        here = range(step.query_starts[b], step.query_starts[b + 1])
        tokens += here
        sequences += [b] * len(here)
    device = step.slots_T.device
    tokens_B = torch.tensor(tokens, device=device)
    table_BN = step.block_table_BN.index_select(0, torch.tensor(sequences, device=device))
    lens = step.positions_T.index_select(0, tokens_B) + 1
    return _Absorbed(tokens_B, table_BN, lens, max(step.kv_lens[b] for b in members))


class TritonMlaStep:
    """Implements mla.protocol.PreparedStep. decodes, few: what is absorbed; prompts: what is naive; None: there is
    none."""

    def __init__(
        self,
        backend: TritonMla,
        step: StepInput,
        decodes: _Absorbed | None,
        few: _Absorbed | None,
        prompts: PrefillPlan | None,
    ) -> None:
        self.backend, self.step, self.decodes, self.few, self.prompts = backend, step, decodes, few, prompts

    def __call__(
        self, q_nope_THN: Tensor, q_pe_THP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        weights = cache_RX, w_uk_HNC, w_uv_HVC
        if self.decodes is not None and self.few is None and self.prompts is None:
            return self._absorbed(self.decodes, q_nope_THN, q_pe_THP, *weights)
        out_THV = q_nope_THN.new_empty((*q_nope_THN.shape[:2], self.backend.shape.v_head_dim))
        for part in (self.decodes, self.few):
            if part is not None:
                tokens = part.tokens
                out_THV[tokens] = self._absorbed(part, q_nope_THN[tokens], q_pe_THP[tokens], *weights)
        if self.prompts is not None:
            self.prompts.run(q_nope_THN, q_pe_THP, *weights, self.backend.scale, out_THV)
        return out_THV

    def _absorbed(
        self,
        part: _Absorbed,
        q_nope_BHN: Tensor,
        q_pe_BHP: Tensor,
        cache_RX: Tensor,
        w_uk_HNC: Tensor,
        w_uv_HVC: Tensor,
    ) -> Tensor:
        q_latent_BHC = torch.bmm(q_nope_BHN.transpose(0, 1), w_uk_HNC).transpose(0, 1)
        mixed_BHC = decode(
            q_latent_BHC, q_pe_BHP, cache_RX, part.table_BN, part.lens_B, self.step.block_size, part.longest,
            self.backend.scale, self.backend.config,
        )  # fmt: skip
        return torch.bmm(mixed_BHC.transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)
