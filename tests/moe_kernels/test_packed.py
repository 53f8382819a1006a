"""Experts in the native kernels equal the reference, on every instruction set that this CPU has.

Legend: S slots, D hidden size, F expert width, T tokens, K experts per token, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import EVERY_ISA, ISAS
from moe_inputs import routing
from packed_inputs import CPU, DTYPES, FP8, PLAIN, SIZES, matrices, packed
from rounding import WHOLE_OF_8_BITS, assert_within, bound, expert_bound, unit
from torch import Tensor

from moe_kernels import ExpertBatch, Layout, TokenBatch, WeightFormat, expert_weights, permute_some, reference
from moe_kernels.activation import Activation, ExpertKind
from moe_kernels.matrix import HALVES, ScaledMatrix
from moe_kernels.packed import PackedExperts
from moe_kernels.quant import dequantize_rows, quantize_rows
from moe_kernels.weights import PlainExperts
from native import Choice, Isa, best_isa, choose, has_whole_numbers, isa, limit_isa

WHOLE = (*HALVES, WeightFormat.INT8)  # whose few rows may be multiplied as whole numbers


def always_whole(dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and isa() is Isa.AVX2


def largest_of_rows(dtype: torch.dtype, form: WeightFormat) -> tuple[int | None, int | None]:
    """As expert_bound takes it. Of 16 bits, what is rounded is less than what bfloat16 loses between the matrices."""
    first, _, last = (WHOLE_OF_8_BITS if part in HALVES and always_whole(dtype) else None for part in form.parts)
    return first, last


pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not there")


@pytest.fixture(params=EVERY_ISA)
def level(request: pytest.FixtureRequest) -> Iterator[Isa]:
    before = isa()
    yield limit_isa(request.param)
    limit_isa(before)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    choose(Choice())
    torch.set_num_threads(1)


def assert_rounding_only(
    y_RD: Tensor, batch: ExpertBatch, exact: PlainExperts, form: WeightFormat = WeightFormat.PLAIN
) -> None:
    """Every number is as near to the exact one as its dtype allows: in bfloat16 what lies between the matrices is rounded
    once, and the result once; of 4-bit weights, whose scales are in them, each where there are many rows."""
    weights = y_RD.dtype if form.parts[0] in HALVES else None
    start = 0
    for slot, count in enumerate(batch.rows_S.tolist()):
        place: tuple[int | slice, ...] = (slice(start, start + count),)
        if batch.layout is Layout.PADDED:
            place = (slot, slice(count))
        x = batch.x[place].double()
        expected = reference.expert(x, exact.gate_up_S2FD[slot], exact.down_SDF[slot])
        allowed = expert_bound(
            x, *exact.read(slot), y_RD.dtype, weights=weights, whole=largest_of_rows(y_RD.dtype, form)
        )
        assert_within(y_RD[place], expected, allowed)
        start += count


def ragged(rows: list[int], hidden: int, dtype: torch.dtype) -> ExpertBatch:
    x_RD = torch.randn(sum(rows), hidden, generator=torch.Generator().manual_seed(len(rows))).to(dtype)
    return ExpertBatch(Layout.RAGGED, x_RD, torch.tensor(rows, dtype=torch.int32))


ROWS = [[3, 0, 7, 1], [0, 0, 0, 0], [0, 13, 0, 40], [1, 0, 0, 0]]


@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("form", list(WeightFormat), ids=lambda form: form.value)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(level: Isa, dtype: torch.dtype, form: WeightFormat, hidden: int, width: int) -> None:
    ours, exact = packed(4, hidden, width, dtype, form)
    for rows in ROWS:
        batch = ragged(rows, hidden, dtype)
        y_RD = ours.run_rows(batch)
        assert y_RD.dtype is dtype and y_RD.shape == batch.x.shape
        assert_rounding_only(y_RD, batch, exact, form)


@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_biases_and_another_activation(level: Isa, dtype: torch.dtype, hidden: int, width: int) -> None:
    """gpt-oss's, with a limit that many numbers are beyond; of rows, and of tokens' weighted sums."""
    activation = Activation(1.702, 0.7, 1.0)
    ours = PackedExperts(4, hidden, width, dtype, PLAIN, ExpertKind(activation, biased=True))
    theirs = PlainExperts(4, hidden, width, torch.float32, CPU, kind=ExpertKind(activation, biased=True))
    ours.packed_SB.fill_(0xFF)
    biases = []
    for slot in range(4):
        given, generator = matrices(hidden, width, dtype, slot), torch.Generator().manual_seed(9 + slot)
        biases.append(tuple(torch.randn(size, generator=generator) for size in (width, width, hidden)))
        for experts in (ours, theirs):
            experts.fill(slot, *given)
            experts.fill_biases(slot, *biases[-1])
    for rows in ROWS:
        batch, allowed, expected = ragged(rows, hidden, dtype), [], []
        y_RD = ours.run_rows(batch)
        for slot, x_RD in enumerate(batch.x.split(rows)):
            gate, up, down = matrices(hidden, width, dtype, slot)
            exact = [tensor.double() for tensor in (x_RD, torch.cat((gate, up)), down, torch.cat(biases[slot][:2]))]
            expected.append(reference.expert(*exact, biases[slot][2].double(), activation))
            allowed.append(expert_bound(x_RD, gate, up, down, dtype, biases[slot], activation))
        assert_within(y_RD, torch.cat(expected), torch.cat(allowed))
        wide = ExpertBatch(batch.layout, batch.x.float(), batch.rows_S)
        assert_within(theirs.run_rows(wide), torch.cat(expected), torch.cat(allowed))
    ours.clear(2)
    cleared = ExpertBatch(Layout.RAGGED, ragged([2], hidden, dtype).x, torch.tensor([0, 0, 2, 0], dtype=torch.int32))
    assert not ours.run_rows(cleared).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_is_never_read(level: Isa, dtype: torch.dtype) -> None:
    rows = [3, 0, 5, 1]
    for hidden, form in product((64, 67), WeightFormat):
        ours, exact = packed(4, hidden, 40, dtype, form)
        x_SCD = torch.full((4, 6, hidden), float("nan"), dtype=dtype)
        for slot, count in enumerate(rows):
            x_SCD[slot, :count] = torch.randn(count, hidden, generator=torch.Generator().manual_seed(slot))
        batch = ExpertBatch(Layout.PADDED, x_SCD, torch.tensor(rows, dtype=torch.int32))
        y_SCD = ours.run_rows(batch)
        assert y_SCD.shape == x_SCD.shape
        assert_rounding_only(y_SCD, batch, exact, form)
    no_room = ExpertBatch(Layout.PADDED, torch.empty(4, 0, 67, dtype=dtype), torch.zeros(4, dtype=torch.int32))
    assert ours.run_rows(no_room).shape == (4, 0, 67)


def exact_sums(
    exact: PlainExperts, x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor, first_slot: int, form: WeightFormat
) -> tuple[Tensor, Tensor]:
    """(the sums, their bound), both float64 [T, D]."""
    out_TD, bound_TD = torch.zeros(2, *x_TD.shape, dtype=torch.float64)
    for slot in range(exact.num_slots):
        share_T1 = torch.where(slot_TK == first_slot + slot, weight_TK, 0.0).sum(1, keepdim=True)
        y_TD = reference.expert(x_TD.double(), exact.gate_up_S2FD[slot], exact.down_SDF[slot])
        out_TD += share_T1 * y_TD
        # What is added is rounded once itself.
        weights = x_TD.dtype if form.parts[0] in HALVES else None
        one_TD = expert_bound(
            x_TD, *exact.read(slot), x_TD.dtype, weights=weights, whole=largest_of_rows(x_TD.dtype, form)
        )
        one_TD += 2 * unit(x_TD.dtype) * y_TD.abs()
        bound_TD += share_T1.abs() * (one_TD + bound(exact.num_slots + 1, y_TD.abs()))
    return out_TD, bound_TD


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(0, 40),
    top_k=st.integers(1, 3),
    num_slots=st.integers(1, 5),
    first_slot=st.integers(0, 3),
    hidden=st.integers(1, 140),
    width=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(list(WeightFormat)),
    level=st.sampled_from(ISAS) if ISAS else st.none(),
)
def test_tokens(
    num_tokens: int, top_k: int, num_slots: int, first_slot: int, hidden: int, width: int, dtype: torch.dtype,
    form: WeightFormat, level: Isa,
) -> None:  # fmt: skip
    """Sorted, multiplied, weighted and summed in one call; other ranks' slots count nothing."""
    limit_isa(level)
    ours, exact = packed(num_slots, hidden, width, dtype, form)
    x_TD = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    slot_TK, weight_TK = routing(num_tokens, top_k, num_slots + 5, num_tokens)
    expected_TD, allowed_TD = exact_sums(exact, x_TD, slot_TK, weight_TK, first_slot, form)
    for sum_dtype in {torch.float32, dtype}:
        y_TD = ours.run_tokens(TokenBatch(x_TD, slot_TK, weight_TK, first_slot, sum_dtype))
        assert y_TD.dtype is sum_dtype
        assert_within(y_TD, expected_TD, allowed_TD)
    nowhere_T = ((slot_TK < first_slot) | (slot_TK >= first_slot + num_slots)).all(1)
    assert (y_TD[nowhere_T] == 0).all()
    limit_isa(best_isa())


