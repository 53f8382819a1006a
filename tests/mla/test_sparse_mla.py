"""Sparse attention over latents against its specification: every query over the keys that its index scores choose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import TORCH_AND_ISAS
from mla_case import SCALE, SHAPE
from msgspec.structs import replace
from rounding import assert_within
from sparse_case import INDEX, SparseCase, make_sparse_case

from mla import index, index_keys
from mla.attention import TorchMla
from mla.index import IndexShape
from mla.protocol import MlaShape, PrefillMode
from mla.sparse import SparseMla, SparseStep, chooses
from native import Isa, isa, limit_isa

torch.set_num_threads(1)

STEPS = {
    "decodes": [(1, 5), (1, 8), (1, 9), (1, 40), (1, 1)],
    "a prompt over the limit": [(30, 30)],
    "chunks below, across and beyond": [(4, 6), (6, 12), (5, 40), (3, 11)],
    "mixed": [(1, 30), (1, 3), (5, 5), (12, 12), (2, 9)],
    "few keys": [(1, 8), (7, 7)],
    "a sequence without tokens": [(1, 20), (0, 12), (3, 30)],
    "no tokens": [],
}


@pytest.fixture(params=TORCH_AND_ISAS)
def level(request: pytest.FixtureRequest) -> Iterator[Isa]:
    before = isa()
    yield limit_isa(request.param)
    limit_isa(before)


def prepared(case: SparseCase, prefill: PrefillMode = "auto", captured: bool = False) -> SparseStep:
    cpu = torch.device("cpu")
    dtype = case.mla.q_nope.dtype
    backend = SparseMla(case.mla.shape, case.index, SCALE, prefill, dtype, cpu, fp8_cache=case.fp8)
    return backend.prepare(case.step, captured)


@torch.inference_mode()
def run(case: SparseCase, prefill: PrefillMode = "auto", captured: bool = False) -> torch.Tensor:
    return prepared(case, prefill, captured)(*case.tensors)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefill", ["naive", "absorbed"])
@pytest.mark.parametrize("name", STEPS)
def test_equals_the_reference(name: str, level: Isa, prefill: PrefillMode) -> None:
    case = make_sparse_case(STEPS[name])
    assert_within(run(case, prefill), *case.specified())
    assert_within(run(case, prefill, captured=True), *case.specified())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_widths_of_the_real_models(level: Isa, dtype: torch.dtype, fp8: bool) -> None:
    """Scores of bfloat16 numbers are exact to the bits of float32, so that all choose alike."""
    shape = MlaShape(num_heads=8, qk_nope_head_dim=128, qk_rope_head_dim=64, latent_dim=512, v_head_dim=128)
    case = make_sparse_case([(1, 130), (9, 90)], IndexShape(32, 128, 40), shape, dtype, 16, fp8)
    assert_within(run(case), *case.specified())


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5),
    topk=st.integers(1, 45),
    heads=st.integers(16, 70),
    dim=st.integers(1, 20).map(lambda half: 2 * half),
    block_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 99),
)
def test_any_sizes(lengths: list[tuple[int, int]], topk: int, heads: int, dim: int, block_size: int, seed: int) -> None:
    parts = sorted(((q, q + context) for q, context in lengths), key=lambda part: part[0] != 1)
    case = make_sparse_case(parts, IndexShape(heads, dim, topk), block_size=block_size, seed=seed)
    assert_within(run(case), *case.specified())


def test_with_few_keys_it_is_dense_attention_bit_by_bit(level: Isa) -> None:
    case = make_sparse_case([(1, 8), (1, 3), (5, 7)])
    dense = TorchMla(SHAPE, SCALE, "auto", torch.float32).prepare(case.step)(*case.mla.tensors)
    assert not chooses(case.step, INDEX.topk, captured=False)
    assert torch.equal(run(case), dense)
    if level > Isa.NONE:  # decodes of a captured step go through rows whatever their length
        decodes = make_sparse_case([(1, 8), (1, 3)])
        dense = TorchMla(SHAPE, SCALE, "auto", torch.float32).prepare(decodes.step)(*decodes.mla.tensors)
        assert torch.equal(run(decodes, captured=True), dense)


def test_a_layer_without_an_indexer_uses_what_the_last_one_has_chosen() -> None:
    case = make_sparse_case(STEPS["mixed"])
    q_nope, q_pe, index_q, weight, cache, _keys, w_uk, w_uv = case.tensors
    step = prepared(case)
    first = step(*case.tensors)  # type: ignore[arg-type]
    nothing = index_q[:, :0], weight[:, :0]
    assert torch.equal(step(q_nope, q_pe, *nothing, cache, None, w_uk, w_uv), first)
    with pytest.raises(AssertionError, match="first layer"):
        prepared(case)(q_nope, q_pe, *nothing, cache, None, w_uk, w_uv)


def test_of_equal_scores_the_first_are_chosen(level: Isa) -> None:
    """Keys without any score: the first ones; and some that stand out."""
    case = make_sparse_case([(1, 30), (2, 25)], IndexShape(4, 6, 7))
    case.keys.zero_()
    assert_rows(case, [list(range(7))] * 3)
    rows = case.step.block_table_BN[0].repeat_interleave(4) * 4 + torch.arange(4).repeat(
        case.step.block_table_BN.shape[1]
    )
    case.index_q.fill_(1.0)
    case.index_weight.fill_(1.0)
    case.keys[rows[29]], case.keys[rows[11]] = 1.0, 2.0
    assert_rows(case, [[0, 1, 2, 3, 4, 11, 29]])


def assert_rows(case: SparseCase, positions: list[list[int]]) -> None:
    """The first queries' positions."""
    queries = prepared(case)._parts.queries  # type: ignore[union-attr]
    chosen = index.choose_keys(case.index_q, case.index_weight, case.keys, queries, case.index.topk)
    sequences = [0, 1, 1]
    for query, expected in enumerate(positions):
        table = case.step.block_table_BN[sequences[query]]
        wanted = [int(table[at // 4]) * 4 + at % 4 for at in expected]
        assert chosen.rows_UK[query].tolist() == wanted


def test_neither_company_nor_threads_change_a_result(level: Isa) -> None:
    together = make_sparse_case([(1, 70), (1, 12), (20, 33)], dtype=torch.bfloat16)
    all_THV = run(together)
    q_nope, q_pe, index_q, weight, cache, keys, w_uk, w_uv = together.tensors
    alone = replace(
        together.step, query_starts=(0, 1), kv_lens=(70,), kv_lens_B=torch.tensor([70]), num_decodes=1,
        block_table_BN=together.step.block_table_BN[:1],
    )  # fmt: skip
    cpu = torch.device("cpu")
    for threads in (1, 2, 5) if level > Isa.NONE else ():
        torch.set_num_threads(threads)
        backend = SparseMla(SHAPE, INDEX, SCALE, "auto", torch.bfloat16, cpu)
        one = backend.prepare(alone)(q_nope[:1], q_pe[:1], index_q[:1], weight[:1], cache, keys, w_uk, w_uv)
        assert torch.equal(one[0], all_THV[0]) and torch.equal(run(together), all_THV)
    torch.set_num_threads(1)


def test_index_keys_in_fp8_come_back_within_a_sixteenth() -> None:
    key_TI = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    key_TI[2] = 0.0
    row_TW = index_keys.pack(key_TI)
    assert row_TW.shape == (5, 132)
    back_TI = index_keys.unpack(row_TW)
    assert torch.equal(back_TI, back_TI.bfloat16().float())
    step_TX = key_TI.abs().amax(1, keepdim=True) / 448 / 128
    assert ((back_TI - key_TI).abs() <= key_TI.abs() / 15 + step_TX).all()
