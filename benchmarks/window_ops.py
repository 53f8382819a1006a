"""What bench_ops.py measures of attention with a window: gpt-oss's, 64 query heads over 8 key heads of 64, beside the same
without the window. A row's shape says how many blocks of each kind a sequence holds at that length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from layer_ops import BLOCK_SIZE, decode_caches, decode_step, in_torch
from op_clock import Op

from cache.manager import GONE, CacheManager, Holding
from cache.spec import CacheGroup, Field, cache_sizes
from layers.attention import AttentionPlan, HeadCounts, paged_attention

HEADS, WINDOW, SEQUENCES = HeadCounts(64, 8, 64), 128, 8
LENGTHS = (128, 1024, 8192)
CHUNK = 512  # tokens of a step


class _Tokens:
    """A sequence of tokens that nobody else has."""

    cache_salt = ""

    def __init__(self, held: Holding) -> None:
        self.tokens: list[int] = []
        self.held = held


def blocks_held(length: int) -> tuple[int, int]:
    """Of a layer that sees everything, and of one with the window, when a sequence of that length has been computed in
    chunks."""
    fields = (Field("key", (8, 64), "bfloat16"), Field("value", (8, 64), "bfloat16"))
    spec = (CacheGroup("paged", (0,), fields), CacheGroup("window", (1,), fields, WINDOW))
    blocks = -(-length // BLOCK_SIZE)
    sizes = cache_sizes(spec, BLOCK_SIZE, blocks, 1, CHUNK)
    cache = CacheManager(blocks, BLOCK_SIZE, False, spec, sizes)
    sequence = _Tokens(cache.new_holding())
    cache.admit(sequence, cache.nothing)
    for end in range(min(CHUNK, length), length + 1, CHUNK):
        sequence.tokens = [0] * end
        assert cache.allocate(sequence, end) is not None
        cache.commit(sequence, end)
    paged, window = (sum(block != GONE for block in table) for table in sequence.held.tables)
    return paged, window


def window_ops(_: Sequence[int]) -> list[Op]:
    """Decodes of 8 sequences."""
    ops = []
    sinks = torch.randn(HEADS.num_heads)
    for length in LENGTHS:
        step = decode_step(SEQUENCES, length)
        caches = [[c.view(-1, 8, 64) for c in layer] for layer in decode_caches(step, 512, 2)]
        q = torch.randn(SEQUENCES, 64, 64).bfloat16()
        paged, held = blocks_held(length)
        for window in (WINDOW, 0):
            keys = SEQUENCES * min(length, window or length)
            plan = AttentionPlan(step, HEADS, torch.bfloat16, window)
            slow = in_torch(lambda step=step, window=window: AttentionPlan(step, HEADS, torch.bfloat16, window))
            sees = f"W={window} ({held} blocks" if window else f"W=- ({paged} blocks"
            ops.append(
                Op(
                    "window attention", f"B={SEQUENCES} L={length} {sees} each) H=64/8 D=64, sinks",
                    keys * 512 * 2 * 2, keys * 64 * 64 * 4,
                    lambda i, q=q, kv=caches, plan=plan: paged_attention(q, *kv[i % len(kv)], plan, 0.1, sinks),  # type: ignore[misc]
                    lambda i, q=q, kv=caches, plan=slow: paged_attention(q, *kv[i % len(kv)], plan, 0.1, sinks),  # type: ignore[misc]
                )
            )  # fmt: skip
    return ops
