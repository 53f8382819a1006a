"""The small native operations equal torch's, one after another, on every instruction set that this CPU has.

Legend: T tokens, D hidden size, H query heads, E experts, K chosen.
"""

from __future__ import annotations

import pytest
import torch
from isas import EVERY_ISA, ISAS
from rounding import FUNCTION_ULPS, assert_within, bound, matmul_bound, unit
from torch import Tensor

from layers.norm import rms_norm
from layers.residual import keep
from layers.rope import apply_rope
from moe_kernels import biased_softmax_topk, reference
from native import Isa, limit_isa, routing, rows

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = [
    pytest.mark.skipif(not ISAS, reason="the native kernels are not there"),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("level", EVERY_ISA),
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, wanted: Tensor, terms: int = 1, magnitude: Tensor | None = None) -> None:
    """Products of numbers that are sums of `terms` terms or functions of them; in bfloat16 up to two of them are rounded
    on the way, and may then fall on the neighbour. magnitude: of what is added at the end."""
    size = (wanted if magnitude is None else magnitude).double().abs()
    on_the_way = 2 * unit(wanted.dtype) + FUNCTION_ULPS * unit(torch.float32)
    assert_within(ours, wanted, bound(terms, size) + on_the_way * size)


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (1, 1024), (3, 37), (50, 2048)])
def test_norm_and_residual(level: Isa, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual, weight = normal(*shape).to(dtype), normal(*shape, seed=1).to(dtype), normal(shape[1], seed=2).to(dtype)
    limit_isa(Isa.NONE)
    wanted_sum = residual + x
    wanted = rms_norm(wanted_sum.clone(), weight, 1e-6)
    limit_isa(level)
    ours = rows.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, wanted_sum)
    close(ours, wanted, shape[1])
    apart = torch.full((shape[0], shape[1] + 3), torch.nan, dtype=dtype)
    apart[:, 1 : shape[1] + 1] = wanted_sum
    close(rows.rms_norm(apart[:, 1 : shape[1] + 1], weight, 1e-6), wanted, shape[1])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "kv_heads", "dim"), [(0, 2, 1, 8), (1, 3, 1, 6), (5, 4, 2, 128), (70, 16, 8, 64)]
)
def test_heads(
    level: Isa, dtype: torch.dtype, normed: bool, num_tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    limit_isa(level)
    qkv = normal(num_tokens, heads + 2 * kv_heads, dim).to(dtype)
    norm = normal(heads + kv_heads, dim, seed=1).to(dtype) if normed else None
    angle = normal(num_tokens, 1, dim // 2, seed=2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    rope = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    slots = torch.randperm(num_tokens + 3)[:num_tokens]
    caches = [torch.full((num_tokens + 3, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    qk = qkv[:, : heads + kv_heads].clone()
    if norm is not None:
        limit_isa(Isa.NONE)
        qk = rms_norm(qk, norm, 1e-6)
        limit_isa(level)
    wanted, values = apply_rope(qk, *rope), qkv[:, heads + kv_heads :].clone()
    rows.qk_norm_rope_cache(qkv, heads, norm, 1e-6, rope, *caches, slots)
    # The two terms of a rotated number may all but cancel.
    size = qk.float().abs().maximum(qk.float().abs().roll(dim // 2, -1)) * 2
    close(qkv[:, :heads], wanted[:, :heads], dim, size[:, :heads])
    close(caches[0][slots], wanted[:, heads:], dim, size[:, heads:])
    assert torch.equal(caches[1][slots], values)
    assert int(caches[0].isnan().sum()) == int(caches[1].isnan().sum()) == 3 * kv_heads * dim


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 37), (600, 128)])
def test_silu_mul(level: Isa, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    limit_isa(level)
    gate_up = (normal(shape[0], 2 * shape[1]) * 8).to(dtype)
    close(rows.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 37), (20, 5000)])
def test_best(level: Isa, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """The first of equals: in bfloat16 there are many."""
    limit_isa(level)
    x = normal(*shape).to(dtype)
    x[::2, shape[1] // 2 :] = torch.inf
    x[1::4] = -torch.inf
    wanted = torch.from_numpy(x.float().numpy().argmax(-1))
    assert torch.equal(rows.best(x), wanted)
    place = torch.full((shape[0],), -1)
    assert rows.best(torch.cat((x, x + 1), 1)[:, : shape[1]], place) is place and torch.equal(place, wanted)


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 37), (600, 128)])
def test_sigmoid_gate(level: Isa, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    limit_isa(level)
    x = normal(*shape).to(dtype)
    for width in (1, shape[1]):
        gate = (normal(shape[0], width, seed=1) * 8).to(dtype)
        close(rows.sigmoid_gate(x.clone(), gate), x * torch.sigmoid(gate))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(0, 8, 2), (1, 1, 1), (7, 5, 5), (300, 64, 8), (40, 257, 9)]
)
def test_softmax_topk(
    level: Isa, dtype: torch.dtype, renormalize: bool, num_tokens: int, num_experts: int, top_k: int
) -> None:
    limit_isa(level)
    # All different, also in bfloat16: which of equals is taken is not defined.
    logits = ((torch.rand(num_tokens, num_experts).argsort(-1) - num_experts // 2) / 16).to(dtype)
    expert, weight = routing.softmax_topk(logits, top_k, renormalize)
    wanted_expert, wanted_weight = reference.softmax_topk(logits, top_k, renormalize)
    assert torch.equal(expert, wanted_expert)
    close(weight, wanted_weight, num_experts)


def test_experts_are_distinct_whatever_the_logits(level: Isa, dtype: torch.dtype) -> None:
    limit_isa(level)
    logits = normal(30, 20).to(dtype)
    logits[::3] = torch.nan
    logits[1::3, 4:] = -torch.inf
    expert, _ = routing.softmax_topk(logits, 7, True)
    assert all(len(set(row)) == 7 and set(row) <= set(range(20)) for row in expert.tolist())


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("groups", [(64, 8, 4, 6), (64, 1, 1, 8), (6, 3, 1, 2), (256, 8, 3, 8), (5, 1, 1, 5)])
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_grouped_sigmoid_topk(
    level: Isa, dtype: torch.dtype, renormalize: bool, groups: tuple[int, int, int, int], num_tokens: int
) -> None:
    limit_isa(level)
    num_experts, num_groups, topk_groups, top_k = groups
    logits, bias = normal(num_tokens, num_experts) * 2, normal(num_experts, seed=1) * 0.1
    choice = (top_k, num_groups, topk_groups, renormalize, 2.5)
    expert, weight = routing.grouped_sigmoid_topk(logits, bias, *choice)
    wanted_expert, wanted_weight = reference.grouped_sigmoid_topk(logits, bias, *choice)
    order, wanted_order = expert.argsort(-1), wanted_expert.argsort(-1)
    assert torch.equal(expert.gather(1, order), wanted_expert.gather(1, wanted_order))
    close(weight.gather(1, order), wanted_weight.gather(1, wanted_order), top_k)


@pytest.mark.parametrize("smallest", [1e-12, 0.9])
@pytest.mark.parametrize("sizes", [(0, 8, 2), (1, 1, 1), (300, 64, 8), (40, 257, 9)])
def test_biased_softmax_topk(level: Isa, dtype: torch.dtype, sizes: tuple[int, int, int], smallest: float) -> None:
    num_tokens, num_experts, top_k = sizes
    logits, bias = normal(num_tokens, num_experts) * 2, normal(num_experts, seed=1) * 0.1
    limit_isa(Isa.NONE)
    wanted_expert, wanted_weight = biased_softmax_topk(logits, bias, top_k, smallest)
    limit_isa(level)
    expert, weight = routing.biased_softmax_topk(logits, bias, top_k, smallest)
    order, wanted_order = expert.argsort(-1), wanted_expert.argsort(-1)
    assert torch.equal(expert.gather(1, order), wanted_expert.gather(1, wanted_order))
    close(weight.gather(1, order), wanted_weight.gather(1, wanted_order), num_experts)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 37), (600, 128)])
