"""The memory of a cache: per layer the tensors that its group describes (cache/spec.py).

Rows of token groups are token slots; a block is block_size consecutive rows. Who owns which is cache/manager.py's
business.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from cache.residuals import Residuals, no_residuals
from cache.spec import CacheSizes, CacheSpec, places_of

# MADV_POPULATE_WRITE of Linux 5.14: pages come as a write would bring them in, and what they hold stays.
_POPULATE_WRITE = 23
_LINE = 64  # bytes of a cache line, at which memory begins
_BYTES_AT_ONCE = 128 << 10  # or a large page: then a few milliseconds, where a virtual machine gets it from its host


class CacheMemory(Struct, frozen=True):
    """layers[l][i]: the i-th field that layer l keeps. Of a token group [blocks * block_size, *shape], a row per token
    slot; of a state group [records, *shape]. residuals: of the step under way."""

    spec: CacheSpec
    sizes: CacheSizes
    layers: tuple[tuple[Tensor, ...], ...]
    residuals: Residuals

    @property
    def num_blocks(self) -> int:
        return self.sizes.num_blocks

    @property
    def block_size(self) -> int:
        return self.sizes.block_size

    @property
    def device(self) -> torch.device:
        return next(field.device for layer in self.layers for field in layer)

    @staticmethod
    def allocate(
        spec: CacheSpec,
        sizes: CacheSizes,
        device: torch.device,
        fields: Sequence[Tensor] | None = None,
        residuals: Residuals | None = None,
    ) -> CacheMemory:
        """Zeroed, so that rows gathered past a sequence's end hold finite numbers that a mask can discard, and so that
        record 0 of a state is what a sequence begins with. fields: zeroed bytes to lie in, as `places_of` has them;
        None: memory of its own. residuals: None: none are kept."""
        num_layers = 1 + max(layer for group in spec for layer in group.layers)
        layers: list[tuple[Tensor, ...]] = [()] * num_layers
        for number, place in enumerate(places_of(spec, sizes)):
            shape, dtype = (place.num_rows, *place.field.shape), getattr(torch, place.field.dtype)
            memory = _zeros(shape, dtype, device) if fields is None else fields[number].view(dtype).view(shape)
            layers[place.layer] = (*layers[place.layer], memory)
        return CacheMemory(spec, sizes, tuple(layers), residuals or no_residuals())

    def prefault(self, num_bytes: int) -> Iterator[int]:
        """Have the system give us the first num_bytes of the cache, in the order in which blocks are handed out, a
        little with each step of the iterator (how much that was). Else the first prompts pay for it, and that is a
        tenth of their time. Contents stay as they are. Ends early where the system does not know how, and at once for a
        device's memory."""
        rows = self.num_blocks * self.block_size
        tensors = [field for layer in self.layers for field in layer if field.is_cpu and field.shape[0] == rows]
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
    """On the CPU numpy's zeros are fresh pages that cost nothing until they are touched; torch.zeros writes them
    all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def _populate(start: int, end: int) -> bool:
    """The whole pages from start to end."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        return True
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(first, last - first, _POPULATE_WRITE)) == 0
