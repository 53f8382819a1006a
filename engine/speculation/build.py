"""What a rank drafts with, as its plan says."""

from __future__ import annotations

from configs.engine import Plan
from engine.speculation.drafter import Drafter
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Speculation


def make_speculation(plan: Plan) -> Speculation | None:
    """None: no request has drafts."""
    config = plan.speculation
    if config is None:
        return None
    drafter: Drafter | None = None
    if config.method == "ngram":
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    return Speculation(drafter, config.num_speculative_tokens, config.most_drafts(plan.max_num_seqs))
