"""A step of sparse attention with random contents: a case of mla_case.py, and an indexer's queries, weights and keys."""

from __future__ import annotations

import torch
from mla_case import SCALE, SHAPE, MlaCase, make_case
from msgspec import Struct
from msgspec.structs import replace
from rounding import mla_bound
from torch import Tensor

from layers import reference as layers_reference
from layers.step import StepInput
from mla import index_keys, latent_fp8, reference
from mla.index import IndexShape
from mla.protocol import MlaShape

INDEX = IndexShape(num_heads=16, head_dim=12, topk=8)


class SparseCase(Struct):
    """fp8: the caches are bytes; then latent and keys are what they say."""

    mla: MlaCase
    index: IndexShape
    index_q: Tensor
    index_weight: Tensor
    keys: Tensor
    fp8: bool = False

    @property
    def step(self) -> StepInput:
        return self.mla.step

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """As mla.sparse.SparseStep takes them."""
        case, cache, keys = self.mla, self.mla.cache, self.keys
        if self.fp8:
            cache, keys = latent_fp8.pack(cache, case.shape.latent_dim), index_keys.pack(keys)
        return case.q_nope, case.q_pe, self.index_q, self.index_weight, cache, keys, case.w_uk, case.w_uv

    def specified(self) -> tuple[Tensor, Tensor]:
        """(the reference's result, its bound: that of attention over the chosen rows)."""
        case = self.mla
        cache, keys = case.cache, self.keys
        if self.fp8:
            widths = case.shape.latent_dim, case.shape.qk_rope_head_dim
            cache = latent_fp8.unpack(latent_fp8.pack(cache, widths[0]), *widths)
            keys = index_keys.unpack(index_keys.pack(keys))
        operands = case.q_nope, case.q_pe, self.index_q, self.index_weight, cache, keys, case.step, case.w_uk, case.w_uv
        wanted = reference.sparse(*operands, SCALE, self.index.topk)
        attended = case.q_nope, case.q_pe, cache, case.w_uk, case.w_uv
        return wanted, mla_bound(attended, over(case.step, self.rows()), SCALE)

    def rows(self) -> list[list[int]]:
        """The rows of the cache that each query attends to, in order: sorted, not by any threshold."""
        keys = index_keys.unpack(index_keys.pack(self.keys)) if self.fp8 else self.keys
        found = []
        for b in range(self.step.num_sequences):
            rows = layers_reference.sequence_rows(self.step, b)
            start, end = self.step.query_starts[b], self.step.query_starts[b + 1]
            for token in range(start, end):
                seen = len(rows) - (end - token - 1)
                dots = (self.index_q[token].double() @ keys[rows[:seen]].double().T).relu()
                scores = self.index_weight[token].double() @ dots
                found.append(rows[scores.topk(min(seen, self.index.topk)).indices.sort().values].tolist())
        return found


def over(step: StepInput, rows: list[list[int]]) -> StepInput:
    """Each query as a sequence of the rows that it attends to."""
    longest = max((len(row) for row in rows), default=0)
    lens = [len(row) for row in rows]
    table = [row + [0] * (longest - len(row)) for row in rows]
    return replace(
        step,
        query_starts=tuple(range(len(rows) + 1)),
        kv_lens=tuple(lens),
        kv_lens_B=torch.tensor(lens, dtype=torch.int64),
        block_table_BN=torch.tensor(table, dtype=torch.int64).view(len(rows), longest),
        num_decodes=len(rows),
        block_size=1,
    )


def make_sparse_case(
    lengths: list[tuple[int, int]],
    index: IndexShape = INDEX,
    shape: MlaShape = SHAPE,
    dtype: torch.dtype = torch.float32,
    block_size: int = 4,
    fp8: bool = False,
    seed: int = 0,
) -> SparseCase:
    """lengths: as mla_case.make_case."""
    case = make_case(lengths, block_size, shape, dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = case.q_nope.shape[0]
    index_q = torch.randn(tokens, index.num_heads, index.head_dim, generator=generator).to(dtype)
    keys = torch.randn(case.cache.shape[0], index.head_dim, generator=generator).to(dtype)
    weight = torch.randn(tokens, index.num_heads, generator=generator)
    return SparseCase(case, index, index_q, weight, keys, fp8)
