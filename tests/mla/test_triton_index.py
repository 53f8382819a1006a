"""The choice of keys in Triton equals torch's, and compiles for Hopper and Blackwell."""

from __future__ import annotations

import pytest
import torch
from mla_case import SCALE, SHAPE
from rounding import assert_within
from sparse_case import make_sparse_case
from torch import Tensor
from triton_support import as_on_gpu, compiling, report, running

from layers.triton import merge as triton_merge
from mla import index, index_keys
from mla.index import IndexQueries, IndexShape
from mla.sparse import SparseMla
from mla.triton import decode as triton_decode
from mla.triton import index as triton_index
from native import Isa, isa, limit_isa

pytestmark = pytest.mark.triton


def rows_of(case_lengths: list[tuple[int, int]], topk: int, fp8: bool, mapped: bool, dtype: torch.dtype) -> None:
    case = make_sparse_case(case_lengths, IndexShape(20, 12, topk), dtype=dtype)
    step = case.step
    lens = [int(position) + 1 for position in step.positions_T]
    sequences = [b for b in range(step.num_sequences) for _ in range(step.query_starts[b + 1] - step.query_starts[b])]
    parts = tuple(
        (step.query_starts[b], step.query_starts[b + 1], b, step.kv_lens[b]) for b in range(step.num_sequences)
    )
    cache = index_keys.pack(case.keys) if fp8 else case.keys
    sequence = torch.tensor(sequences, dtype=torch.int64) if mapped else None
    lens_U = torch.tensor(lens, dtype=torch.int64)
    queries = IndexQueries(lens_U, sequence, step.block_table_BN, step.block_size, parts)
    before = isa()
    limit_isa(Isa.NONE)
    wanted = index.choose_keys(case.index_q, case.index_weight, cache, queries, topk)
    limit_isa(before)
    with running(triton_index):
        ours = triton_index.choose(
            case.index_q, case.index_weight, cache, lens_U, sequence, step.block_table_BN, step.block_size,
            max(step.kv_lens, default=0), topk,
        )  # fmt: skip
    assert torch.equal(ours[0], wanted.rows_UK) and torch.equal(ours[1], wanted.counts_U)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [False, True])
def test_equals_torch(fp8: bool, dtype: torch.dtype) -> None:
    """Keys of more than one tile and more than one block of the threshold; queries with fewer keys than are chosen."""
    rows_of([(1, 5), (1, 70), (1, 8), (1, 1100)], 8, fp8, False, dtype)
    rows_of([(1, 90), (5, 40), (3, 3)], 30, fp8, True, dtype)


def test_more_scores_than_are_kept_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_index, "SCORE_BYTES", 4 * 128 * 3)
    rows_of([(8, 70)], 9, False, True, torch.float32)


def test_of_equal_scores_the_first() -> None:
    table, lens = torch.arange(50).view(1, 50), torch.tensor([200])
    q, weight = torch.ones(1, 2, 4), torch.tensor([[1.0, -1.0]])
    for keys in (torch.zeros(200, 4), torch.ones(200, 4), -torch.ones(200, 4)):
        with running(triton_index):
            chosen, counts = triton_index.choose(q, weight, keys, lens, None, table, 4, 200, 30)
        assert chosen[0].tolist() == list(range(30)) and counts.tolist() == [30]


@pytest.mark.parametrize("fp8", [False, True])
def test_sparse_attention_through_triton(fp8: bool) -> None:
    """Chosen rows are blocks of one row to the decode kernel."""
    case = make_sparse_case([(1, 30), (1, 5), (12, 20)], dtype=torch.bfloat16 if fp8 else torch.float32, fp8=fp8)
    dtype = case.mla.q_nope.dtype
    with as_on_gpu(), torch.inference_mode():
        backend = SparseMla(SHAPE, case.index, SCALE, "auto", dtype, torch.device("cpu"), fp8_cache=fp8)
        ours = backend.prepare(case.step)(*case.tensors)  # type: ignore[arg-type]
        again = backend.prepare(case.step, captured=True)(*case.tensors)  # type: ignore[arg-type]
    assert_within(ours, *case.specified())
    assert torch.equal(ours, again)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("heads", [64, 32])
def test_compiles_for_the_real_models(capability: int, heads: int) -> None:
    """DeepSeek-V3.2 and GLM-5: index keys of 128 in both formats, 2,048 chosen; attention over blocks of one row."""
    weight = meta(4, heads, dtype=torch.float32)
    lens, sequence = meta(4, dtype=torch.int64), meta(4, dtype=torch.int64)
    table = meta(4, 600, dtype=torch.int64)
    with compiling(capability, triton_index, triton_decode, triton_merge) as found:
        for cache in (meta(6400, 128), meta(6400, 132, dtype=torch.uint8)):
            for mapped in (None, sequence):
                chosen, counts = triton_index.choose(
                    meta(4, heads, 128), weight, cache, lens, mapped, table, 64, 32768, 2048
                )
        triton_decode.decode(meta(4, 128, 512), meta(4, 128, 64), meta(6400, 576), chosen, counts, 1, 2048, 0.1)
    report(found)
    assert all(item.spills == 0 for item in found)
    assert found[0].matrix_unit == {90: "wgmma", 100: "tcgen05.mma"}[capability]
