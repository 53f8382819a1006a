"""The paged cache: per layer a few tensors whose rows are token slots; a block is block_size consecutive rows.

Blocks are owned by engine/kv_cache.py; this module only holds the memory.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# MADV_POPULATE_WRITE of Linux 5.14: pages come as a write would bring them in, and what they hold stays.
_POPULATE_WRITE = 23
_BYTES_AT_ONCE = 128 << 10  # or a large page: then a few milliseconds, where a virtual machine gets it from its host


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one token costs. `entries`: the shape per token of each tensor of a layer, e.g. ((Hkv, Dh), (Hkv, Dh)) for
    keys and values of grouped-query attention, or ((kv_lora_rank + rope_dim,),) for the latent of MLA."""

    num_layers: int
    entries: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * sum(math.prod(shape) for shape in self.entries) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PagedKV:
    """layers[l][i]: tensor [num_blocks * block_size, *spec.entries[i]]."""

    num_blocks: int
    block_size: int
    layers: tuple[tuple[Tensor, ...], ...]

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].device

    @staticmethod
    def allocate(spec: KVSpec, num_blocks: int, block_size: int, device: torch.device) -> PagedKV:
        """Zeroed, so that rows gathered past a sequence's end hold finite numbers that a mask can discard."""
        rows = num_blocks * block_size
        layers = tuple(
            tuple(_zeros((rows, *shape), spec.dtype, device) for shape in spec.entries) for _ in range(spec.num_layers)
        )
        return PagedKV(num_blocks, block_size, layers)

    def bring_in(self, num_bytes: int) -> Iterator[int]:
        """Have the system give us the first num_bytes of the cache, in the order in which blocks are handed out, a little with
        each step of the iterator (how much that was). Else the first prompts pay for it, and that is a tenth of their time.
        Contents stay as they are. Ends early where the system does not know how, and at once for a device's memory."""
        tensors = [tensor for layer in self.layers for tensor in layer if tensor.is_cpu]
        sizes = [tensor.stride(0) * tensor.element_size() * self.block_size for tensor in tensors]  # of a block
        each = max(1, _BYTES_AT_ONCE // max(sizes, default=1))
        for first in range(0, self.num_blocks, each):
            count = min(each, self.num_blocks - first)
            for tensor, size in zip(tensors, sizes, strict=True):
                start = tensor.data_ptr() + first * size
                if num_bytes <= 0 or not _populate(start, start + count * size):
                    return
                num_bytes -= count * size
                yield count * size


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU numpy's zeros are fresh pages that cost nothing until they are touched; torch.zeros writes them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    return flat.view(dtype).view(shape)


def _populate(start: int, end: int) -> bool:
    """The whole pages from start to end."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        return True
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(first, last - first, _POPULATE_WRITE)) == 0
