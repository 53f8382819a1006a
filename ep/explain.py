"""Which kernels multiply by the experts' weights on a chip, and why not the others: for `moesaic explain`, which has
no GPU."""

from __future__ import annotations

import torch

from moe_kernels.backends import ExpertFacts, choose_experts
from moe_kernels.backends import explain_experts as _explain
from moe_kernels.matrix import WeightFormat


def explain_experts(
    hidden: int,
    width: int,
    dtype: torch.dtype,
    form: str,
    capability: tuple[int, int],
    installed: frozenset[str],
    name: str = "auto",
) -> tuple[str, dict[str, str]]:
    """What is taken, and for each backend "ok" or why it cannot run. form: of the weights (moe_kernels/matrix.py);
    capability: (9, 0) for Hopper; installed: names of backends whose package is there (triton is taken to be); name:
    what is asked for. Raises ValueError when that cannot run."""
    facts = ExpertFacts(hidden, width, dtype, WeightFormat(form), False, True, capability, installed)
    return choose_experts(name, facts), _explain(facts)
