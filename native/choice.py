"""Which of the ways to multiply rows of bfloat16 the kernels take (native/src/choice.cpp), chosen by timing them here.

One process chooses, and tells all ranks of its group (`Choice` as text): the last bits of a sum depend on the way, and
two measurements may differ.
"""

from __future__ import annotations

import ctypes
import functools
import time
from operator import truediv

from msgspec import Struct

from native.features import Isa, best_isa, isa
from native.formats import WeightFormat
from native.library import function, library, older, returning

_MARGIN = 1.15  # by which another way must be faster than the usual one: measurements differ by less
_ROWS = (1, 4, 16, 64)
_MOST_NARROW = 12
_WHOLE = "whole"
_SAID = f"GFLOP/s of one core with {', '.join(map(str, _ROWS))} rows"


class _Fields(ctypes.Structure):
    """KernelChoice of choice.h."""

    _fields_ = (
        ("products", ctypes.c_int64),
        ("narrow_rows", ctypes.c_int64),
        ("byte_rows", ctypes.c_int64),
        ("half_rows", ctypes.c_int64),
        ("whole", ctypes.c_int64),
        ("fixed_order", ctypes.c_int64),
    )


_choose = function("native_choose", ctypes.POINTER(_Fields))
_chosen = function("native_chosen", ctypes.POINTER(_Fields))
_time_panel = returning(ctypes.c_double, "native_time_panel", ctypes.c_int, *[ctypes.c_int64] * 2, *[ctypes.c_int] * 2)
_probe_products = returning(ctypes.c_int64, "probe_products", ctypes.c_int, ctypes.c_int64, ctypes.c_int)


class Choice(Struct, frozen=True):
    """products: of rows of bfloat16 by panels of it. narrow_rows: where that is AMX or AVX2, with up to so many rows
    FP8 weights are widened in vector registers all the same. byte_rows: there, the same of INT8 weights; with AMX so
    many rows are multiplied as whole numbers. half_rows: the same of 4-bit weights, whatever the instructions; what is
    widened otherwise is rounded, but with AVX2, where no bit depends on these numbers. whole: with AVX512-VNNI any
    number of rows are whole numbers where weights have INT8 or 4 bits, and no bit depends on these numbers either.
    As text: "amx, 1, 4, 12" and "avx512, 12, 4, 4, whole"."""

    products: Isa = Isa.AMX
    narrow_rows: int = 1
    byte_rows: int = 4
    half_rows: int = _MOST_NARROW
    whole: bool = False

    def __str__(self) -> str:
        rows = f"{self.products.name.lower()}, {self.narrow_rows}, {self.byte_rows}, {self.half_rows}"
        return f"{rows}, {_WHOLE}" if self.whole else rows


def parse(text: str) -> Choice:
    """The Choice that is printed so; "" is the one that has not been measured."""
    if not text:
        return Choice()
    products, narrow, of_bytes, half, *whole = text.split(", ")
    return Choice(Isa[products.upper()], int(narrow), int(of_bytes), int(half), whole == [_WHOLE])


def choose(choice: Choice, fixed_order: bool = False) -> None:
    """Take these ways in this process from now on, as far as the CPU and `limit_isa` allow. Between steps only.

    fixed_order: every kernel adds up a row's numbers in one order, whatever the number of rows, sequences and threads
    beside it (docs/deterministic.md); before layers are packed.
    """
    if library() is not None:
        rows = (choice.narrow_rows, choice.byte_rows, choice.half_rows)
        if fixed_order and not choice.whole and isa() is not Isa.AVX2:  # there more rows have the same sums
            rows = (0, 0, 0)
        _choose(_Fields(int(choice.products), *rows, int(choice.whole), int(fixed_order)))


def fixed_order() -> bool:
    """Whether `choose` asked for it."""
    if library() is None:
        return False
    fields = _Fields()
    _chosen(fields)
    return bool(fields.fixed_order)