@pytest.mark.parametrize("form", list(WeightFormat), ids=lambda form: form.value)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_company_nor_on_threads(
    level: Isa, dtype: torch.dtype, form: WeightFormat
) -> None:
    """Bit for bit: the numbers are added in the same order however many rows and threads there are. 4-bit weights, and
    INT8 where there are matrix tiles: where that is asked for, unless any number of rows are whole numbers."""
    if form.parts[0] in WHOLE and not always_whole(dtype):
        choose(Choice(), fixed_order=True)
    ours, _ = packed(3, 200, 140, dtype, form)
    x_TD = torch.randn(75, 200, generator=torch.Generator().manual_seed(2)).to(dtype)
    slot_TK, weight_TK = routing(75, 2, 3, 5)
    together_TD = ours.run_tokens(TokenBatch(x_TD, slot_TK, weight_TK, 0, dtype))
    for num_threads in (2, 3, 5):
        torch.set_num_threads(num_threads)
        assert torch.equal(ours.run_tokens(TokenBatch(x_TD, slot_TK, weight_TK, 0, dtype)), together_TD)
    torch.set_num_threads(1)
    for first, last in ((0, 1), (1, 3), (3, 11), (11, 31), (31, 75)):
        here = slice(first, last)
        part_TD = ours.run_tokens(TokenBatch(x_TD[here], slot_TK[here], weight_TK[here], 0, dtype))
        assert torch.equal(part_TD, together_TD[here])


