"""What a rank drafts with, as its plan says."""

from __future__ import annotations

from pathlib import Path

from configs.engine import Plan
from engine.speculation.drafter import Drafter
from engine.speculation.gate import Gate
from engine.speculation.model_drafts import ModelDrafts
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Speculation
from engine.speculation.suffix import SuffixDrafter


def make_speculation(plan: Plan) -> Speculation | None:
    """None: no request has drafts."""
    config = plan.speculation
    if config is None:
        return None
    drafter: Drafter | None = None
    lookahead = 0
    if config.method == "ngram":
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    elif config.method == "suffix":
        drafter = SuffixDrafter(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    elif config.model_drafts:
        drafter, lookahead = ModelDrafts(), config.num_speculative_tokens
    forced = not plan.async_scheduling  # they follow tokens that are known
    most = config.most_drafts(plan.max_num_seqs)
    return Speculation(drafter, config.num_speculative_tokens, most, lookahead, plan.block_size, forced)


def make_gate(plan: Plan, speculation: Speculation, leads: bool) -> Gate:
    """leads: what is measured is remembered by this rank."""
    config = plan.speculation
    file = Path(config.memory) if config is not None and config.memory else None
    adaptive = config is not None and config.adaptive
    return Gate(speculation, adaptive, file, leads, most_sequences=plan.max_num_seqs)