@functools.cache
def measured(most: Isa) -> tuple[Choice, str]:
    """The best ways of up to `most`, and what was measured; some milliseconds, once per process.

    A way is as good as its worst ratio to the best one over all numbers of rows: one is taken for all of them, so that
    a row's result does not depend on its company. Where 8-bit weights are concerned few rows and many differ too much.
    """
    if Isa.NONE in (most, isa()):
        return Choice(), "without native kernels there are no ways"
    if most < Isa.AVX512_BF16 or isa() < Isa.AVX512_BF16:
        only = min(most, isa())
        took = _flops([_time(only, WeightFormat.PLAIN, rows) for rows in _ROWS])
        said = f"{_SAID}, of {_most_flops():.0f} in float32: {only.name.lower()} {took}"
        if only is Isa.AVX512:
            choice, also = _whole_numbers(only, only)
            return choice or Choice(), f"one way; {said}{also}"
        narrow, byte_rows, half = map(_few_rows, (WeightFormat.FP8, WeightFormat.INT8, WeightFormat.INT4))
        return Choice(only, narrow, byte_rows, half), said
    ways = [level for level in Isa if Isa.AVX512 <= level <= most]
    _time(most, WeightFormat.PLAIN, _ROWS[-1])  # a core that begins with wide registers is slow for a moment
    times = {level: [_time(level, WeightFormat.PLAIN, rows) for rows in _ROWS] for level in ways}
    best = [min(column) for column in zip(*times.values(), strict=True)]
    worst = {level: max(mine / least for mine, least in zip(times[level], best, strict=True)) for level in ways}
    products = min(ways, key=lambda level: worst[level] * (1.0 if level is most else _MARGIN))
    tiles = products is Isa.AMX
    said = f"{_SAID}: " + ", ".join(f"{level.name.lower()} {_flops(times[level])}" for level in ways)
    if not tiles:
        choice, also = _whole_numbers(products, Isa.AVX512_BF16)
        said += also
        if choice is not None:
            return choice, said
    narrow = _narrow_rows(WeightFormat.FP8, products) if tiles else Choice().narrow_rows
    of_bytes = _narrow_rows(WeightFormat.INT8, products) if tiles else Choice().byte_rows
    return Choice(products, narrow, of_bytes, _narrow_rows(WeightFormat.INT4, products)), said


def has_whole_numbers(level: Isa) -> bool:
    """Whether any number of rows can be whole numbers with these instructions on this CPU (AVX512-VNNI)."""
    return level <= best_isa() and _time_panel(int(level), WeightFormat.INT8.number, 1, True, True) > 0


def _whole_numbers(products: Isa, level: Isa) -> tuple[Choice | None, str]:
    """The choice where whole numbers serve for any number of rows, if they are the faster way here, and what was
    measured. Without matrix tiles. level: whose they are."""
    if not has_whole_numbers(level):
        return None, ""
    usual = [_time(products, WeightFormat.INT8, rows) for rows in _ROWS]
    whole = [min(_time(level, WeightFormat.INT8, rows, few, True) for few in (False, True)) for rows in _ROWS]
    said = f"; INT8 {_flops(usual)}, as whole numbers {_flops(whole)}"
    if max(map(truediv, usual, whole)) <= _MARGIN * max(map(truediv, whole, usual)):
        return None, said
    of_bytes, half = (_few_rows(form, level, True) for form in (WeightFormat.INT8, WeightFormat.INT4))
    return Choice(products, _MOST_NARROW, of_bytes, half, True), said


def _narrow_rows(form: WeightFormat, products: Isa) -> int:
    """Up to how many rows the way in vector registers is as fast as the other one."""
    for rows in range(1, _MOST_NARROW + 1):
        registers = _time(Isa.AVX512_BF16, form, rows)
        other = _time(Isa.AMX, form, rows) if products is Isa.AMX else registers
        if registers >= _MARGIN * other:
            return rows - 1
    return _MOST_NARROW


def _few_rows(form: WeightFormat, level: Isa = Isa.AVX2, whole: bool = False) -> int:
    """Up to how many rows weights are widened in registers in less time than once for all of them."""
    for rows in range(1, _MOST_NARROW + 1):
        if _time(level, form, rows, True, whole) > _time(level, form, rows, False, whole):
            return rows - 1
    return _MOST_NARROW


def _flops(times: list[float]) -> str:
    """2 x 64 columns x 512 k for each row."""
    return "/".join(f"{2 * 64 * 512 * rows / took:.0f}" for rows, took in zip(_ROWS, times, strict=True))


def _most_flops() -> float:
    """GFLOP/s of one core that does nothing but products and sums of float32."""
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        done = int(_probe_products(0, 50_000, 1))
        best = max(best, done / (time.perf_counter() - began))
    return best / 1e9


def _time(level: Isa, form: WeightFormat, rows: int, few: bool | None = None, whole: bool = False) -> float:
    """Nanoseconds for a panel. few: weights are widened in vector registers; None: unless matrix tiles are timed.
    whole: rows are whole numbers, however many."""
    took = float(_time_panel(int(level), form.number, rows, level is not Isa.AMX if few is None else few, whole))
    if took <= 0:
        raise older(f"{level.name.lower()} cannot be timed")
    return took
