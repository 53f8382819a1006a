"""The paged cache: per layer a few tensors whose rows are token slots; a block is block_size consecutive rows.

Blocks are owned by engine/kv_cache.py; this module only holds the memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


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

    @staticmethod
    def allocate(spec: KVSpec, num_blocks: int, block_size: int, device: torch.device) -> PagedKV:
        """Zeroed, so that rows gathered past a sequence's end hold finite numbers that a mask can discard."""
        rows = num_blocks * block_size
        layers = tuple(
            tuple(_zeros((rows, *shape), spec.dtype, device) for shape in spec.entries) for _ in range(spec.num_layers)
        )
        return PagedKV(num_blocks, block_size, layers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU numpy's zeros are fresh pages that cost nothing until they are touched; torch.zeros writes them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    return flat.view(dtype).view(shape)
