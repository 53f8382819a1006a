"""What keeps and multiplies a rank's experts in one layer: the interface of its forms.

Legend: S slots, D hidden size, F expert width, T tokens, R rows arrived, C rows per padded slot.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moe_kernels.layout import ExpertBatch, TokenBatch
from moe_kernels.matrix import HalfMatrix, ScaledMatrix, WeightFormat, dequantize, dequantize_halves
from moe_kernels.token_sums import run_tokens


class ExpertWeights(Protocol):
    """Experts of rows in `dtype`, in S slots. Bodies here are for forms that have none of their own."""

    num_slots: int
    format: WeightFormat

    def storage(self, slot: int) -> tuple[Tensor, ...]:
        """Every tensor that makes up the expert of one slot, as contiguous views in the form in which it is kept: what
        a move to another rank's slot copies."""
        ...

    def fill(self, slot: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        """Put an expert into a slot; of any float dtype, converted (8 bits: rounded to the nearest)."""
        ...

    def fill_scaled(self, slot: int, gate_FD: ScaledMatrix, up_FD: ScaledMatrix, down_DF: ScaledMatrix) -> None:
        """The same from 8-bit weights, kept as they are where the format is the same."""
        self.fill(slot, *(dequantize(matrix, torch.float32) for matrix in (gate_FD, up_FD, down_DF)))

    def fill_halves(
        self, slot: int, gate_FD: HalfMatrix, up_FD: HalfMatrix, down_DF: HalfMatrix | ScaledMatrix
    ) -> None:
        """The same from 4-bit weights; of 8 bits may be those of down."""
        gate, up = (dequantize_halves(matrix, torch.float32) for matrix in (gate_FD, up_FD))
        if isinstance(down_DF, ScaledMatrix):
            self.fill(slot, gate, up, dequantize(down_DF, torch.float32))
        else:
            self.fill(slot, gate, up, dequantize_halves(down_DF, torch.float32))

    def fill_biases(self, slot: int, gate_F: Tensor, up_F: Tensor, down_D: Tensor) -> None:
        """Of experts that have biases."""
        raise AssertionError("experts with biases are not kept here")

    def clear(self, slot: int) -> None:
        """Make a slot's weights and biases zero."""
        ...

    def read(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """(gate [F, D], up [F, D], down [D, F]) of one slot in the rows' dtype; a copy or a view."""
        ...

    def run_rows(self, batch: ExpertBatch) -> Tensor:
        """Each slot's expert on its rows; the result has the layout of batch.x. PADDED: rows past a slot's count hold
        anything."""
        ...

    def run_tokens(self, batch: TokenBatch) -> Tensor:
        """[T, D]: the weighted sum of each token's experts that are here: rows in dtype, added up in float32 in the
        order of its choices. Or the rows (TokenBatch.rows_PD)."""
        return run_tokens(batch, self.num_slots, self.run_rows)
