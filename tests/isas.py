"""The instruction sets of the native kernels, as parameters of tests: those that this CPU lacks are skipped by name."""

from __future__ import annotations

import pytest

from native import Isa, best_isa

ISAS = [level for level in Isa if Isa.NONE < level <= best_isa()]  # of this CPU
TORCH_AND_ISAS = [
    pytest.param(
        level,
        id=level.name,
        marks=pytest.mark.skipif(
            level > best_isa(), reason=f"this CPU has no {level.name}, or the kernels were not built"
        ),
    )
    for level in Isa
]
EVERY_ISA = TORCH_AND_ISAS[1:]
BF16_ISAS = EVERY_ISA[Isa.AVX512_BF16 - 1 :]  # with products of bfloat16
