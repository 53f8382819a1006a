"""Linear layers kept in 8 and 4 bits equal torch's with the weights that those bits stand for.

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from isas import BF16_ISAS, EVERY_ISA, ISAS
from rounding import WHOLE, WHOLE_OF_8_BITS, assert_within, matmul_bound, whole_rows_bound
from torch import Tensor

from layers.head import LMHead
from moe_kernels.matrix import (
    HALVES,
    SCALE_ROWS,
    HalfMatrix,
    WeightFormat,
    dequantize,
    dequantize_halves,
    quantize,
    quantize_halves,
)
from native import Choice, Isa, choose, has_whole_numbers, isa, limit_isa
from native.packed_linear import PackedLinear, is_bfloat16, is_faster_packed

ROWS = [0, 1, 2, 3, 4, 5, 9, 12, 13, 24, 31, 300]

pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not there")


@pytest.fixture(params=EVERY_ISA)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    before = isa()
    limit_isa(request.param)
    yield
    limit_isa(before)
    choose(Choice())
    torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", [(64, 64), (2, 1), (34, 7), (130, 200), (1000, 515), (2086, 70)])
@pytest.mark.parametrize("form", [WeightFormat.FP8, WeightFormat.INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(
    level: None, sizes: tuple[int, int], form: WeightFormat, dtype: torch.dtype, threads: int
) -> None:
    num_inputs, num_outputs = sizes
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    scaled = quantize(torch.randn((num_outputs, num_inputs), generator=generator), form)
    layer = PackedLinear(scaled.weight_OI, scaled.scale, SCALE_ROWS[form])
    weight = dequantize(scaled, torch.float32)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    for rows in ROWS:
        # Rows lie apart, and what is between them is NaN.
        x = torch.full((rows, num_inputs + 5), torch.nan, dtype=dtype)[:, 2 : 2 + num_inputs]
        x[:] = torch.randn((rows, num_inputs), generator=generator)
        for b in (None, bias):
            ours = layer(x, b)
            wanted = F.linear(x.float(), weight, None if b is None else b.float())
            allowed = matmul_bound(x, weight, b)
            whole = isa() is Isa.AVX2 or (isa() is Isa.AMX and rows <= Choice().byte_rows)
            if form is WeightFormat.INT8 and dtype is torch.bfloat16 and whole:
                allowed += whole_rows_bound(x, weight)
            assert_within(ours, wanted, allowed)


def test_a_code_that_is_no_number_makes_its_output_none(level: None) -> None:
    generator = torch.Generator().manual_seed(0)
    scaled = quantize(torch.randn((70, 300), generator=generator), WeightFormat.FP8)
    for output, at in ((3, 17), (69, 299)):
        scaled.weight_OI.view(torch.uint8)[output, at] = 0xFF
    layer = PackedLinear(scaled.weight_OI, scaled.scale, SCALE_ROWS[WeightFormat.FP8])
    for rows in (1, 6, 40):
        y = layer(torch.randn((rows, 300), generator=generator).bfloat16())
        assert y.isnan().all(0).nonzero().flatten().tolist() == [3, 69] and int(y.isnan().sum()) == 2 * rows


@pytest.mark.parametrize(
    "choice",
    [
        *(Choice(half_rows=rows) for rows in (0, 3, 12)),
        *(Choice(Isa.AVX512_BF16, 12, rows, rows, whole=True) for rows in (0, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(64, 64), (2, 1), (34, 7), (130, 200), (1000, 515), (2086, 70)])
@pytest.mark.parametrize("form", HALVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bits_equal_torch(
    level: None, sizes: tuple[int, int], form: WeightFormat, dtype: torch.dtype, choice: Choice
) -> None:
    """With few rows sums are scaled, with many weights are rounded once more, but where any number of rows are whole
    numbers."""
    num_inputs, num_outputs = sizes
    choose(choice)
    half_rows = choice.half_rows
    generator = torch.Generator().manual_seed(0)
    halves = quantize_halves(torch.randn((num_outputs, num_inputs), generator=generator) + 0.3, form)
    layer = PackedLinear(halves.codes, halves.words, form=form, num_inputs=num_inputs)
    layer = PackedLinear.over(layer.packed_B, form, num_outputs, num_inputs)
    weight = dequantize_halves(halves, torch.float32)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    for rows in ROWS:
        x = torch.full((rows, num_inputs + 5), torch.nan, dtype=dtype)[:, 2 : 2 + num_inputs]
        x[:] = torch.randn((rows, num_inputs), generator=generator)
        wanted = F.linear(x.float(), weight, bias.float())
        # A zero point is subtracted from the number, or multiplied by the sum of the row.
        larger = weight if halves.zero_OG is None else weight.abs() + halves_size(halves, num_inputs)
        in_bytes = dtype is torch.bfloat16 and isa() is Isa.AVX2
        every = choice.whole and dtype is torch.bfloat16 and has_whole_numbers(min(isa(), Isa.AVX512_BF16))
        always = in_bytes or every or (rows <= half_rows and isa() >= Isa.AVX512_BF16)
        allowed = matmul_bound(x, larger, bias, None if always or rows <= half_rows else dtype)
        if always and dtype is torch.bfloat16:
            allowed += whole_rows_bound(x, larger, WHOLE_OF_8_BITS if in_bytes else WHOLE)
        assert_within(layer(x, bias), wanted, allowed)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", [(64, 64), (2, 1), (34, 7), (130, 200), (1000, 515), (2086, 70)])
def test_bfloat16_and_rows_of_float32(level: None, sizes: tuple[int, int], threads: int) -> None:
    """The sums are those of the same weights in float32, bit by bit, however many rows there are."""
    num_inputs, num_outputs = sizes
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((num_outputs, num_inputs), generator=generator).bfloat16()
    assert is_bfloat16(weight.float())
    wide = PackedLinear(weight.float())
    layer = PackedLinear(weight.clone(), None, 1, in_place=True, form=WeightFormat.BF16)
    layer = PackedLinear.over(layer.packed_B, layer.form, num_outputs, num_inputs)
    assert 2 * layer.packed_B.numel() == wide.packed_B.numel()
    bias = torch.randn(num_outputs, generator=generator)
    alone = []
    for rows in ROWS:
        x = torch.full((rows, num_inputs + 5), torch.nan)[:, 2 : 2 + num_inputs]
        x[:] = torch.randn((rows, num_inputs), generator=torch.Generator().manual_seed(rows)) if rows > 1 else 0.3
        for b in (None, bias):
            assert torch.equal(layer(x, b), wide(x, b))
        alone += [torch.equal(layer(x[:1]), layer(x)[:1])] if rows else []
    assert all(alone)


def test_what_has_more_bits_is_no_bfloat16(level: None) -> None:
    weight = torch.ones(8, 6)
    assert is_bfloat16(weight)
    weight[7, 5] = 1 + 2**-8
    assert not is_bfloat16(weight)
    assert not is_bfloat16(torch.ones(8, 6).bfloat16())  # which is kept as it is
    assert not is_bfloat16(torch.ones(8, 5))  # the kernels read inputs in pairs


def halves_size(halves: HalfMatrix, num_inputs: int) -> Tensor:
    """What the zero points stand for, [O, I]."""
    assert halves.zero_OG is not None
    size = (halves.zero_OG.float() * halves.scale_OG.float()).abs()
    return 2 * size.repeat_interleave(32, 1)[:, :num_inputs]


@pytest.mark.parametrize("bf16_level", BF16_ISAS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", [(64, 64), (2, 1), (34, 7), (130, 200), (1000, 515)])
def test_bfloat16_equals_torch_whatever_the_number_of_rows(
    bf16_level: Isa, sizes: tuple[int, int], threads: int
) -> None:
    limit_isa(bf16_level)
    num_inputs, num_outputs = sizes
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((num_outputs, num_inputs), generator=generator).bfloat16()
    assert is_faster_packed(weight) and is_faster_packed(weight.float())
    layer = PackedLinear(weight)
    bias = torch.randn(num_outputs, generator=generator).bfloat16()
    x = torch.full((300, num_inputs + 5), torch.nan, dtype=torch.bfloat16)[:, 2 : 2 + num_inputs]
    x[:] = torch.randn((300, num_inputs), generator=generator)
    wanted = F.linear(x.float(), weight.float(), bias.float())
    together = layer(x, bias)
    assert_within(together, wanted, matmul_bound(x, weight, bias))
    for rows in ROWS:
        assert torch.equal(layer(x[:rows], bias), together[:rows])
    before = weight.data_ptr()
    again = PackedLinear(weight, in_place=True)
    assert (again.packed_B.data_ptr() == before) == (num_outputs % 64 == 0)
    assert torch.equal(again(x, bias), together)
    torch.set_num_threads(1)


def test_a_packed_head_takes_rows_of_another_dtype() -> None:
    """What drafts is bfloat16 where the model is float32."""
    torch.manual_seed(0)
    head = LMHead(64, 192, None, torch.bfloat16, torch.device("cpu"))
    head.weight.data.normal_()
    rows_PD = torch.randn(3, 64)
    expected_P = (rows_PD.bfloat16().float() @ head.weight.float().T).argmax(1)
    head.pack(head.weight.detach())
    assert head.greedy_tokens(rows_PD, 192).equal(expected_P)
