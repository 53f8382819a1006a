"""In what form a token's hidden state travels to its experts. The results come back in the dtype in which they are
computed.

Legend: T tokens, N tokens that arrived, R rows, S slots, C rows per padded slot, D hidden size, B blocks of a row, W
width of a row as it travels.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moe_kernels import ExpertBatch, Layout, dequantize_rows, quantize_rows
from moe_kernels.quant import num_blocks

_SCALE_BYTES = 4
NAMES = ("plain", "fp8")


class Rows(Protocol):
    """width and dtype of a row as it travels."""

    width: int
    dtype: torch.dtype

    def pack(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, W] of `dtype`."""
        ...

    def tokens(self, rows_NW: Tensor) -> Tensor:
        """What arrived, as it was before it was packed but for the rounding: [N, W] -> [N, D]."""
        ...

    def batch(self, layout: Layout, rows: Tensor, rows_S: Tensor) -> ExpertBatch:
        """What arrived, sorted, RAGGED [R, W] or PADDED [S, C, W], for the experts."""
        ...


class PlainRows:
    """As they are."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self.width = hidden_size
        self.dtype = dtype

    def pack(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def tokens(self, rows_NW: Tensor) -> Tensor:
        return rows_NW

    def batch(self, layout: Layout, rows: Tensor, rows_S: Tensor) -> ExpertBatch:
        return ExpertBatch(layout, rows, rows_S)


class Fp8Rows:
    """float8_e4m3fn with a scale per 128 of a row (moe_kernels/quant.py): half the bytes of bfloat16. As bytes, because
    not every transport knows FP8; the scales come behind the values. A rank's own rows are rounded too, so that a
    result does not depend on where an expert lives."""

    dtype = torch.uint8

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        """dtype: of the rows before and after they travel."""
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._scales_at = -(-hidden_size // _SCALE_BYTES) * _SCALE_BYTES
        self.width = self._scales_at + _SCALE_BYTES * num_blocks(hidden_size)

    def pack(self, x_TD: Tensor) -> Tensor:
        value_TD, scale_TB = quantize_rows(x_TD)
        rows_TW = torch.zeros(x_TD.shape[0], self.width, dtype=self.dtype, device=x_TD.device)
        rows_TW[:, : self._hidden_size] = value_TD.view(torch.uint8)
        rows_TW[:, self._scales_at :] = scale_TB.view(torch.uint8)
        return rows_TW

    def tokens(self, rows_NW: Tensor) -> Tensor:
        return dequantize_rows(*self._fields(rows_NW), self._dtype)

    def batch(self, layout: Layout, rows: Tensor, rows_S: Tensor) -> ExpertBatch:
        value, scale = self._fields(rows)
        return ExpertBatch(layout, value, rows_S, scale)

    def _fields(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """value float8_e4m3fn [..., D], scale float32 [..., B]."""
        value = rows[..., : self._hidden_size].contiguous().view(torch.float8_e4m3fn)
        return value, rows[..., self._scales_at :].contiguous().view(torch.float32)


def make_rows(name: str, hidden_size: int, dtype: torch.dtype) -> Rows:
    """name: "plain" or "fp8". Raises ValueError for another one."""
    if name == "plain":
        return PlainRows(hidden_size, dtype)
    if name == "fp8":
        return Fp8Rows(hidden_size, dtype)
    raise ValueError(f"rows are {name!r}; they must be {' or '.join(NAMES)}")


def padding(dtype: torch.dtype) -> float:
    """What rows past a slot's count are filled with, so that it shows at once who reads them: NaN, also in FP8
    (0x7f)."""
    return 0x7F if dtype is torch.uint8 else float("nan")
