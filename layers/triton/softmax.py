# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Softmax over keys that come a tile at a time, for the attention kernels in Triton.

Legend: M rows of a program (heads, queries), S keys of a tile, Y width of a value.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # scores are powers of two: the hardware's own exponential
_LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def fold(score, value, acc, highest, total):
    """score [M, S] in units of log2, -inf for hidden keys; value [S, Y] into (acc [M, Y], highest [M], total [M]). A
    row must see a key of its first tile."""
    higher = tl.maximum(highest, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(highest - higher)
    acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total * shrink + tl.sum(weight, 1)


@triton.jit
def finish(acc, highest, total):
    """(out [M, Y], lse [M], natural logarithm). Without any key: 0, and -inf, a weight of 0."""
    lse = tl.where(total > 0, (highest + tl.log2(total)) * _LOG_2, float("-inf"))
    return acc / tl.where(total > 0, total, 1.0)[:, None], lse