@pytest.mark.parametrize("form", list(WeightFormat), ids=lambda form: form.value)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_rows(level: Isa, dtype: torch.dtype, form: WeightFormat) -> None:
    """One tile, several, several bands; weights multiplied block after block or panel after panel: bit for bit the same."""
    if form.parts[0] in WHOLE and not always_whole(dtype):
        choose(Choice(), fixed_order=True)
    ours, exact = packed(1, 330, 140, dtype, form)
    all_RD = ragged([210], 330, dtype).x
    result_RD = ours.run_rows(ExpertBatch(Layout.RAGGED, all_RD, torch.tensor([210], dtype=torch.int32)))
    for count in (1, 4, 6, 7, 12, 13, 19, 24, 25, 96, 97, 200):
        batch = ExpertBatch(Layout.RAGGED, all_RD[:count], torch.tensor([count], dtype=torch.int32))
        y_RD = ours.run_rows(batch)
        assert torch.equal(y_RD, result_RD[:count]), count
    assert_rounding_only(y_RD, batch, exact, form)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("form", [form for form in WeightFormat if form.parts[0] in WHOLE], ids=lambda form: form.value)
def test_tokens_whose_experts_are_all_elsewhere(level: Isa, form: WeightFormat, fixed_order: bool) -> None:
    choose(Choice(), fixed_order)
    ours, _ = packed(2, 1100, 140, torch.bfloat16, form)
    slot_TK, weight_TK = routing(300, 2, 2, 5)
    batch = TokenBatch(torch.randn(300, 1100).bfloat16(), slot_TK + 2, weight_TK, 0, torch.float32)
    assert not ours.run_tokens(batch).any()


