"""Paged attention equals the naive specification for any mix of decodes, chunks and prefills.

Legend: T tokens, B sequences, N blocks per sequence, H query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_within, paged_attention_bound
from torch import Tensor

from cache.memory import CacheMemory
from cache.spec import CacheGroup, CacheSizes, Field, bytes_per_token
from layers import attention, reference
from layers.attention import AttentionPlan, HeadCounts, paged_attention, write_kv
from layers.step import StepInput

Work = list[tuple[int, int]]  # (queries, earlier context) of each sequence


def step_of(work: Work, block_size: int, generator: torch.Generator) -> StepInput:
    """Sequences in shuffled blocks of a cache that has just enough of them; block 0 belongs to nobody."""
    work = sorted(work, key=lambda w: w[0] > 1)
    kv_lens = [queries + context for queries, context in work]
    num_blocks = [-(-n // block_size) for n in kv_lens]
    blocks = torch.randperm(sum(num_blocks), generator=generator) + 1
    table = torch.zeros((len(work), max(num_blocks, default=0) + 1), dtype=torch.int64)
    starts, slots, positions, taken = [0], [], [], 0
    for b, (queries, context) in enumerate(work):
        table[b, : num_blocks[b]] = blocks[taken : taken + num_blocks[b]]
        taken += num_blocks[b]
        position = torch.arange(context, context + queries)
        positions.append(position)
        slots.append(table[b, position // block_size] * block_size + position % block_size)
        starts.append(starts[-1] + queries)
    empty = torch.zeros(0, dtype=torch.int64)
    return StepInput(
        token_ids_T=torch.zeros(starts[-1], dtype=torch.int64),
        positions_T=torch.cat([empty, *positions]),
        slots_T=torch.cat([empty, *slots]),
        query_starts=tuple(starts),
        kv_lens=tuple(kv_lens),
        kv_lens_B=torch.tensor(kv_lens, dtype=torch.int64),
        block_table_BN=table,
        num_decodes=sum(queries == 1 for queries, _ in work),
        block_size=block_size,
        logits_rows_P=empty,
    )


def caches(step: StepInput, heads: HeadCounts, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random keys and values everywhere: rows that belong to nobody hold the leftovers of others."""
    rows = (int(step.block_table_BN.max()) + 1 if step.block_table_BN.numel() else 1) * step.block_size
    shape = (rows, heads.num_kv_heads, heads.head_dim)
    return torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)


def check(work: Work, heads: HeadCounts, block_size: int, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(len(work))
    step = step_of(work, block_size, generator)
    k_cache, v_cache = caches(step, heads, generator, dtype)
    q = torch.randn((step.num_tokens, heads.num_heads, heads.head_dim), generator=generator).to(dtype)
    with torch.inference_mode():
        ours = paged_attention(q, k_cache, v_cache, AttentionPlan(step, heads, dtype), 0.3)
        expected = reference.paged_attention(q, k_cache, v_cache, step, 0.3)
    assert_within(ours, expected, paged_attention_bound(q, k_cache, v_cache, step, 0.3))


sequences = st.tuples(
    st.one_of(st.just(1), st.integers(1, 12), st.integers(1, 90)), st.one_of(st.just(0), st.integers(0, 80))
)


@settings(max_examples=25, deadline=None)
@given(
    work=st.lists(sequences, max_size=8),
    heads=st.sampled_from([HeadCounts(4, 2, 8), HeadCounts(3, 1, 4), HeadCounts(2, 2, 16)]),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_any_mix_equals_the_reference(work: Work, heads: HeadCounts, block_size: int) -> None:
    check(work, heads, block_size)


@pytest.mark.parametrize("work", [[(1, 20), (1, 3), (9, 0), (9, 4)], [(100, 0)], [(80, 50)]])
def test_bfloat16(work: Work) -> None:
    check(work, HeadCounts(4, 2, 8), 4, torch.bfloat16)


@pytest.mark.usefixtures("in_torch")
def test_any_mix_in_torch() -> None:
    for work in ([(1, 20), (1, 3), (9, 0), (9, 4)], [(1, 0)], [(1, 5), (1, 60), (80, 50), (100, 0)]):
        for dtype in (torch.float32, torch.bfloat16):
            check(work, HeadCounts(4, 2, 8), 4, dtype)


@pytest.mark.usefixtures("in_torch")
def test_decodes_of_very_different_length_go_in_several_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    work = [(1, 2000)] + [(1, 10 + i) for i in range(30)] + [(1, 900)]
    plan = AttentionPlan(step_of(work, 16, generator), HeadCounts(2, 1, 4), torch.float32)
    assert 1 < len(plan.batches) <= 6
    check(work, HeadCounts(2, 1, 4), 16)


@pytest.mark.usefixtures("in_torch")
def test_gathered_memory_and_masks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits so small that every loop runs several times, results stay the same."""
    monkeypatch.setattr(attention, "MAX_GATHERED_BYTES", 4096)
    monkeypatch.setattr(attention, "MAX_MASK_ELEMENTS", 3000)
    monkeypatch.setattr(attention, "MAX_WASTED_KEYS", 16)
    work = [(1, 30), (1, 31), (1, 200), (5, 30), (6, 0), (64, 9), (70, 0), (100, 65), (120, 30)]
    generator = torch.Generator().manual_seed(0)
    plan = AttentionPlan(step_of(work, 4, generator), HeadCounts(4, 2, 8), torch.float32)
    assert plan.chunk < 100 and len(plan.batches) > 2
    check(work, HeadCounts(4, 2, 8), 4)


def test_no_tokens_at_all() -> None:
    check([], HeadCounts(4, 2, 8), 4)


def test_written_entries_are_where_the_slots_say() -> None:
    fields = (Field("key", (2, 3), "float32"), Field("value", (5,), "float32"))
    spec = (CacheGroup("paged", (0, 1), fields),)
    assert bytes_per_token(spec) == 2 * 11 * 4
    kv = CacheMemory.allocate(spec, CacheSizes(4, 3), torch.device("cpu"))
    x = torch.randn(2, 5, 3)[:, 1:3]  # a strided view, as keys are in a fused projection
    write_kv(kv.layers[1][0], torch.tensor([7, 2]), x)
    assert torch.equal(kv.layers[1][0][[7, 2]], x)
    assert int(kv.layers[1][0].count_nonzero()) == x.numel() and not kv.layers[0][0].any()
