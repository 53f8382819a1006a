"""Norm, rope and attention in Triton equal the layers in torch, and compile for Hopper and Blackwell."""

from __future__ import annotations

import pytest
import torch
from rounding import assert_within, paged_attention_bound
from torch import Tensor
from triton_support import compiling, report, running

from layers import reference
from layers.attention import HeadCounts
from layers.norm import rms_norm
from layers.rope import apply_rope
from layers.step import StepInput
from layers.triton import attention as triton_attention
from layers.triton import merge as triton_merge
from layers.triton import norm as triton_norm
from layers.triton import rope as triton_rope
from layers.triton import softmax as triton_softmax
from layers.triton.attention import TritonAttentionPlan
from layers.triton.configs import AttentionConfig

pytestmark = pytest.mark.triton

SMALL = AttentionConfig(16, 16, 4, 2, programs=16, keys=16)  # several tiles and splits
DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "weight_shape"), [((3, 40), (40,)), ((2, 3, 16), (3, 16)), ((0, 16), (16,))])
def test_norm(shape: tuple[int, ...], weight_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = normal(*shape).to(dtype), normal(*weight_shape, seed=1).to(dtype)
    with running(triton_norm):
        ours = triton_norm.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(ours, rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_sum(dtype: torch.dtype) -> None:
    x_TD, weight = normal(4, 40, seed=2).to(dtype)[:, :24], normal(24, seed=1).to(dtype)
    ours_TD = normal(4, 24).to(dtype)
    residual_TD = ours_TD.clone()
    with running(triton_norm):
        out_TD = triton_norm.add_rms_norm(x_TD, ours_TD, weight, 1e-5)
    torch.testing.assert_close(out_TD, rms_norm(residual_TD.add_(x_TD), weight, 1e-5))
    assert torch.equal(ours_TD, residual_TD)


def turns(num_tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle_TR = normal(num_tokens, size // 2, seed=3)
    cos, sin = angle_TR.cos().to(dtype), angle_TR.sin().to(dtype)
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "size"), [(3, 8), (5, 12), (20, 256)])
def test_rope(num_heads: int, size: int, dtype: torch.dtype) -> None:
    k_THD = normal(3, 2 * num_heads + 1, size).to(dtype)[:, :num_heads]
    cos, sin = turns(3, size, dtype)
    with running(triton_rope):
        ours = triton_rope.apply_rope(k_THD, cos, sin)
        assert triton_rope.apply_rope(k_THD[:0], cos[:0], sin[:0]).shape == (0, num_heads, size)
    torch.testing.assert_close(ours, apply_rope(k_THD, cos, sin))


def make_step(lengths: list[tuple[int, int]], block_size: int) -> tuple[StepInput, Tensor]:
    """lengths: (queries, tokens in the cache afterwards), decodes first. The rows of the cache that belong to a token."""
    counts = [-(-keys // block_size) for _, keys in lengths]
    free = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1).tolist()
    table = torch.zeros(len(lengths), max(counts, default=0) + 1, dtype=torch.int64)
    rows, starts = [], [0]
    for b, (queries, keys) in enumerate(lengths):
        blocks = torch.tensor([free.pop() for _ in range(counts[b])])
        table[b, : counts[b]] = blocks
        rows.append((blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:keys])
        starts.append(starts[-1] + queries)
    decodes = next((b for b, (queries, _) in enumerate(lengths) if queries != 1), len(lengths))
    unused = torch.zeros(starts[-1], dtype=torch.int64)
    lens = tuple(keys for _, keys in lengths)
    step = StepInput(
        unused, unused, unused, tuple(starts), lens, torch.tensor(lens), table, decodes, block_size, unused
    )  # fmt: skip
    return step, torch.cat(rows) if rows else unused


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        ([(1, 5), (1, 70), (1, 16)], HeadCounts(6, 2, 20)),
        ([(1, 40), (9, 9), (3, 30), (20, 35)], HeadCounts(6, 2, 20)),
        ([(1, 33), (6, 21)], HeadCounts(4, 4, 16)),
        ([(1, 33), (2, 5)], HeadCounts(20, 1, 8)),
        ([], HeadCounts(2, 1, 8)),
    ],
    ids=["decodes", "mixed", "one head per key", "one key head", "no tokens"],
)
def test_attention(lengths: list[tuple[int, int]], heads: HeadCounts, dtype: torch.dtype) -> None:
    step, rows = make_step(lengths, 4)
    size = (int(step.block_table_BN.max()) + 2) * 4 if lengths else 8
    caches = [torch.full((size, heads.num_kv_heads, heads.head_dim), 1e30, dtype=dtype) for _ in range(2)]
    for seed, cache in enumerate(caches):
        cache[rows] = normal(rows.shape[0], heads.num_kv_heads, heads.head_dim, seed=seed).to(dtype)
    q_THD = normal(step.num_tokens, heads.num_heads + 1, heads.head_dim, seed=5).to(dtype)[:, 1:]
    for decode in (SMALL, AttentionConfig(16, 16, 4, 2, programs=1)):
        with running(triton_attention, triton_merge, triton_softmax):
            plan = TritonAttentionPlan(step, heads, dtype, decode, SMALL)
            ours = triton_attention.paged_attention(q_THD, *caches, plan, 0.3)
        expected = reference.paged_attention(q_THD, *caches, step, 0.3)
        assert_within(ours, expected, paged_attention_bound(q_THD, *caches, step, 0.3))


@pytest.mark.parametrize(("window", "sinks"), [(0, True), (1, False), (7, True), (30, True)])
def test_windows_and_sinks(window: int, sinks: bool) -> None:
    """What lies behind the windows is NaN, and its blocks are others'."""
    heads, lengths = HeadCounts(6, 2, 20), [(1, 40), (1, 5), (9, 9), (20, 47), (3, 30)]
    step, rows = make_step(lengths, 4)
    caches = [torch.full(((int(step.block_table_BN.max()) + 2) * 4, 2, 20), torch.nan) for _ in range(2)]
    for seed, cache in enumerate(caches):
        cache[rows] = normal(rows.shape[0], 2, 20, seed=seed)
    for b, (queries, keys) in enumerate(lengths):
        gone = max(0, keys - queries + 1 - window) if window else 0
        for cache in caches:
            cache[reference.sequence_rows(step, b)[:gone]] = torch.nan
        step.block_table_BN[b, : gone // 4] = 0
    q_THD, sinks_H = normal(step.num_tokens, 6, 20, seed=5), 3 * normal(6, seed=6) if sinks else None
    expected = reference.paged_attention(q_THD, *caches, step, 0.3, window, sinks_H)
    allowed = paged_attention_bound(q_THD, *caches, step, 0.3, window, sinks_H)
    for decode in (SMALL, AttentionConfig(16, 16, 4, 2, programs=1)):
        with running(triton_attention, triton_merge, triton_softmax):
            plan = TritonAttentionPlan(step, heads, torch.float32, decode, SMALL, window)
            assert_within(triton_attention.paged_attention(q_THD, *caches, plan, 0.3, sinks_H), expected, allowed)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("capability", [90, 100])
def test_compiles_for_qwen3(capability: int) -> None:
    """Qwen3-30B-A3B: 32 query heads and 4 key heads of 128."""
    step, _ = make_step([(1, 4096), (1, 3000), (200, 1000)], 16)
    caches = meta(8192, 4, 128), meta(8192, 4, 128)
    cos = meta(202, 1, 128)
    with compiling(capability, triton_attention, triton_merge, triton_norm, triton_rope) as found:
        plan = TritonAttentionPlan(step, HeadCounts(32, 4, 128), torch.bfloat16)
        triton_attention.paged_attention(meta(202, 32, 128), *caches, plan, 0.1)
        triton_norm.rms_norm(meta(202, 36, 128), meta(36, 128), 1e-6)
        triton_norm.add_rms_norm(meta(202, 2048), meta(202, 2048), meta(2048), 1e-6)
        triton_rope.apply_rope(meta(202, 32, 128), cos, cos)
    report(found)
    assert len(found) == 6 and all(item.spills == 0 for item in found)
    assert found[2].matrix_unit == {90: "wgmma", 100: "tcgen05.mma"}[capability]  # prefill


@pytest.mark.parametrize("capability", [90, 100])
def test_compiles_for_gpt_oss(capability: int) -> None:
    """64 query heads and 8 key heads of 64, a window of 128, sinks."""
    step, _ = make_step([(1, 4096), (1, 3000), (200, 1000)], 16)
    caches = meta(8192, 8, 64), meta(8192, 8, 64)
    with compiling(capability, triton_attention, triton_merge) as found:
        for window in (0, 128):
            plan = TritonAttentionPlan(step, HeadCounts(64, 8, 64), torch.bfloat16, window=window)
            triton_attention.paged_attention(meta(202, 64, 64), *caches, plan, 0.1, meta(64, dtype=torch.float32))
    report(found)
    assert found[2].matrix_unit == {90: "wgmma", 100: "tcgen05.mma"}[capability]  # prefill
    assert all(item.spills <= 16 for item in found)


def test_float32_compiles() -> None:
    step, _ = make_step([(1, 4096), (200, 1000)], 16)
    cache = meta(8192, 4, 128, dtype=torch.float32)
    with compiling(90, triton_attention, triton_merge) as found:
        plan = TritonAttentionPlan(step, HeadCounts(32, 4, 128), torch.float32)
        triton_attention.paged_attention(meta(201, 32, 128, dtype=torch.float32), cache, cache, plan, 0.1)
    report(found)
    assert all(item.spills == 0 for item in found)
