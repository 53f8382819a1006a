"""Renaming the ranks of a new plan so that as much as can be stays where it is.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb import simple
from eplb.kernels import native_relabel

Ids = npt.NDArray[np.int32]


def relabel(new_LGS: Ids, old_LGS: Ids, num_experts: int, alive: Sequence[bool], domains: Sequence[int]) -> Ids:
    """The same rank contents, given to the ranks that keep most experts in place; int32 [L, G, S].

    The best in every layer (without a compiler: a good one) among all renamings that keep ranks of one failure domain
    together (so that what the plan covers stays covered); with no two ranks in a domain that is all of them. Only
    live ranks are renamed. Within a rank, an expert that stays keeps its slot. Both arrays have the same shape.
    """
    groups = rank_groups(alive, domains)
    native = native_relabel(new_LGS, old_LGS, num_experts, groups)
    return simple.relabel(new_LGS, old_LGS, groups) if native is None else native


def rank_groups(alive: Sequence[bool], domains: Sequence[int]) -> list[list[int]]:
    """The live ranks whose contents may be swapped without changing what a loss uncovers: those of one failure
    domain, or all when every rank is its own."""
    live = [rank for rank, lives in enumerate(alive) if lives]
    labels = [domains[rank] for rank in live] if domains else live
    if len(set(labels)) == len(labels):
        return [live]
    return [[rank for rank, own in zip(live, labels, strict=True) if own == label] for label in sorted(set(labels))]