def test_add_and_copy(level: Isa, dtype: torch.dtype, shape: tuple[int, int], threads: int) -> None:
    limit_isa(level)
    torch.set_num_threads(threads)
    x, y = normal(*shape).to(dtype), normal(*shape, seed=1).to(dtype)
    wanted = y + x
    assert rows.add(y, x) is y and torch.equal(y, wanted)
    assert torch.equal(rows.copy(torch.empty_like(x), x), x)
    for there in (level, Isa.NONE):
        limit_isa(there)
        kept, layer = torch.empty_like(x), torch.tensor(-1)
        keep(x, kept, layer, 7)
        assert torch.equal(kept, x) and layer == 7
    torch.set_num_threads(1)


@pytest.mark.parametrize("width", [1, 5, 2000])
def test_gather(level: Isa, dtype: torch.dtype, width: int) -> None:
    limit_isa(level)
    table = normal(7, width).to(dtype)
    ids = torch.tensor([6, 0, 3, 3, 7, -1])
    assert torch.equal(rows.gather(table, ids), torch.cat((table[ids[:4]], torch.zeros(2, width, dtype=dtype))))
    assert rows.gather(table, ids[:0]).shape == (0, width)


@pytest.mark.parametrize("scale", [1.0, 1.3])
@pytest.mark.parametrize("num_planes", [1, 32, 37])
def test_rope(level: Isa, dtype: torch.dtype, num_planes: int, scale: float) -> None:
    limit_isa(level)
    positions = torch.tensor([0, 1, 17, 4095, 131071])
    frequency = 10000 ** -(torch.arange(num_planes) / num_planes)
    angle = (positions[:, None] * frequency).double()
    cos, sin = (scale * angle.cos()).float().to(dtype), (scale * angle.sin()).float().to(dtype)
    found = rows.rope(positions, frequency, scale, dtype)
    tolerance = 2**-8 if dtype is torch.bfloat16 else 1e-6  # one rounding may go the other way
    for ours, wanted in zip(found, (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), strict=True):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours[:, 0].float(), wanted.float(), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", [(0, 8, 4), (1, 1, 1), (1, 64, 256), (5, 37, 19), (300, 130, 70)])