@pytest.mark.skipif(best_isa() < Isa.AVX512, reason="this CPU has no AVX512, or the kernels were not built")
@pytest.mark.parametrize("form", [form for form in WeightFormat if form.parts[0] in WHOLE], ids=lambda form: form.value)
@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("most", [Isa.AVX512, Isa.AVX512_BF16])
def test_any_number_of_rows_as_whole_numbers(form: WeightFormat, fixed_order: bool, most: Isa) -> None:
    """Without matrix tiles: few rows and many have the same sums, whatever was measured."""
    if not has_whole_numbers(most):
        pytest.skip(f"this CPU has no {most.name} with VNNI")
    limit_isa(most)
    results = []
    for products, few in product((Isa.AVX512, most), (0, 3, 12)):
        choose(Choice(products, 12, few, few, whole=True), fixed_order)
        ours, exact = packed(1, 330, 140, torch.bfloat16, form)
        all_RD = ragged([210], 330, torch.bfloat16).x
        for count in (1, 4, 6, 7, 12, 13, 24, 97, 210):
            torch.set_num_threads(1 + count % 3)
            batch = ExpertBatch(Layout.RAGGED, all_RD[:count], torch.tensor([count], dtype=torch.int32))
            results.append(ours.run_rows(batch))
        assert_rounding_only(results[-1], batch, exact, form)
    assert all(torch.equal(y_RD, results[-1][: len(y_RD)]) for y_RD in results)
    slot_TK, weight_TK = routing(75, 1, 1, 0)
    x_TD = all_RD[:75]
    together_TD = ours.run_tokens(TokenBatch(x_TD, slot_TK, weight_TK, 0, torch.bfloat16))
    alone_TD = [
        ours.run_tokens(TokenBatch(*one, 0, torch.bfloat16))
        for one in zip(x_TD.split(1), slot_TK.split(1), weight_TK.split(1), strict=True)
    ]
    assert torch.equal(together_TD, torch.cat(alone_TD))
    limit_isa(best_isa())


def test_rows_in_fp8(level: Isa) -> None:
    """As an exchange may bring them: they are widened first."""
    ours, _ = packed(3, 140, 40, torch.bfloat16)
    value_RD, scale_RB = quantize_rows(torch.randn(9, 140, generator=torch.Generator().manual_seed(8)))
    rows_S = torch.tensor([4, 0, 5], dtype=torch.int32)
    y_RD = ours.run_rows(ExpertBatch(Layout.RAGGED, value_RD, rows_S, scale_RB))
    wide = ExpertBatch(Layout.RAGGED, dequantize_rows(value_RD, scale_RB, torch.bfloat16), rows_S)
    assert torch.equal(y_RD, ours.run_rows(wide))


def test_a_broken_token_stays_alone(level: Isa) -> None:
    ours, _ = packed(4, 64, 32, torch.bfloat16)
    x_TD = torch.randn(20, 64).bfloat16()
    x_TD[7] = float("nan")
    y_TD = ours.run_tokens(TokenBatch(x_TD, *routing(20, 2, 4, 0), 0, torch.bfloat16))
    assert y_TD.isnan().any(1).nonzero().flatten().tolist() == [7] and y_TD[7].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("form", list(WeightFormat), ids=lambda form: form.value)
