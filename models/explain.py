"""Which attention a model gets on a chip, and why not the others: for `moesaic explain`, which has no GPU."""

from __future__ import annotations

import torch

from mla.protocol import MlaShape
from mla.requirements import MlaFacts, choose_mla, explain_mla
from models.facts import ModelFacts


def explain_attention(
    facts: ModelFacts,
    dtype: torch.dtype,
    capability: tuple[int, int],
    installed: frozenset[str],
    block_size: int,
    name: str = "auto",
    fp8_cache: bool = False,
) -> tuple[str, dict[str, str]]:
    """What is taken, and for each backend "ok" or why it cannot run. Arguments as ep.explain.explain_experts;
    fp8_cache: of latents."""
    if facts.mla_dims is None:
        return "triton", {"triton": "ok"}
    known = MlaFacts(MlaShape(*facts.mla_dims), dtype, True, capability, installed | {"triton"}, fp8_cache, block_size)
    return choose_mla(name, known), explain_mla(known)