def test_dots(level: Isa, dtype: torch.dtype, sizes: tuple[int, int, int], threads: int) -> None:
    limit_isa(level)
    torch.set_num_threads(threads)
    num_rows, num_inputs, num_outputs = sizes
    # Rows lie apart, and what is between them is NaN.
    x = torch.full((num_rows, num_inputs + 3), torch.nan, dtype=dtype)[:, 1 : 1 + num_inputs]
    x[:] = normal(num_rows, num_inputs).to(dtype)
    weight = normal(num_outputs, num_inputs, seed=1)
    found = rows.dots(x, weight)
    assert_within(found, x.float() @ weight.T, matmul_bound(x, weight))
    for row in range(min(num_rows, 7)):  # of drafts the same comes as without them
        assert torch.equal(rows.dots(x[row : row + 1], weight), found[row : row + 1])
    bias = normal(num_outputs, seed=2)
    assert_within(rows.dots(x, weight, bias), x.float() @ weight.T + bias, matmul_bound(x, weight, bias))
    torch.set_num_threads(1)


@pytest.mark.parametrize("size", [1, 24, 200])
def test_norm_in_place(level: Isa, dtype: torch.dtype, size: int) -> None:
    """Of a part of wider rows, whose other parts stay."""
    limit_isa(level)
    wide, weight = normal(5, size + 9).to(dtype), normal(size, seed=1).to(dtype)
    wanted, before = rows.rms_norm(wide[:, 4 : 4 + size], weight, 1e-5), wide.clone()
    rows.rms_norm_in_place(wide[:, 4 : 4 + size], weight, 1e-5)
    assert torch.equal(wide[:, 4 : 4 + size], wanted)
    assert torch.equal(wide[:, :4], before[:, :4]) and torch.equal(wide[:, 4 + size :], before[:, 4 + size :])