def test_thousands_of_tokens(level: Isa, form: WeightFormat) -> None:
    ours, exact = packed(6, 128, 96, torch.bfloat16, form)
    x_TD = torch.randn(3000, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    slot_TK, weight_TK = routing(3000, 4, 6, 6)
    batch, _ = permute_some(x_TD, slot_TK, weight_TK, 0, 6)
    assert_rounding_only(ours.run_rows(batch), batch, exact, form)
    torch.set_num_threads(2)
    y_TD = ours.run_tokens(TokenBatch(x_TD, slot_TK, weight_TK, 0, torch.float32))
    expected_TD, allowed_TD = exact_sums(exact, x_TD, slot_TK, weight_TK, 0, form)
    assert_within(y_TD, expected_TD, allowed_TD)


@pytest.mark.parametrize(("hidden", "width"), SIZES)
def test_weights_of_bfloat16_and_rows_of_float32(level: Isa, hidden: int, width: int) -> None:
    """The sums are those of the same weights in float32, bit by bit, in half the bytes."""
    wide, ours = (PackedExperts(4, hidden, width, torch.float32, form) for form in (PLAIN, WeightFormat.BF16))
    for experts in (wide, ours):
        experts.packed_SB.fill_(0xFF)
        for slot in range(4):
            experts.fill(slot, *matrices(hidden, width, torch.bfloat16, slot))
    for rows in (*ROWS, [1, 2, 3, 4], [5, 6, 7, 8], [25, 0, 97, 300]):
        batch = ragged(rows, hidden, torch.float32)
        assert torch.equal(ours.run_rows(batch), wide.run_rows(batch))
    for num_tokens in (1, 4, 60):
        x_TD = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(num_tokens))
        tokens = TokenBatch(x_TD, *routing(num_tokens, 3, 4, 1), 0, torch.float32)
        assert torch.equal(ours.run_tokens(tokens), wide.run_tokens(tokens))
    half = PackedExperts(1, hidden, width, torch.bfloat16, WeightFormat.BF16)
    assert half.format is PLAIN and half.packed_SB.shape[1] == ours.packed_SB.shape[1]


def test_every_fp8_number(level: Isa) -> None:
    """All 256 of them, through both ways of widening (few rows, many rows): x is a row of the unit matrix."""
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = torch.where(numbers.float().isnan(), 0.0, numbers.float()).to(torch.float8_e4m3fn)
    up_FD = numbers.repeat(32).view(32, 256)
    gate_FD = torch.full((32, 256), 8.0).to(torch.float8_e4m3fn)
    down_DF = torch.eye(256, 32).to(torch.float8_e4m3fn)
    one = torch.ones(1, 2), torch.ones(1, 2), torch.ones(2, 1)
    ours = PackedExperts(1, 256, 32, torch.float32, FP8)
    ours.fill_scaled(0, *(ScaledMatrix(w, s) for w, s in zip((gate_FD, up_FD, down_DF), one, strict=True)))
    gate = torch.nn.functional.silu(torch.tensor(8.0)).item()
    for count in (1, 40):
        x_RD = torch.zeros(256, 256).fill_diagonal_(1.0)
        for first in range(0, 256, count):
            part = x_RD[first : first + count]
            y = ours.run_rows(ExpertBatch(Layout.RAGGED, part, torch.tensor([part.shape[0]], dtype=torch.int32)))
            expected = numbers[first : first + count].float() * gate
            torch.testing.assert_close(y[:, 0], expected, rtol=1e-6, atol=0)


def test_the_choice(level: Isa) -> None:
    sizes = (2, 8, 6)
    assert isinstance(expert_weights(*sizes, torch.bfloat16, CPU, PLAIN), PackedExperts)
    assert isinstance(expert_weights(*sizes, torch.float16, CPU, PLAIN), PlainExperts)
    limit_isa(Isa.NONE)
    assert isinstance(expert_weights(*sizes, torch.bfloat16, CPU, FP8), PlainExperts)
