"""How rows of tokens lie when they stand before the experts of a rank.

Legend: R rows arrived, S expert slots of this rank, C rows per slot when padded, D hidden size, B blocks of a row,
T tokens, K experts per token.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor


class Layout(enum.Enum):
    RAGGED = "ragged"  # [R, D], sorted by slot
    PADDED = "padded"  # [S, C, D]; rows past a slot's count are undefined


class ExpertBatch(Struct, frozen=True):
    """Rows grouped by the slot that is to work on them.

    x: RAGGED [R, D] or PADDED [S, C, D]; rows_S: int32 [S], the number of valid rows of each slot (RAGGED: they sum to
    R). scale: None, or float32 [R, B] or [S, C, B]: x is float8_e4m3fn and stands for x * scale, one scale per block of
    128 (moe_kernels/quant.py).
    """

    layout: Layout
    x: Tensor
    rows_S: Tensor
    scale: Tensor | None = None


class TokenMemory(NamedTuple):
    """Addresses on the host: of the number of tokens (int64), the tokens, their slots, and the rows that are wanted,
    of a TokenBatch that has others every time. It may have none now, and then its tensors have no addresses."""

    num_tokens: int
    x: int
    slot: int
    rows: int


class TokenBatch(Struct, frozen=True):
    """Tokens as they are, each with its choice of slots: the experts sort them and return the weighted sum, [T, D], or
    a row for each choice.

    x [T, D]; slot int64 [T, K], slots first_slot to first_slot + S - 1 are this rank's, others count nothing; weight
    float32 [T, K]. sum_dtype: of the sum; float32 or x's. rows_PD: the results of the P choices whose slots are here
    are wanted before they are weighted and summed, in x's dtype and in the order of tokens and choices; they may be put
    there (memory that is not new with every step has its pages already). None: the sum is wanted. memory: where it all
    lies when the experts run again from a graph; None: they cannot.
    """

    x_TD: Tensor
    slot_TK: Tensor
    weight_TK: Tensor
    first_slot: int
    sum_dtype: torch.dtype
    rows_PD: Tensor | None = None
    memory: TokenMemory | None = None

    def rows_of(self, num_slots: int) -> Tensor:
        """int32 [S]: how many tokens each of this rank's slots gets."""
        if (
            self.slot_TK.is_cpu
        ):  # numpy does so little in a fifth of the time; this is asked for in every layer and step
            key_P = self.slot_TK.numpy().reshape(-1) - self.first_slot
            rows_S = np.bincount(key_P[(key_P >= 0) & (key_P < num_slots)], minlength=num_slots)
            return torch.from_numpy(rows_S.astype(np.int32))
        slot_P = self.slot_TK.flatten() - self.first_slot
        here_P = slot_P[(slot_P >= 0) & (slot_P < num_slots)]
        return torch.bincount(here_P, minlength=num_slots).to(torch.int32)
