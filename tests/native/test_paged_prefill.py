"""Native attention of prompts equals the reference, on every instruction set that this CPU has.

Legend: T tokens, B sequences, H query heads, Hkv key/value heads, D head size, R rows of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import EVERY_ISA, ISAS
from rounding import assert_within, paged_attention_bound
from torch import Tensor

from layers import reference
from layers.attention import AttentionPlan, HeadCounts, paged_attention
from layers.paged_prefill import PagedPrefill
from layers.step import StepInput
from native import Isa, best_isa, limit_isa

SCALE = 0.3
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not there")
HEADS = [
    HeadCounts(4, 2, 8),
    HeadCounts(16, 4, 64),
    HeadCounts(3, 1, 20),
    HeadCounts(7, 1, 70),
    HeadCounts(6, 2, 34),
    HeadCounts(2, 2, 130),
]
CHUNK, STRIP = 256, 24  # keys of a chunk, rows of a strip (native/src/prefill.h)


@pytest.fixture(autouse=True)
def natively() -> Iterator[None]:
    limit_isa(best_isa())
    yield
    torch.set_num_threads(1)


def prompts(lengths: list[tuple[int, int]], block_size: int = 16, seed: int = 0) -> tuple[StepInput, Tensor]:
    """(queries, tokens afterwards) of each sequence, in shuffled blocks; and which rows of the cache somebody has, bool [R]."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-keys // block_size) for _, keys in lengths]
    blocks = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
    table = torch.zeros((len(lengths), max(counts, default=0) + 1), dtype=torch.int64)
    used = torch.zeros((len(blocks) + 1) * block_size, dtype=torch.bool)
    starts = [0]
    for b, (queries, keys) in enumerate(lengths):
        table[b, : counts[b]] = torch.tensor([blocks.pop() for _ in range(counts[b])])
        position = torch.arange(keys)
        used[table[b, position // block_size] * block_size + position % block_size] = True
        starts.append(starts[-1] + queries)
    none = torch.zeros(starts[-1], dtype=torch.int64)
    lens = tuple(keys for _, keys in lengths)
    num_decodes = next((b for b, (queries, _) in enumerate(lengths) if queries != 1), len(lengths))
    lens_B = torch.tensor(lens, dtype=torch.int64)
    return StepInput(none, none, none, tuple(starts), lens, lens_B, table, num_decodes, block_size, none), used


@lru_cache
def case(
    lengths: tuple[tuple[int, int], ...],
    heads: HeadCounts,
    dtype: torch.dtype,
    block_size: int,
    window: int = 0,
    sinks: bool = False,
) -> tuple[Tensor, list[Tensor], StepInput, Tensor, Tensor, Tensor | None]:
    """(queries, caches, step, the reference's result, its bound, sinks); what no query sees is NaN."""
    step, used = prompts(list(lengths), block_size)
    generator = torch.Generator().manual_seed(1)
    shape = (len(used), heads.num_kv_heads, heads.head_dim)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    for cache in caches:
        cache[~used] = torch.nan
    # Queries lie apart, as in a fused projection.
    q = torch.randn((step.num_tokens, heads.num_heads + 2, heads.head_dim), generator=generator).to(dtype)
    q = q[:, : heads.num_heads]
    for b, kv_len in enumerate(step.kv_lens):  # blocks behind the window are others' now
        queries = step.query_starts[b + 1] - step.query_starts[b]
        gone = max(0, kv_len - queries + 1 - window) if window else 0
        for cache in caches:
            cache[reference.sequence_rows(step, b)[:gone]] = torch.nan
        step.block_table_BN[b, : gone // block_size] = 0
    sinks_H = torch.randn(heads.num_heads, generator=generator) * 3 if sinks else None
    wanted = reference.paged_attention(q.contiguous(), *caches, step, SCALE, window, sinks_H)
    return q, caches, step, wanted, paged_attention_bound(q, *caches, step, SCALE, window, sinks_H), sinks_H


def check(
    lengths: list[tuple[int, int]],
    heads: HeadCounts,
    dtype: torch.dtype,
    block_size: int = 16,
    threads: int = 1,
    window: int = 0,
    sinks: bool = False,
) -> None:
    """Ours equals the reference's."""
    torch.set_num_threads(1)  # small tensors: a second thread would only wait
    q, caches, step, wanted, allowed, sinks_H = case(tuple(lengths), heads, dtype, block_size, window, sinks)
    torch.set_num_threads(threads)
    plan = AttentionPlan(step, heads, dtype, window)
    assert plan.prefill is not None or step.num_decodes == step.num_sequences
    assert_within(paged_attention(q, *caches, plan, SCALE, sinks_H), wanted, allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", EVERY_ISA)
def test_windows_and_sinks(level: Isa, dtype: torch.dtype) -> None:
    limit_isa(level)
    for heads in HEADS[:4]:
        for window, sinks in ((0, True), (1, False), (17, True), (CHUNK + 3, True)):
            check([(1, 40), (200, 700), (17, 17), (9, 513)], heads, dtype, threads=2, window=window, sinks=sinks)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", EVERY_ISA)
def test_equals_the_reference(level: Isa, dtype: torch.dtype, threads: int) -> None:
    limit_isa(level)
    for heads in HEADS:
        for lengths in (
            [(2, 2)],
            [(1, 9), (7, 7), (2, 40)],
            [(5, CHUNK + 3), (63, 64), (64, 64), (65, 70)],
            [(30, 513)],
        ):
            check(lengths, heads, dtype, threads=threads)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(2, 60), st.one_of(st.integers(0, 40), st.integers(200, 600))), min_size=1, max_size=4
    ),
    decodes=st.lists(st.integers(1, 300), max_size=3),
    heads=st.builds(
        lambda kv, group, dim: HeadCounts(kv * group, kv, 2 * dim),
        st.integers(1, 3),
        st.integers(1, 9),
        st.integers(1, 45),
    ),
    block_size=st.sampled_from([1, 3, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    level=st.sampled_from(ISAS or [Isa.NONE]),
    window=st.one_of(st.just(0), st.integers(1, 300)),
    sinks=st.booleans(),
)
def test_any_sizes(
    lengths: list[tuple[int, int]],
    decodes: list[int],
    heads: HeadCounts,
    block_size: int,
    dtype: torch.dtype,
    level: Isa,
    window: int,
    sinks: bool,
) -> None:
    limit_isa(level)
    step = [(1, keys) for keys in decodes] + [(queries, queries + context) for queries, context in lengths]
    check(step, heads, dtype, block_size, window=window, sinks=sinks)


def test_an_odd_width_in_float32_runs_too_and_in_bfloat16_in_torch() -> None:
    check([(9, 30)], HeadCounts(2, 2, 33), torch.float32)
    step, _ = prompts([(9, 30)])
    assert AttentionPlan(step, HeadCounts(2, 2, 33), torch.bfloat16).prefill is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thousands_of_tokens(dtype: torch.dtype) -> None:
    check([(1, 3000), (1500, 1500), (40, 4000)], HeadCounts(4, 2, 64), dtype, threads=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_result_does_not_depend_on_company_or_threads(dtype: torch.dtype) -> None:
    heads = HeadCounts(8, 4, 64)
    step, used = prompts([(100, 400), (5, 5), (50, 300)])
    k, v = (torch.randn(len(used), heads.num_kv_heads, heads.head_dim).to(dtype) for _ in range(2))
    q = torch.randn(step.num_tokens, heads.num_heads, heads.head_dim).to(dtype)
    together = torch.empty_like(q)
    PagedPrefill.behind_decodes(step)(q, k, v, 0.1, together)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        alone = torch.full_like(q, torch.nan)
        PagedPrefill([(100, 105)], [5], step.block_table_BN[1:2], 16)(q, k, v, 0.1, alone)
        assert torch.equal(alone[100:105], together[100:105])
        assert alone[:100].isnan().all() and alone[105:].isnan().all()  # nobody else's rows are written


def test_large_scores_do_not_overflow() -> None:
    step, used = prompts([(40, 600)])
    k, v = (torch.randn(len(used), 1, 16) for _ in range(2))
    q = torch.randn(40, 1, 16) * 1e3
    ours = paged_attention(q, k, v, AttentionPlan(step, HeadCounts(1, 1, 16), torch.float32), 1.0)
    wanted = reference.paged_attention(q, k, v, step, 1.0)
    assert_within(ours, wanted, paged_attention_bound(q, k, v, step, 1.0))
