"""What a rank drafts with, as its plan says."""

from __future__ import annotations

from collections.abc import Sequence

from configs.engine import Plan
from engine.agreement import StepPlan
from engine.hooks import StepCompanion, StepHook
from engine.schedule import Schedule
from engine.speculation.drafter import Drafter
from engine.speculation.model_drafts import ModelDrafts
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Speculation


def make_speculation(plan: Plan) -> Speculation | None:
    """None: no request has drafts."""
    config = plan.speculation
    if config is None:
        return None
    drafter: Drafter | None = None
    lookahead = 0
    if config.method == "ngram":
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    elif config.method == "mtp":
        drafter, lookahead = ModelDrafts(), config.num_speculative_tokens
    return Speculation(
        drafter, config.num_speculative_tokens, config.most_drafts(plan.max_num_seqs), lookahead, plan.block_size
    )


class Gate(StepCompanion):
    """Whether the model drafts at the end of a step, and how deep."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation

    def join(self, plan: StepPlan, said: Sequence[Sequence[int]]) -> StepHook | None:
        return _Depth(self._speculation.depth)


class _Depth(StepHook):
    watches = True

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def begin(self, schedule: Schedule) -> None:
        schedule.draft_depth = self._depth
