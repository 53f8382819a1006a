"""Rows of the paged latent cache: how they are written and gathered.

Legend: T tokens of the step, R rows of the cache (blocks of block_size rows), X width of a row, G blocks gathered.
"""

from __future__ import annotations

from torch import Tensor


def write(cache_RX: Tensor, entry_TX: Tensor, slots_T: Tensor) -> None:
    """Store one row per token: the latent after its norm, then the rotated key. slots_T: int64 [T]."""
    cache_RX.index_copy_(0, slots_T, entry_TX)


def gather(cache_RX: Tensor, blocks_G: Tensor, block_size: int) -> Tensor:
    """The rows of the named blocks, [G * block_size, X]. Whole blocks at a time: long runs of memory, short indices."""
    num_rows, width = cache_RX.shape
    blocks = cache_RX.view(num_rows // block_size, block_size * width)
    return blocks.index_select(0, blocks_G).view(-1, width)
