"""What bench_ops.py measures of sparse attention: DeepSeek-V3.2's shape, 128 heads over latents of 512 + 64, 64 index heads
of 128, 2,048 keys chosen of 8,192.

Of "sparse mla", decodes and prompts, torch_ms is dense absorbed attention over all keys in the native kernels, so that
ratio says what being sparse brings, the choice included. Limits count the rows that are read: index keys of all tokens,
latents of those that are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from layer_ops import BLOCK_SIZE, FAR, in_torch
from op_clock import Op
from torch import Tensor

from layers.step import StepInput
from mla import index, index_keys
from mla.attention import TorchMla
from mla.index import IndexQueries, IndexShape
from mla.protocol import MlaShape
from mla.sparse import SparseMla

SHAPE = MlaShape(128, 128, 64, 512, 128)
INDEX = IndexShape(64, 128, 2048)
CASES = ((1, 8192, 1), (8, 8192, 1), (1, 32768, 1), (1, 8192, 64))  # sequences, tokens of each, queries of each
CPU = torch.device("cpu")


def _step(num_sequences: int, length: int, num_queries: int) -> StepInput:
    blocks_each = -(-length // BLOCK_SIZE)
    table = torch.randperm(num_sequences * blocks_each).view(num_sequences, blocks_each)
    lens = torch.full((num_sequences,), length)
    tokens = num_sequences * num_queries
    none = torch.zeros(tokens, dtype=torch.int64)
    positions = torch.arange(length - num_queries, length).repeat(num_sequences)
    starts = tuple(range(0, tokens + 1, num_queries))
    decodes = num_sequences if num_queries == 1 else 0
    return StepInput(none, positions, none, starts, (length,) * num_sequences, lens, table, decodes, BLOCK_SIZE, none)


def sparse_ops(_: Sequence[int]) -> list[Op]:
    ops = []
    heads, dim, topk = INDEX
    w_uk, w_uv = (torch.randn(128, 128, 512).bfloat16() * 0.05 for _ in range(2))
    for num_sequences, length, num_queries in CASES:
        step = _step(num_sequences, length, num_queries)
        tokens, keys = num_sequences * num_queries, num_sequences * length
        layers = max(1, min(8, -(-FAR // (keys * (dim + SHAPE.cache_dim) * 2))))
        caches = [
            (torch.randn(keys, SHAPE.cache_dim).bfloat16(), torch.randn(keys, dim).bfloat16()) for _ in range(layers)
        ]
        name = f"B={num_sequences} L={length} T={num_queries}"
        q = torch.randn(tokens, heads, dim).bfloat16(), torch.randn(tokens, heads)
        own = torch.randn(tokens, 128, 128).bfloat16(), torch.randn(tokens, 128, 64).bfloat16()
        pairs = tokens * (length - (num_queries - 1) / 2)
        index_flops = 2.0 * heads * dim * pairs
        if num_queries == 1:
            ops += _choices(name, step, q, [keys_RI for _, keys_RI in caches], index_flops)
        backend = SparseMla(SHAPE, INDEX, 0.1, "absorbed", torch.bfloat16, CPU)
        dense = TorchMla(SHAPE, 0.1, "absorbed", torch.bfloat16).prepare(step)

        def sparse(i: int, step: StepInput = step, backend: SparseMla = backend, q=q, own=own, caches=caches) -> Tensor:  # type: ignore[no-untyped-def]
            cache_RX, keys_RI = caches[i % len(caches)]
            return backend.prepare(step)(*own, *q, cache_RX, keys_RI, w_uk, w_uv)

        rows = min(keys, tokens * topk)
        ops.append(
            Op(
                "sparse mla", name, keys * dim * 2 + rows * SHAPE.cache_dim * 2 + 4 * w_uk.numel(),
                index_flops + tokens * (topk * 128 * 2 * (576 + 512) + 4.0 * w_uk.numel()),
                sparse,
                lambda i, own=own, caches=caches, run=dense: run(*own, caches[i % len(caches)][0], w_uk, w_uv),  # type: ignore[misc]
            )
        )  # fmt: skip
    return ops


def _choices(name: str, step: StepInput, q: tuple[Tensor, Tensor], caches: list[Tensor], flops: float) -> list[Op]:
    """Scores and the largest of them, of index keys in bfloat16 and in FP8."""
    ops = []
    parts = tuple((b, b + 1, b, length) for b, length in enumerate(step.kv_lens))
    queries = IndexQueries(step.kv_lens_B, None, step.block_table_BN, step.block_size, parts)
    for form, keys in (("bf16", caches), ("fp8", [index_keys.pack(cache) for cache in caches])):

        def choose(i: int, keys: list[Tensor] = keys) -> object:
            return index.choose_keys(*q, keys[i % len(keys)], queries, INDEX.topk)

        ops.append(
            Op(
                f"sparse index {form}", name, sum(step.kv_lens) * keys[0].shape[1] * keys[0].element_size(), flops,
                choose, lambda i, choose=choose: in_torch(lambda: choose(i)),  # type: ignore[misc]
            )
        )  # fmt: skip
    return ops
