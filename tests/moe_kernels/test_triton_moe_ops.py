"""Routing, permutation, quantisation and activation in Triton equal the reference, and compile for Hopper and Blackwell."""

from __future__ import annotations

import pytest
import torch
from amounts import combined
from torch import Tensor
from triton_support import compiling, report, running

from layers.triton import silu_mul as triton_silu_mul
from moe_kernels import Layout, quant, reference, tokens
from moe_kernels.triton import permute as triton_permute
from moe_kernels.triton import quant as triton_quant
from moe_kernels.triton import topk as triton_topk

pytestmark = pytest.mark.triton


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_expert(choice: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The order of a token's experts is not defined."""
    expert_TK, order = choice[0].sort(1)
    assert choice[0].dtype == torch.int64 and choice[1].dtype == torch.float32
    return expert_TK, choice[1].gather(1, order)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 2), (16, 4), (60, 8), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_topk(num_experts: int, top_k: int, renormalize: bool, dtype: torch.dtype) -> None:
    # Numbers that bfloat16 has, none of them twice: what equal ones give is not defined.
    steps_TE = torch.stack([torch.randperm(num_experts, generator=torch.Generator().manual_seed(t)) for t in range(3)])
    logits_TE = (steps_TE / 8).to(dtype)
    with running(triton_topk):
        ours = triton_topk.softmax_topk(logits_TE, top_k, renormalize)
    expected = by_expert(reference.softmax_topk(logits_TE, top_k, renormalize))
    for got, want in zip(by_expert(ours), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("num_experts", "groups", "kept", "top_k"),
    [(24, 8, 3, 4), (20, 4, 2, 3), (12, 1, 1, 4), (8, 2, 2, 2), (18, 3, 1, 6)],
)
def test_grouped(num_experts: int, groups: int, kept: int, top_k: int) -> None:
    logits_TE, bias_E = normal(5, num_experts), normal(num_experts, seed=1) * 0.3
    with running(triton_topk):
        softmax = triton_topk.grouped_softmax_topk(logits_TE, top_k, groups, kept, 1.5)
        sigmoid = [
            triton_topk.grouped_sigmoid_topk(logits_TE, bias_E, top_k, groups, kept, renormalize, 2.5)
            for renormalize in (False, True)
        ]
    want = [reference.grouped_softmax_topk(logits_TE, top_k, groups, kept, 1.5)]
    want += [
        reference.grouped_sigmoid_topk(logits_TE, bias_E, top_k, groups, kept, renormalize, 2.5)
        for renormalize in (False, True)
    ]
    for ours, expected in zip([softmax, *sigmoid], want, strict=True):
        for got, right in zip(by_expert(ours), by_expert(expected), strict=True):
            torch.testing.assert_close(got, right)


def test_experts_exist_whatever_the_scores_are() -> None:
    logits_TE = torch.full((2, 5), float("nan"))
    logits_TE[1] = float("-inf")
    with running(triton_topk):
        expert_TK, _ = triton_topk.softmax_topk(logits_TE, 3, False)
        assert triton_topk.softmax_topk(logits_TE[:0], 3, False)[0].shape == (0, 3)
    assert ((expert_TK >= 0) & (expert_TK < 5)).all()


