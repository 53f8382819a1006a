"""In what form matrices are kept in panels (native/src/experts.h): their numbers, by name."""

from __future__ import annotations

import enum


class WeightFormat(enum.Enum):
    """How weights are kept in memory."""

    PLAIN = "plain"  # in the dtype of the rows
    FP8 = "fp8"  # e4m3, a scale for 128 x 128 weights
    INT8 = "int8"  # a scale for 128 inputs of each output
    MXFP4 = "mxfp4"  # e2m1, a scale (a power of two) for 32 inputs of each output
    INT4 = "int4"  # numbers from -8 to 7, a float16 scale for 32 inputs of each output
    INT4_ZERO = "int4_zero"  # the same, less a zero point (float16) before it is scaled
    INT4_INT8 = "int4_int8"  # of experts: gate and up as INT4_ZERO, down as INT8
    BF16 = "bf16"  # bfloat16, though the rows are float32; of rows of bfloat16 it is PLAIN

    @property
    def number(self) -> int:
        """Its Format of experts.h."""
        return _NUMBERS[self]

    @property
    def parts(self) -> tuple[WeightFormat, WeightFormat, WeightFormat]:
        """Of an expert's gate, up and down."""
        first, last = (WeightFormat.INT4_ZERO, WeightFormat.INT8) if self is WeightFormat.INT4_INT8 else (self, self)
        return first, first, last


_NUMBERS = {form: number for number, form in enumerate(WeightFormat)}
HALVES = (WeightFormat.MXFP4, WeightFormat.INT4, WeightFormat.INT4_ZERO)  # kept by the native kernels only
HALF_GROUP = 32  # inputs that share a scale of theirs
