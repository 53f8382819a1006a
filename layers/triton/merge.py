# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Joining attention over parts of the keys in Triton: each part gives its result and the log of its sum of
exponentials.

Legend: B sequences with one query each, H heads, G parts (splits), Y width of a result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPLITS = 512  # room for more than there ever are: one compiled kernel for all steps


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    part_ptr, lse_ptr, out_ptr, num_heads, num_splits, width, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out [B, H, Y] from parts [B, G, H, Y]."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, column = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    lse = tl.load(lse_ptr + (b * num_splits + split) * num_heads + head, mask=split < num_splits, other=float("-inf"))
    highest = tl.max(lse, 0)
    # Without any key at all: 0 for everything, not the NaN of -inf + inf.
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(lse - highest), 0)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for g in range(num_splits):
        place = (b * num_splits + g) * num_heads + head
        weight = tl.exp(tl.load(lse_ptr + place) - highest)
        acc += weight * tl.load(part_ptr + place * width + column, mask=column < width, other=0.0)
    out = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (b * num_heads + head) * width + column, out.to(out_ptr.dtype.element_ty), mask=column < width)


def merge_splits(part_BGHY: Tensor, lse_BGH: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention over the keys of all splits, [B, H, Y] in `dtype`; part and lse (natural logarithm) float32,
    contiguous. mla.merge.merge, folded over the splits; a split without keys has lse -inf."""
    b, num_splits, heads, width = part_BGHY.shape
    out_BHY = torch.empty(b, heads, width, dtype=dtype, device=part_BGHY.device)
    if out_BHY.numel():
        _merge_kernel[(b, heads)](
            part_BGHY, lse_BGH, out_BHY, heads, num_splits, width,
            SPLITS=max(_SPLITS, triton.next_power_of_2(num_splits)),
            COLUMNS=triton.next_power_of_2(width),
        )  # fmt: skip
    return out_BHY
