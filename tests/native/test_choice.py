"""The ways to multiply rows of bfloat16 are timed, told as text, and all give the same numbers.

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from isas import BF16_ISAS, EVERY_ISA
from rounding import assert_within, matmul_bound, whole_rows_bound

from moe_kernels.matrix import HALVES, SCALE_ROWS, WeightFormat, dequantize, quantize, quantize_halves
from native import Choice, Isa, best_isa, choose, isa, limit_isa, measured, parse
from native.packed_linear import PackedLinear

ROOT = Path(__file__).resolve().parents[2]
WAYS = [
    *(Choice(products, narrow, narrow) for products in (Isa.AVX512, Isa.AVX512_BF16, Isa.AMX) for narrow in (0, 3, 12)),
    *(
        Choice(products, 12, narrow, narrow, whole=True)
        for products in (Isa.AVX512, Isa.AVX512_BF16)
        for narrow in (0, 3, 12)
    ),
]


@pytest.fixture(autouse=True)
def usual_choice_afterwards() -> Iterator[None]:
    yield
    choose(Choice())


def packed(weight_OI: torch.Tensor, form: WeightFormat) -> PackedLinear:
    if form is WeightFormat.PLAIN:
        return PackedLinear(weight_OI)
    if form in HALVES:
        halves = quantize_halves(weight_OI, form)
        return PackedLinear(halves.codes, halves.words, form=form, num_inputs=weight_OI.shape[1])
    scaled = quantize(weight_OI, form)
    return PackedLinear(scaled.weight_OI, scaled.scale, SCALE_ROWS[form])


@pytest.mark.parametrize("choice", [Choice(), *WAYS], ids=str)
def test_a_choice_is_told_as_text(choice: Choice) -> None:
    assert parse(str(choice)) == choice
    assert parse("") == Choice()


@pytest.mark.parametrize("level", BF16_ISAS)
def test_what_is_measured_is_a_way_of_the_level(level: Isa) -> None:
    measured.cache_clear()  # it may have been asked while another test allowed less
    limit_isa(best_isa())
    choice, said = measured(level)
    assert Isa.AVX512 <= choice.products <= level and 0 <= choice.narrow_rows <= 12
    assert 0 <= choice.byte_rows <= 12 and 0 <= choice.half_rows <= 12
    assert all(way.name.lower() in said for way in Isa if Isa.AVX512 <= way <= level)
    assert measured(level) == (choice, said)  # once per process


def test_with_lesser_instructions_there_is_one_way() -> None:
    measured.cache_clear()  # it may have been asked while less was allowed
    limit_isa(best_isa())
    assert measured(Isa.NONE)[0] == Choice()
    assert "no ways" in measured(Isa.NONE)[1]
    if best_isa() >= Isa.AVX512:  # but for whole numbers
        choice, said = measured(Isa.AVX512)
        assert choice == Choice() or (choice.products is Isa.AVX512 and choice.whole and "as whole numbers" in said)


@pytest.mark.skipif(best_isa() < Isa.AVX2, reason="the native kernels are not there")
def test_with_avx2_numbers_of_rows_are_measured() -> None:
    choice, _ = measured(Isa.AVX2)
    assert choice.products is Isa.AVX2
    assert all(0 <= rows <= 12 for rows in (choice.narrow_rows, choice.byte_rows, choice.half_rows))


@pytest.mark.skipif(best_isa() < Isa.AVX2, reason="the native kernels are not there")
@pytest.mark.parametrize(
    "form",
    [form for form in WeightFormat if form not in (WeightFormat.PLAIN, WeightFormat.INT4_INT8, WeightFormat.BF16)],
)
def test_with_avx2_no_bit_depends_on_what_was_measured(form: WeightFormat) -> None:
    limit_isa(Isa.AVX2)
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn((200, 330), generator=generator)
    layer = packed(weight_OI, form)
    x_TI = torch.randn((13, 330), generator=generator).bfloat16()
    results = []
    for rows in (0, 3, 12):
        for fixed_order in (False, True):
            choose(Choice(Isa.AVX2, rows, rows, rows), fixed_order)
            results += [layer(x_TI[:count])[:1] for count in (1, 5, 12, 13)]
    assert all(torch.equal(result, results[0]) for result in results)
    limit_isa(best_isa())


@pytest.mark.skipif(best_isa() < Isa.AVX512, reason="this CPU has no AVX512")
@pytest.mark.parametrize("level", [level for level in Isa if Isa.AVX512 <= level <= best_isa()])
@pytest.mark.parametrize("choice", [way for way in WAYS if way.byte_rows == 3], ids=str)
@pytest.mark.parametrize(
    "form", [form for form in WeightFormat if form not in (WeightFormat.INT4_INT8, WeightFormat.BF16)]
)
def test_in_a_fixed_order_no_bit_depends_on_the_rows_beside(level: Isa, choice: Choice, form: WeightFormat) -> None:
    """Few are widened or taken apart in registers, of more each is made float32 once, or all are whole numbers."""
    limit_isa(level)
    choose(choice, fixed_order=True)
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn((2000, 2048), generator=generator).bfloat16()
    layer = packed(weight_OI, form)
    x_TI = torch.randn((113, 2048), generator=generator).bfloat16()
    one_by_one_TO = torch.cat([layer(x_1I) for x_1I in x_TI.split(1)])
    for count in (2, 3, 4, 5, 6, 7, 12, 13, 25, 97, 113):
        assert torch.equal(layer(x_TI[:count]), one_by_one_TO[:count])
    limit_isa(best_isa())


@pytest.mark.parametrize("level", EVERY_ISA)
def test_what_one_core_does_is_said(level: Isa) -> None:
    measured.cache_clear()
    limit_isa(level)
    said = measured(level)[1]
    measured.cache_clear()
    assert level.name.lower() in said and "GFLOP/s of one core" in said


@pytest.mark.parametrize("level", BF16_ISAS)
@pytest.mark.parametrize("choice", WAYS, ids=str)
@pytest.mark.parametrize("form", [WeightFormat.PLAIN, WeightFormat.FP8, WeightFormat.INT8])
def test_every_way_equals_torch(level: Isa, choice: Choice, form: WeightFormat) -> None:
    limit_isa(level)
    choose(choice)
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn((200, 330), generator=generator).bfloat16()
    if form is WeightFormat.PLAIN:
        layer, wanted_OI = PackedLinear(weight_OI), weight_OI.float()
    else:
        scaled = quantize(weight_OI, form)
        layer = PackedLinear(scaled.weight_OI, scaled.scale, SCALE_ROWS[form])
        wanted_OI = dequantize(scaled, torch.float32)
    for rows in (1, 3, 4, 12, 13, 33, 100, 200):
        x_TI = torch.randn((rows, 330), generator=generator).bfloat16()
        allowed = matmul_bound(x_TI, wanted_OI, None)
        whole = choice.whole or (rows <= choice.byte_rows and isa() is Isa.AMX)
        if form is WeightFormat.INT8 and whole:
            allowed += whole_rows_bound(x_TI, wanted_OI)
        assert_within(layer(x_TI), F.linear(x_TI.float(), wanted_OI), allowed)


@pytest.mark.skipif(best_isa() < Isa.AMX, reason="this CPU has no AMX, or may not use it")
def test_without_the_permission_for_tiles_the_level_before_is_used() -> None:
    """Linux refuses where the signals' own stack is too small to keep tiles."""
    script = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
memory = ctypes.create_string_buffer(4096)
small = Stack(ctypes.addressof(memory), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(small), None) == 0
import torch
from native import best_isa, isa
from native.linear import linear
x, weight = torch.randn(20, 64).bfloat16(), torch.randn(70, 64).bfloat16()
wanted = x.float() @ weight.float().T
print(best_isa().name, isa().name, bool((linear(x, weight).float() - wanted).abs().max() < 0.5))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["AVX512_BF16", "AVX512_BF16", "True"]