def routing(num_tokens: int, top_k: int, num_slots: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    slots = [torch.randperm(num_slots, generator=generator)[:top_k] for _ in range(num_tokens)]
    slot_TK = torch.stack(slots) if slots else torch.empty(0, top_k, dtype=torch.int64)
    return slot_TK, torch.rand(num_tokens, top_k, generator=generator)


@pytest.mark.parametrize(
    ("dtype", "sizes"), combined([torch.float32, torch.bfloat16], [(5, 2, 3, 2), (0, 2, 3, 1), (70, 3, 5, 1)])
)
def test_permute_and_back(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    """sizes: tokens, choices of each, slots of a rank, ranks."""
    num_tokens, top_k, num_slots, num_ranks = sizes
    slot_TK, weight_TK = routing(num_tokens, top_k, num_slots * num_ranks)
    x_TD = normal(num_tokens, 6, seed=2).to(dtype)[:, ::2]
    for rank in range(num_ranks):
        x_RD, rows_S, pair_R = reference.permute(x_TD, slot_TK - rank * num_slots, num_slots)
        with running(triton_permute):
            results = [
                triton_permute.permute_some(
                    x_TD, slot_TK.to(torch.int32), weight_TK.T.contiguous().T, rank * num_slots, num_slots
                )
            ]
            if num_ranks == 1:
                results.append(triton_permute.permute(x_TD, slot_TK, weight_TK, num_slots))
            for batch, bags in results:
                assert batch.layout is Layout.RAGGED and torch.equal(batch.x, x_RD)
                assert batch.rows_S.dtype == torch.int32 and torch.equal(batch.rows_S, rows_S)
                y_RD = batch.x * 2 + 1
                out_TD = torch.full((num_tokens, 4), float("nan"), dtype=dtype)[:, :3]
                ours = triton_permute.unpermute(y_RD, bags, out_TD)
                expected = reference.unpermute(y_RD, pair_R, weight_TK, torch.empty(num_tokens, 3, dtype=dtype))
                torch.testing.assert_close(ours, expected)
                torch.testing.assert_close(triton_permute.sum_rows(y_RD, bags).to(dtype), expected)


def test_permute_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_permute, "_PAIRS", 4)
    monkeypatch.setattr(triton_permute, "_BLOCKS", 2)
    slot_TK, weight_TK = routing(11, 2, 5)
    x_TD = normal(11, 3)
    x_RD, rows_S, pair_R = reference.permute(x_TD, slot_TK - 1, 3)
    with running(triton_permute):
        batch, bags = triton_permute.permute_some(x_TD, slot_TK, weight_TK, 1, 3)
        ours = triton_permute.unpermute(batch.x, bags, torch.empty(11, 3))
    assert torch.equal(batch.x, x_RD) and torch.equal(batch.rows_S, rows_S)
    torch.testing.assert_close(ours, reference.unpermute(x_RD, pair_R, weight_TK, torch.empty(11, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = normal(3, 2, 14).to(dtype)
    with running(triton_silu_mul):
        ours = triton_silu_mul.silu_mul(gate_up)
        assert triton_silu_mul.silu_mul(gate_up[:0]).shape == (0, 2, 7)
    torch.testing.assert_close(ours, reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "hidden"), [(0, 128), (3, 300), (17, 128)])
def test_quantize_has_the_bits_of_torch(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x_RD = (normal(rows, hidden) * 30).to(dtype)
    x_RD[:1, :128] = 0.0
    with running(triton_quant):
        value_RD, scale_RB = triton_quant.quantize_rows(x_RD)
        back_RD = triton_quant.dequantize_rows(value_RD, scale_RB, dtype)
    expected_RD, expected_RB = quant.quantize_rows(x_RD)
    assert torch.equal(value_RD.view(torch.uint8), expected_RD.view(torch.uint8))
    assert torch.equal(scale_RB, expected_RB)
    assert torch.equal(back_RD, quant.dequantize_rows(expected_RD, expected_RB, dtype))


def test_quantize_what_is_not_finite() -> None:
    x_RD = torch.zeros(2, 256)
    x_RD[0, 200], x_RD[1, 0] = float("nan"), float("inf")
    with running(triton_quant):
        back_RD = triton_quant.dequantize_rows(*triton_quant.quantize_rows(x_RD), torch.float32)
    assert back_RD[0, 200].isnan() and not back_RD[0, :128].any() and back_RD[1, 0].isnan()


@pytest.mark.parametrize("width", [128, 300])
def test_silu_mul_quantize(width: int) -> None:
    """Rows past a padded slot's count are NaN, and their results not looked at."""
    gate_up = normal(3, 20, 2 * width, seed=4).bfloat16()
    rows_S = torch.tensor([20, 0, 7], dtype=torch.int32)
    here = torch.arange(20) < rows_S[:, None]
    expected_value, expected_scale = quant.silu_mul_quantize(gate_up)
    with running(triton_quant):
        for counts, rows in ((None, torch.ones_like(here)), (rows_S, here)):
            gate_up[~rows] = float("nan")
            value, scale = triton_quant.silu_mul_quantize(gate_up, counts)
            torch.testing.assert_close(scale[rows], expected_scale[rows], rtol=1e-2, atol=0)
            wide, expected = (
                quant.dequantize_rows(v[rows], s[rows], torch.float32)
                for v, s in ((value, scale), (expected_value, expected_scale))
            )
            # A number between two of FP8's may be rounded to either.
            torch.testing.assert_close(wide, expected, rtol=0.13, atol=1e-3)


@pytest.mark.parametrize("first_slot", [0, 3])
def test_tokens_take_rows_without_asking_how_many(first_slot: int) -> None:
    slot_TK, weight_TK = routing(7, 3, 9)
    x_TD = normal(7, 40)
    expected, row_N = tokens.take_rows(x_TD, slot_TK, first_slot, 4)
    y_ND = normal(21, 40, seed=2)
    want_TD = tokens.sum_pairs(y_ND, row_N, weight_TK, torch.empty(7, 40))
    reference_rows, rows_S, pair_R = reference.permute(x_TD, slot_TK - first_slot, 4)
    assert torch.equal(expected.rows_S, rows_S) and torch.equal(expected.x[: len(pair_R)], reference_rows)
    torch.testing.assert_close(want_TD, reference.unpermute(y_ND, pair_R, weight_TK, torch.empty(7, 40)))
    with running(triton_permute):
        batch, ours_N = triton_permute.take_rows(x_TD, slot_TK, first_slot, 4)
        y_ND[len(pair_R) :] = float("nan")  # what no pair names
        out_TD = triton_permute.sum_pairs(y_ND, ours_N, weight_TK, torch.empty(7, 40))
        assert triton_permute.take_rows(x_TD[:0], slot_TK[:0], 0, 4)[0].x.shape == (0, 40)
    assert torch.equal(batch.rows_S, rows_S) and torch.equal(ours_N, row_N)
    assert torch.equal(batch.x[: len(pair_R)], reference_rows)
    torch.testing.assert_close(out_TD, want_TD)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("capability", [90, 100])
def test_compiles_for_published_shapes(capability: int) -> None:
    """DeepSeek-V3: 256 experts in 8 groups, 8 of them per token, rows of 7168."""
    f32 = torch.float32
    with compiling(capability, triton_topk, triton_permute, triton_silu_mul, triton_quant) as found:
        # Steps of different sizes share what was compiled: nothing is compiled while requests wait.
        for num_tokens in (128, 1, 77):
            logits_TE = meta(num_tokens, 256, dtype=f32)
            triton_topk.grouped_sigmoid_topk(logits_TE, meta(256, dtype=f32), 8, 8, 4, True, 2.5)
            triton_topk.softmax_topk(logits_TE, 8, True)
            slot_TK, weight_TK = meta(num_tokens, 8, dtype=torch.int64), meta(num_tokens, 8, dtype=f32)
            x_TD = meta(num_tokens, 7168)
            batch, bags = triton_permute.permute(x_TD, slot_TK, weight_TK, 256)
            triton_permute.unpermute(batch.x, bags, meta(num_tokens, 7168))
            triton_silu_mul.silu_mul(meta(num_tokens, 4096))
            triton_quant.dequantize_rows(*triton_quant.quantize_rows(x_TD), torch.bfloat16)
            triton_quant.silu_mul_quantize(meta(8, num_tokens, 4096), meta(8, dtype=torch.int32))
            rows, row_N = triton_permute.take_rows(x_TD, slot_TK, 0, 256)
            triton_permute.sum_pairs(rows.x, row_N, weight_TK, meta(num_tokens, 7168))
    report(found)
    assert len(found) == 12 and all(item.spills == 0 for item in found)
