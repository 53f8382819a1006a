"""How rows of tokens lie when they stand before the experts of a rank.

Legend: R rows arrived, S expert slots of this rank, C rows per slot when padded, D hidden size, B blocks of a row.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor


class Layout(enum.Enum):
    RAGGED = "ragged"  # [R, D], sorted by slot
    PADDED = "padded"  # [S, C, D]; rows past a slot's count are undefined


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """Rows grouped by the slot that is to work on them.

    x: RAGGED [R, D] or PADDED [S, C, D]; rows_S: int32 [S], the number of valid rows of each slot (RAGGED: they sum to R).
    scale: None, or float32 [R, B] or [S, C, B]: x is float8_e4m3fn and stands for x * scale, one scale per block of 128
    (moe_kernels/quant.py).
    """

    layout: Layout
    x: Tensor
    rows_S: Tensor
    scale: Tensor | None = None
