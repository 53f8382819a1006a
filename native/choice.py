"""Which of the ways to multiply rows of bfloat16 the kernels take (native/src/choice.cpp), chosen by timing them here.

One process chooses, and tells all ranks of its group (`Choice` as text): the last bits of a sum depend on the way, and
two measurements may differ.
"""

from __future__ import annotations

import ctypes
import functools
import time
from dataclasses import dataclass

from native.features import Isa, isa
from native.formats import WeightFormat
from native.library import function, library

_MARGIN = 1.15  # by which another way must be faster than the usual one: measurements differ by less
_ROWS = (1, 4, 16, 64)
_MOST_NARROW = 12
_SAID = f"GFLOP/s of one core with {', '.join(map(str, _ROWS))} rows"


class _Fields(ctypes.Structure):
    """KernelChoice of choice.h."""

    _fields_ = (
        ("products", ctypes.c_int64),
        ("narrow_rows", ctypes.c_int64),
        ("byte_rows", ctypes.c_int64),
        ("half_rows", ctypes.c_int64),
        ("fixed_order", ctypes.c_int64),
    )


_choose = function("native_choose", ctypes.POINTER(_Fields))
_chosen = function("native_chosen", ctypes.POINTER(_Fields))


@dataclass(frozen=True, slots=True)
class Choice:
    """products: of rows of bfloat16 by panels of it. narrow_rows: where that is AMX, with up to so many rows FP8
    weights are widened in vector registers all the same. byte_rows: there, up to so many rows are multiplied with INT8
    weights as whole numbers. half_rows: the same of 4-bit weights, whatever the instructions; what is widened otherwise
    is rounded. As text: "amx, 1, 4, 12"."""

    products: Isa = Isa.AMX
    narrow_rows: int = 1
    byte_rows: int = 4
    half_rows: int = _MOST_NARROW

    def __str__(self) -> str:
        return f"{self.products.name.lower()}, {self.narrow_rows}, {self.byte_rows}, {self.half_rows}"


def parse(text: str) -> Choice:
    """The Choice that is printed so; "" is the one that has not been measured."""
    if not text:
        return Choice()
    products, *rows = text.split(", ")
    return Choice(Isa[products.upper()], *map(int, rows))


def choose(choice: Choice, fixed_order: bool = False) -> None:
    """Take these ways in this process from now on, as far as the CPU and `limit_isa` allow. Between steps only.

    fixed_order: every kernel adds up a row's numbers in one order, whatever the number of rows, sequences and threads
    beside it (docs/deterministic.md); before layers are packed.
    """
    if library() is not None:
        rows = (0, 0, 0) if fixed_order else (choice.narrow_rows, choice.byte_rows, choice.half_rows)
        _choose(_Fields(int(choice.products), *rows, int(fixed_order)))


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
        return Choice(), f"one way; {_SAID}, of {_most_flops():.0f} in float32: {only.name.lower()} {took}"
    ways = [level for level in Isa if Isa.AVX512 <= level <= most]
    times = {level: [_time(level, WeightFormat.PLAIN, rows) for rows in _ROWS] for level in ways}
    best = [min(column) for column in zip(*times.values(), strict=True)]
    worst = {level: max(mine / least for mine, least in zip(times[level], best, strict=True)) for level in ways}
    products = min(ways, key=lambda level: worst[level] * (1.0 if level is most else _MARGIN))
    tiles = products is Isa.AMX
    narrow = _narrow_rows(WeightFormat.FP8, products) if tiles else Choice().narrow_rows
    of_bytes = _narrow_rows(WeightFormat.INT8, products) if tiles else Choice().byte_rows
    half = _narrow_rows(WeightFormat.INT4, products)
    said = ", ".join(f"{level.name.lower()} {_flops(times[level])}" for level in ways)
    choice = Choice(products, narrow, of_bytes, half)
    return choice, f"{_SAID}: {said}"


def _narrow_rows(form: WeightFormat, products: Isa) -> int:
    """Up to how many rows the way in vector registers is as fast as the other one."""
    for rows in range(1, _MOST_NARROW + 1):
        registers = _time(Isa.AVX512_BF16, form, rows)
        other = _time(Isa.AMX, form, rows) if products is Isa.AMX else registers
        if registers >= _MARGIN * other:
            return rows - 1
    return _MOST_NARROW


def _flops(times: list[float]) -> str:
    """2 x 64 columns x 512 k for each row."""
    return "/".join(f"{2 * 64 * 512 * rows / took:.0f}" for rows, took in zip(_ROWS, times, strict=True))


def _most_flops() -> float:
    """GFLOP/s of one core that does nothing but products and sums of float32."""
    kernels = library()
    assert kernels is not None
    probe = kernels["probe_products"]
    probe.argtypes, probe.restype = (ctypes.c_int, ctypes.c_int64, ctypes.c_int), ctypes.c_int64
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        done = int(probe(0, 50_000, 1))
        best = max(best, done / (time.perf_counter() - began))
    return best / 1e9


def _time(level: Isa, form: WeightFormat, rows: int) -> float:
    """Nanoseconds for a panel."""
    kernels = library()
    assert kernels is not None
    timed = kernels["native_time_panel"]
    timed.argtypes, timed.restype = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64), ctypes.c_double
    return float(timed(int(level), form.number, rows))
