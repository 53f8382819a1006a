"""Inputs of several tests.

Legend: T tokens, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def routing(num_tokens: int, top_k: int, num_slots: int, seed: int) -> tuple[Tensor, Tensor]:
    """(slot int64 [T, K], distinct within a row; weight float32 [T, K])."""
    generator = torch.Generator().manual_seed(seed)
    slots = [torch.randperm(num_slots, generator=generator)[:top_k] for _ in range(num_tokens)]
    slot_TK = torch.stack(slots) if slots else torch.empty(0, top_k, dtype=torch.int64)
    return slot_TK, torch.rand(num_tokens, top_k, generator=generator)
