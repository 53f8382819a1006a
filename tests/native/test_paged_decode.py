"""Native paged decode attention equals the reference, on every instruction set that this CPU has.

Legend: B sequences, H query heads, Hkv key/value heads, D head size, R rows of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import EVERY_ISA, ISAS
from msgspec.structs import replace
from rounding import assert_within, paged_attention_bound
from torch import Tensor

from layers import reference
from layers.attention import AttentionPlan, HeadCounts, paged_attention
from layers.paged_decode import PagedDecode
from layers.step import StepInput
from native import Isa, best_isa, limit_isa

SCALE = 0.3
DTYPES = [torch.float32, torch.bfloat16]
CHUNK = 256  # keys of a chunk (native/src/attention.h)
pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not there")
HEADS = [
    HeadCounts(4, 2, 8),
    HeadCounts(16, 8, 128),
    HeadCounts(3, 1, 20),
    HeadCounts(7, 1, 70),
    HeadCounts(6, 2, 33),
    HeadCounts(2, 2, 1),
]


@pytest.fixture(autouse=True)
def natively() -> Iterator[None]:
    limit_isa(best_isa())
    yield
    torch.set_num_threads(1)


def decodes(lens: list[int], block_size: int, seed: int = 0) -> tuple[StepInput, Tensor]:
    """One query each, in shuffled blocks; and which rows of the cache somebody has, bool [R]."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lens]
    blocks = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
    table = torch.zeros((len(lens), max(counts, default=0) + 1), dtype=torch.int64)
    used = torch.zeros((len(blocks) + 1) * block_size, dtype=torch.bool)
    for b, count in enumerate(counts):
        table[b, :count] = torch.tensor([blocks.pop() for _ in range(count)])
        position = torch.arange(lens[b])
        used[table[b, position // block_size] * block_size + position % block_size] = True
    none = torch.zeros(len(lens), dtype=torch.int64)
    step = StepInput(
        token_ids_T=none,
        positions_T=torch.tensor(lens, dtype=torch.int64) - 1,
        slots_T=none,
        query_starts=tuple(range(len(lens) + 1)),
        kv_lens=tuple(lens),
        kv_lens_B=torch.tensor(lens, dtype=torch.int64),
        block_table_BN=table,
        num_decodes=len(lens),
        block_size=block_size,
        logits_rows_P=none,
    )
    return step, used


@lru_cache
def case(
    lens: tuple[int, ...], heads: HeadCounts, dtype: torch.dtype, block_size: int, window: int = 0, sinks: bool = False
) -> tuple[Tensor, list[Tensor], StepInput, Tensor, Tensor, Tensor | None]:
    """(queries, caches, step, the reference's result, its bound, sinks); what no query sees is NaN."""
    step, used = decodes(list(lens), block_size)
    generator = torch.Generator().manual_seed(1)
    shape = (len(used), heads.num_kv_heads, heads.head_dim)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    for cache in caches:
        cache[~used] = torch.nan
    # Queries lie apart, as in a fused projection.
    q = torch.randn((len(lens), heads.num_heads + 2, heads.head_dim), generator=generator).to(dtype)
    q = q[:, : heads.num_heads]
    leave_behind(step, window, caches)
    sinks_H = torch.randn(heads.num_heads, generator=generator) * 3 if sinks else None
    wanted = reference.paged_attention(q.contiguous(), *caches, step, SCALE, window, sinks_H)
    return q, caches, step, wanted, paged_attention_bound(q, *caches, step, SCALE, window, sinks_H), sinks_H


def leave_behind(step: StepInput, window: int, caches: list[Tensor]) -> None:
    """Blocks behind the window belong to others now: their entries in the table are 0, as is what they hold."""
    for b, kv_len in enumerate(step.kv_lens):
        queries = step.query_starts[b + 1] - step.query_starts[b]
        gone = max(0, kv_len - queries + 1 - window) if window else 0
        for row in reference.sequence_rows(step, b)[:gone]:
            for cache in caches:
                cache[row] = torch.nan
        step.block_table_BN[b, : gone // step.block_size] = 0


def check(
    lens: list[int],
    heads: HeadCounts,
    dtype: torch.dtype,
    block_size: int = 16,
    threads: int = 1,
    window: int = 0,
    sinks: bool = False,
) -> None:
    """Ours equals the reference's."""
    torch.set_num_threads(1)  # small tensors: a second thread would only wait
    q, caches, step, wanted, allowed, sinks_H = case(tuple(lens), heads, dtype, block_size, window, sinks)
    torch.set_num_threads(threads)
    plan = AttentionPlan(step, heads, dtype, window)
    assert_within(paged_attention(q, *caches, plan, SCALE, sinks_H), wanted, allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", EVERY_ISA)
def test_windows_and_sinks(level: Isa, dtype: torch.dtype) -> None:
    limit_isa(level)
    for heads in HEADS[:4]:
        for window, sinks in ((0, True), (1, False), (17, True), (CHUNK + 3, True), (CHUNK + 3, False)):
            check([CHUNK + 20, 1, 17, 18, 700], heads, dtype, threads=2, window=window, sinks=sinks)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", EVERY_ISA)
def test_equals_the_reference(level: Isa, dtype: torch.dtype, threads: int) -> None:
    limit_isa(level)
    for heads in HEADS:
        for lens in ([], [1], [CHUNK], [CHUNK + 1, 3, 2 * CHUNK - 1], [700], list(range(1, 50))):
            check(lens, heads, dtype, threads=threads)


@settings(max_examples=30, deadline=None)
@given(
    lens=st.lists(st.one_of(st.integers(1, 40), st.integers(200, 600)), min_size=1, max_size=6),
    heads=st.builds(
        lambda kv, group, dim: HeadCounts(kv * group, kv, dim), st.integers(1, 3), st.integers(1, 9), st.integers(1, 90)
    ),
    block_size=st.sampled_from([1, 3, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    level=st.sampled_from(ISAS or [Isa.NONE]),
    window=st.one_of(st.just(0), st.integers(1, 300)),
    sinks=st.booleans(),
)
def test_any_sizes(
    lens: list[int], heads: HeadCounts, block_size: int, dtype: torch.dtype, level: Isa, window: int, sinks: bool
) -> None:
    limit_isa(level)
    check(lens, heads, dtype, block_size, window=window, sinks=sinks)


def test_thousands_of_keys() -> None:
    """More chunks than a sequence may have: they become longer."""
    check([CHUNK * 70 + 5, 9], HeadCounts(4, 2, 16), torch.float32, threads=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_result_does_not_depend_on_company_or_threads(dtype: torch.dtype) -> None:
    heads = HeadCounts(8, 4, 64)
    step, used = decodes([900, 5, 300], 16)
    k, v = (torch.randn(len(used), heads.num_kv_heads, heads.head_dim).to(dtype) for _ in range(2))
    q = torch.randn(3, heads.num_heads, heads.head_dim).to(dtype)
    together = PagedDecode(step, 8, 4, 64, 64, dtype)(q, k, v, 0.1)
    alone, _ = decodes([900], 16)
    alone.block_table_BN[:] = step.block_table_BN[:1]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(PagedDecode(alone, 8, 4, 64, 64, dtype)(q[:1], k, v, 0.1)[0], together[0])


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", EVERY_ISA)
def test_a_token_and_its_drafts_read_the_cache_together(level: Isa, dtype: torch.dtype, window: int) -> None:
    """Bit for bit what each gives alone: also where they end in other chunks, and more of them than go together."""
    limit_isa(level)
    for first, count, num_heads, num_kv in ((300, 4, 8, 4), (CHUNK - 3, 6, 6, 1), (15, 3, 3, 1), (10, 20, 4, 2)):
        whole, used = decodes([7, first + count - 1, 12], 16)
        rows = [0, *[1] * count, 2]
        lens = [7, *range(first, first + count), 12]
        k, v = (torch.randn(len(used), num_kv, 24).to(dtype) for _ in range(2))
        q = torch.randn(len(rows), num_heads, 24).to(dtype)
        step, _ = decodes(lens, 16)
        step = replace(step, block_table_BN=whole.block_table_BN[rows].contiguous())
        for threads in (1, 3):
            torch.set_num_threads(threads)
            together = PagedDecode(step, num_heads, num_kv, 24, 24, dtype, window)(q, k, v, 0.1)
            for b, length in enumerate(lens):
                alone, _ = decodes([length], 16)
                alone = replace(alone, block_table_BN=step.block_table_BN[b : b + 1])
                given = PagedDecode(alone, num_heads, num_kv, 24, 24, dtype, window)(q[b : b + 1], k, v, 0.1)
                assert torch.equal(given[0], together[b]), (first, b, threads)
