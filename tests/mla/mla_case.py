"""A paged cache and a step with random contents, for the tests of mla."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from layers.step import StepInput
from mla.protocol import MlaShape

SHAPE = MlaShape(num_heads=3, qk_nope_head_dim=10, qk_rope_head_dim=6, latent_dim=20, v_head_dim=7)
SCALE = 0.21


@dataclass
class MlaCase:
    step: StepInput
    shape: MlaShape
    q_nope: Tensor
    q_pe: Tensor
    cache: Tensor
    w_uk: Tensor
    w_uv: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q_nope, self.q_pe, self.cache, self.w_uk, self.w_uv


def make_case(
    lengths: list[tuple[int, int]],
    block_size: int = 4,
    shape: MlaShape = SHAPE,
    dtype: torch.dtype = torch.float32,
    garbage: float = 1e4,
    seed: int = 0,
) -> MlaCase:
    """lengths: (queries, tokens in the cache afterwards) of each sequence, those with one query first.

    Blocks lie in the cache in random order. Rows that belong to no token hold numbers of the size `garbage`.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    counts = [-(-keys // block_size) for _, keys in lengths]
    num_blocks = sum(counts) + 3
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.zeros((len(lengths), max(counts, default=0) + 2), dtype=torch.int64)
    cache = normal(num_blocks * block_size, shape.cache_dim) * garbage
    slots, positions, starts = [], [], [0]
    for b, (queries, keys) in enumerate(lengths):
        blocks = torch.tensor([free.pop() for _ in range(counts[b])], dtype=torch.int64)
        table[b, : counts[b]] = blocks
        rows = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:keys]
        cache[rows] = normal(keys, shape.cache_dim)
        slots += rows[keys - queries :].tolist()
        positions += range(keys - queries, keys)
        starts.append(starts[-1] + queries)
    num_tokens = starts[-1]
    num_decodes = next((b for b, (queries, _) in enumerate(lengths) if queries != 1), len(lengths))
    step = StepInput(
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        slots_T=torch.tensor(slots, dtype=torch.int64),
        query_starts=tuple(starts),
        kv_lens=tuple(keys for _, keys in lengths),
        kv_lens_B=torch.tensor([keys for _, keys in lengths], dtype=torch.int64),
        block_table_BN=table,
        num_decodes=num_decodes,
        block_size=block_size,
        logits_rows_P=torch.arange(num_tokens),
    )
    heads = shape.num_heads
    return MlaCase(
        step=step,
        shape=shape,
        q_nope=normal(num_tokens, heads, shape.qk_nope_head_dim).to(dtype),
        q_pe=normal(num_tokens, heads, shape.qk_rope_head_dim).to(dtype),
        cache=cache.to(dtype),
        w_uk=(normal(heads, shape.qk_nope_head_dim, shape.latent_dim) * 0.3).to(dtype),
        w_uv=(normal(heads, shape.v_head_dim, shape.latent_dim) * 0.3).to(dtype),
    )
