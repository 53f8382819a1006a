"""The native indexer of sparse attention equals torch's, on every instruction set that this CPU has.

Legend: T tokens, U queries that choose, H index heads, I their width, R rows of the cache.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import EVERY_ISA, ISAS
from rounding import FUNCTION_ULPS, assert_within, bound, unit
from torch import Tensor

from mla import index, index_keys
from mla.index import IndexQueries
from native import Isa, limit_isa

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not there")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(
    queries: list[tuple[int, list[int]]], heads: int, dim: int, block_size: int, dtype: torch.dtype, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, IndexQueries]:
    """queries: of each sequence its length, and how many keys each of its queries sees. Rows that no sequence has are
    NaN, and blocks lie in any order."""
    generator = torch.Generator().manual_seed(len(queries))
    counts = [-(-length // block_size) for length, _ in queries]
    blocks = torch.randperm(sum(counts) + 2, generator=generator) + 1
    table = torch.zeros(len(queries), max(counts, default=0) + 1, dtype=torch.int64)
    cache = torch.full(((len(blocks) + 1) * block_size, dim), torch.nan)
    parts, lens, sequences, used = [], [], [], 0
    for b, (length, seen) in enumerate(queries):
        table[b, : counts[b]] = blocks[used : used + counts[b]]
        used += counts[b]
        position = torch.arange(length)
        cache[table[b, position // block_size] * block_size + position % block_size] = normal(length, dim, seed=b)
        parts.append((len(lens), len(lens) + len(seen), b, length))
        lens += seen
        sequences += [b] * len(seen)
    rows = index_keys.pack(cache.nan_to_num()) if fp8 else cache.to(dtype)
    if fp8:
        rows[cache.isnan().any(1)] = 0xFF  # NaN in e4m3, and as a scale
    wide = normal(len(lens), heads + 1, dim, seed=77).to(dtype)  # heads of a query lie together, queries apart
    lens_U, sequence_U = torch.tensor(lens, dtype=torch.int64), torch.tensor(sequences, dtype=torch.int64)
    known = IndexQueries(lens_U, sequence_U, table, block_size, tuple(parts))
    return wide[:, :heads], normal(len(lens), heads, seed=78), rows, known


def check(
    level: Isa, queries: list[tuple[int, list[int]]], heads: int, dim: int, topk: int, dtype: torch.dtype,
    fp8: bool = False, block_size: int = 16, threads: int = 1,
) -> None:  # fmt: skip
    """The same rows, but for those whose scores are as good as equal to the least one that is chosen."""
    q, weight, cache, known = make(queries, heads, dim, block_size, dtype, fp8)
    limit_isa(Isa.NONE)
    wanted = index.choose_keys(q, weight, cache, known, topk)
    limit_isa(level)
    torch.set_num_threads(threads)
    ours = index.choose_keys(q, weight, cache, known, topk)
    torch.set_num_threads(1)
    assert torch.equal(ours.counts_U, wanted.counts_U)
    keys_RI = index_keys.unpack(cache) if fp8 else cache.float()
    for query in (ours.rows_UK != wanted.rows_UK).any(1).nonzero()[:, 0].tolist():
        count = int(wanted.counts_U[query])
        own, theirs = ours.rows_UK[query, :count], wanted.rows_UK[query, :count]
        assert own.unique().numel() == count
        assert not ours.rows_UK[query, count:].any() and not wanted.rows_UK[query, count:].any()
        some = torch.tensor(sorted({*own.tolist()} ^ {*theirs.tolist()}), dtype=torch.int64)
        terms = weight[query].double()[:, None] * (q[query].double() @ keys_RI.double()[theirs].T).relu()
        least = terms.sum(0).min()
        contested = (weight[query].double()[:, None] * (q[query].double() @ keys_RI.double()[some].T).relu()).sum(0)
        products = q[query].double().abs() @ keys_RI.double()[some].abs().T
        allowed = bound(heads + dim, (weight[query].double().abs()[:, None] * products).sum(0))
        assert ((contested - least).abs() <= 2 * allowed).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", EVERY_ISA)
def test_equals_torch(level: Isa, dtype: torch.dtype, fp8: bool, threads: int) -> None:
    for heads, dim in ((64, 128), (32, 128), (16, 40), (70, 36), (100, 32), (1, 4)):
        check(level, [(70, [70]), (3, [3]), (1300, [1300])], heads, dim, 64, dtype, fp8, threads=threads)
        check(level, [(90, list(range(71, 91))), (20, [19, 20])], heads, dim, 50, dtype, fp8, threads=threads)
    check(level, [], 16, 8, 4, dtype, fp8)


@settings(max_examples=40, deadline=None)
@given(
    queries=st.lists(
        st.tuples(st.integers(1, 200), st.integers(1, 20)).map(
            lambda pair: (pair[0], list(range(max(1, pair[0] - pair[1] + 1), pair[0] + 1)))
        ),
        min_size=1,
        max_size=4,
    ),
    heads=st.integers(1, 130),
    dim=st.integers(1, 40).map(lambda quarter: 4 * quarter),
    topk=st.integers(1, 220),
    block_size=st.sampled_from([1, 3, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    fp8=st.booleans(),
    level=st.sampled_from(ISAS or [Isa.NONE]),
)
def test_any_sizes(
    queries: list[tuple[int, list[int]]], heads: int, dim: int, topk: int, block_size: int, dtype: torch.dtype,
    fp8: bool, level: Isa,
) -> None:  # fmt: skip
    check(level, queries, heads, dim, topk, dtype, fp8, block_size)


def test_more_scores_than_are_kept_at_a_time() -> None:
    """4,000 x 1,100 of them, for which there is room 1,048,576 numbers at a time."""
    check(ISAS[-1], [(4000, list(range(2901, 4001)))], 3, 8, 33, torch.float32, threads=2)


@pytest.mark.parametrize("level", EVERY_ISA)
def test_of_equal_scores_the_first(level: Isa) -> None:
    """No score, some of them negative zeros; and all alike."""
    q, weight, cache, known = make([(200, [200])], 4, 8, 16, torch.float32, False)
    limit_isa(level)
    blocks = known.table_BN[0]
    first = [int(blocks[i // 16]) * 16 + i % 16 for i in range(30)]
    for keys in (torch.zeros_like(cache), torch.where(cache.isnan(), cache, 1.0)):
        for sign in (1.0, -1.0):
            assert index.choose_keys(q, weight * sign, keys, known, 30).rows_UK[0].tolist() == first


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", EVERY_ISA)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "rotated"), [(0, 2, 8, 4), (1, 0, 12, 12), (3, 5, 36, 10), (80, 16, 128, 64)]
)
def test_keys_are_placed_and_queries_rotated(
    level: Isa, dtype: torch.dtype, fp8: bool, tokens: int, heads: int, dim: int, rotated: int
) -> None:
    key, q = normal(tokens, dim + 3).to(dtype)[:, :dim], normal(tokens, heads, dim, seed=1).to(dtype)
    norm = normal(dim, seed=2).to(dtype), normal(dim, seed=3).to(dtype)
    angle = normal(tokens, rotated // 2, seed=4)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    rope = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    slots = torch.randperm(tokens + 4, generator=torch.Generator().manual_seed(5))[:tokens]
    results = []
    for isa in (Isa.NONE, level):
        limit_isa(isa)
        cache = (
            torch.zeros(tokens + 4, dim + 4, dtype=torch.uint8) if fp8 else torch.zeros(tokens + 4, dim, dtype=dtype)
        )
        own_q = q.clone()
        index.place(key, norm, rope, cache, slots, own_q if heads else None)
        results.append((index_keys.unpack(cache) if fp8 else cache.float(), own_q.float(), cache))
    (wanted, wanted_q, _), (ours, ours_q, stored) = results
    size = 8.0 * wanted.abs().amax() if tokens else torch.tensor(0.0)
    steps = 3 * unit(dtype) + FUNCTION_ULPS * unit(torch.float32) + (2.0**-4 if fp8 else 0.0)
    assert_within(ours, wanted, bound(dim, size) / 8 + steps * (wanted.abs() + 1.0).double())
    assert_within(ours_q, wanted_q, 3 * unit(dtype) * (wanted_q.abs() + 4.0).double())
    untouched = [row for row in range(tokens + 4) if row not in slots.tolist()]
    assert not stored[untouched].float().any()


@pytest.mark.parametrize("level", EVERY_ISA)
def test_every_number_of_8_bits(level: Isa) -> None:
    """All 254 of e4m3, and numbers between any two of them, become the bytes that torch makes of them."""
    limit_isa(level)
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[~grid.isnan()].sort().values
    between = (grid[1:] + grid[:-1]) / 2
    numbers = torch.cat([grid, between, between * 1.0001, between * 0.9999])
    # A layer norm that leaves them alone: the weight undoes the division, whatever it is; 448 sets the scale to 1.
    for number in numbers.split(60):
        key = torch.cat([number, -number, torch.tensor([448.0, -448.0])])
        key = torch.cat([key, key.new_zeros(-len(key) % 4)])
        exact = key.double()
        factor = ((exact - exact.mean()).square().mean() + index.NORM_EPS).sqrt().float()
        norm = factor.expand(len(key)).contiguous(), exact.mean().float().expand(len(key)).contiguous()
        rope = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
        cache = torch.zeros(1, len(key) + 4, dtype=torch.uint8)
        index.place(key[None], norm, rope, cache, torch.tensor([0]), None)
        assert_within(index_keys.unpack(cache)[0], key, key.abs().double() / 15 + 2.0**-9)
    row = torch.randn(50, 128)
    row[3] = 0.0
    assert torch.equal(
        index_keys.unpack(index_keys.pack(index_keys.unpack(index_keys.pack(row)))),
        index_keys.unpack(index_keys.pack(row)),
    )
