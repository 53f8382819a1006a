"""Which instructions the kernels use."""

from __future__ import annotations

import enum
import functools

from native.library import library


class Isa(enum.IntEnum):
    """Instruction sets; each has all that the ones before it have. NONE: no native kernel runs, torch does
    everything."""

    NONE = 0
    AVX2 = 1  # with FMA
    AVX512 = 2  # F, BW, DQ, VL
    AVX512_BF16 = 3  # with VBMI
    AMX = 4  # matrix tiles, products of bfloat16; the process may use them


def best_isa() -> Isa:
    """What this CPU offers; NONE without the library."""
    kernels = library()
    return Isa.NONE if kernels is None else Isa(kernels.native_best_isa())


@functools.cache  # asked before every call of a kernel, dozens of times in a step
def isa() -> Isa:
    """What the kernels use now."""
    kernels = library()
    return Isa.NONE if kernels is None else Isa(kernels.native_isa())


def limit_isa(most: Isa) -> Isa:
    """Use no more than `most` in this process from now on; returns what is used. For start-up and tests: what was
    packed or built before does not change."""
    kernels = library()
    if kernels is not None:
        kernels.native_limit_isa(int(most))
        isa.cache_clear()
    return isa()
