"""MLA against its specification: decode, prefill, chunks of context, mixed steps, odd sizes, garbage next door."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import TORCH_AND_ISAS
from mla_case import SCALE, SHAPE, MlaCase, make_case
from rounding import assert_within, mla_bound

from mla import latent_kv, reference
from mla.attention import TorchMla
from mla.merge import merge
from mla.plan import Limits, make_plan, prefers_absorbed
from mla.protocol import MlaShape, PrefillMode
from native import Isa, isa, limit_isa

torch.set_num_threads(1)

SMALL = Limits(
    absorbed_keys=12, absorbed_piece=12, naive_keys=12, absorbed_tile=3, naive_tile=5
)  # many groups, pieces and tiles
WIDE = Limits(absorbed_keys=4096, absorbed_piece=4096, naive_keys=4096, absorbed_tile=64, naive_tile=64)

STEPS = {
    "one token": [(1, 1)],
    "one decode": [(1, 9)],
    "decodes": [(1, 5), (1, 1), (1, 17), (1, 16), (1, 30)],
    "prefill": [(7, 7)],
    "prefills": [(7, 7), (2, 2), (13, 13), (7, 7), (5, 5)],
    "chunk after context": [(6, 25)],
    "chunks after context": [(6, 25), (2, 40), (9, 12), (11, 60)],
    "mixed": [(1, 11), (1, 3), (5, 5), (4, 20), (19, 19), (3, 50)],
    "long": [(1, 131), (40, 140)],
    "block edges": [(1, 4), (1, 8), (4, 4), (8, 8), (4, 12)],
    "no tokens": [],
}


@pytest.fixture(params=TORCH_AND_ISAS)
def level(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """Decodes in torch (NONE) and in the native kernels of each instruction set that this CPU has."""
    before = isa()
    yield limit_isa(request.param)
    limit_isa(before)


def run(case: MlaCase, prefill: PrefillMode, limits: Limits) -> torch.Tensor:
    with torch.inference_mode():
        backend = TorchMla(case.shape, SCALE, prefill, case.q_nope.dtype, limits)
        return backend.prepare(case.step)(*case.tensors)


def specified(case: MlaCase) -> tuple[torch.Tensor, torch.Tensor]:
    """(the result, its bound)."""
    q_nope, q_pe, cache, w_uk, w_uv = case.tensors
    wanted = reference.naive(q_nope, q_pe, cache, case.step, w_uk, w_uv, SCALE)
    return wanted, mla_bound(case.tensors, case.step, SCALE)


@pytest.mark.parametrize("limits", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("prefill", ["naive", "absorbed", "auto"])
@pytest.mark.parametrize("name", STEPS)
def test_equals_the_reference(name: str, level: Isa, prefill: PrefillMode, limits: Limits) -> None:
    case = make_case(STEPS[name])
    assert_within(run(case, prefill, limits), *specified(case))


@pytest.mark.parametrize("prefill", ["naive", "absorbed"])
@pytest.mark.parametrize("limits", [SMALL, WIDE], ids=["small", "wide"])
def test_bfloat16(level: Isa, prefill: PrefillMode, limits: Limits) -> None:
    case = make_case(STEPS["mixed"], dtype=torch.bfloat16)
    assert_within(run(case, prefill, limits), *specified(case))


def test_absorbed_reference_equals_naive_reference() -> None:
    case = make_case(STEPS["mixed"])
    q_nope, q_pe, cache, w_uk, w_uv = case.tensors
    out = reference.absorbed(q_nope, q_pe, cache, case.step, w_uk, w_uv, SCALE)
    assert_within(out, *specified(case))


@pytest.mark.parametrize("prefill", ["naive", "absorbed"])
@pytest.mark.parametrize("limits", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_others_do_not_leak(level: Isa, prefill: PrefillMode, limits: Limits, dtype: torch.dtype) -> None:
    """Not a bit of the result depends on what stands in rows that belong to no token of the sequence."""
    zeros = run(make_case(STEPS["mixed"], garbage=0.0, dtype=dtype), prefill, limits)
    noise = run(make_case(STEPS["mixed"], garbage=1e30, dtype=dtype), prefill, limits)
    assert torch.equal(zeros, noise)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_step(data: st.DataObject) -> None:
    decodes = data.draw(st.lists(st.tuples(st.just(1), st.integers(1, 70)), max_size=6))
    prefills = data.draw(st.lists(st.tuples(st.integers(2, 30), st.integers(0, 60)), max_size=4))
    lengths = decodes + [(queries, queries + context) for queries, context in prefills]
    limits = Limits(
        absorbed_keys=data.draw(st.sampled_from([1, 7, 16, 64, 1000])),
        absorbed_piece=data.draw(st.sampled_from([1, 7, 16, 64, 1000])),
        naive_keys=data.draw(st.sampled_from([1, 7, 16, 64, 1000])),
        absorbed_tile=data.draw(st.integers(1, 40)),
        naive_tile=data.draw(st.integers(1, 40)),
    )
    case = make_case(lengths, block_size=data.draw(st.sampled_from([1, 3, 16])), seed=data.draw(st.integers(0, 99)))
    prefill = data.draw(st.sampled_from(["naive", "absorbed", "auto"]))
    assert_within(run(case, prefill, limits), *specified(case))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_width(data: st.DataObject) -> None:
    """No kernel is asked for a width that it cannot do: odd ones, in bfloat16, go to torch."""
    widths = st.integers(1, 40)
    shape = MlaShape(
        num_heads=data.draw(st.integers(1, 4)),
        qk_nope_head_dim=data.draw(widths),
        qk_rope_head_dim=data.draw(widths),
        latent_dim=data.draw(widths | st.sampled_from([33, 129])),
        v_head_dim=data.draw(widths),
    )
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    case = make_case(STEPS["mixed"], shape=shape, dtype=dtype, garbage=1.0, seed=data.draw(st.integers(0, 99)))
    case.w_uk.mul_(0.1)
    ours = run(case, data.draw(st.sampled_from(["naive", "absorbed", "auto"])), WIDE).float()
    expected = specified(case)[0].float()
    tolerance = 3e-5 if dtype is torch.float32 else 0.03
    assert float((ours - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def test_published_shape_with_default_limits(level: Isa) -> None:
    """A head of DeepSeek-V3 and contexts beyond one piece, with the limits that serving uses."""
    shape = MlaShape(num_heads=2, qk_nope_head_dim=128, qk_rope_head_dim=64, latent_dim=512, v_head_dim=128)
    limits = Limits.of(shape, 4)
    longest = limits.absorbed_piece + 100
    case = make_case([(1, longest), (1, 30), (70, longest)], block_size=16, shape=shape, garbage=1.0)
    case.w_uk.mul_(0.1)  # scores of the size that trained models have
    wanted, allowed = specified(case)
    for prefill in ("naive", "absorbed"):
        assert_within(run(case, prefill, limits), wanted, allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_native_decodes_read_nothing_but_their_rows(level: Isa, dtype: torch.dtype, threads: int) -> None:
    """NaN next door, contexts of several chunks, and more threads than one."""
    if level is Isa.NONE:
        pytest.skip("torch multiplies the padding, too")
    lengths = [(1, keys) for keys in (1, 700, 256, 257, 30)]
    case, clean = (make_case(lengths, garbage=g, dtype=dtype) for g in (torch.nan, 0.0))
    torch.set_num_threads(threads)
    ours = run(case, "auto", WIDE)
    torch.set_num_threads(1)
    assert_within(ours, *specified(clean))


def test_merge_of_parts_is_attention_over_all() -> None:
    scores, values = torch.randn(5, 12), torch.randn(12, 3)
    out, lse = torch.zeros(5, 3), torch.full((5,), -torch.inf)
    for keys in (slice(0, 4), slice(4, 5), slice(5, 12)):
        merge(out, lse, scores[:, keys].softmax(-1) @ values[keys], scores[:, keys].logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_auto_prefers_absorbed_for_few_queries_after_a_long_context() -> None:
    shape = MlaShape(num_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64, latent_dim=512, v_head_dim=128)
    assert prefers_absorbed(shape, 8, 4096)
    assert not prefers_absorbed(shape, 1024, 1024)
    step = make_case([(1, 9), (8, 4096), (64, 64)], shape=SHAPE).step
    plan = make_plan(step, shape, "auto", Limits.of(shape, 2))
    assert (plan.absorbed.num_rows, plan.naive.num_rows) == (9, 64)


def test_decodes_of_similar_length_stay_where_they_are() -> None:
    """The common step needs no reordering of queries or results."""
    plan = make_plan(make_case([(1, 30), (1, 33), (1, 31)]).step, SHAPE, "auto", WIDE)
    assert plan.restore is None and plan.absorbed.rows is None and len(plan.absorbed.groups) == 1


def test_write_then_gather() -> None:
    cache = torch.zeros(12, 5)
    entry = torch.randn(3, 5)
    latent_kv.write(cache, entry, torch.tensor([4, 5, 11]))
    torch.testing.assert_close(latent_kv.gather(cache, torch.tensor([1, 2]), 4)[[0, 1, 7]], entry)
