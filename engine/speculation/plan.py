"""What is decided about drafts before there are ranks. No torch here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cache.spec import state_groups
from configs.engine import Plan
from configs.speculation import Method, SpeculativeConfig, parse_speculative_config
from models.facts import ModelFacts

ASYNC_WAITS = "; a request with drafts waits until its last tokens are known, so its steps do not overlap"


def default_method(model: str | None, facts: ModelFacts) -> Method:
    """What drafts where nothing is asked for. model: None: the embedded one."""
    return "prediction"


def plan_speculation(
    asked: dict[str, Any] | None, facts: ModelFacts, default: Method
) -> tuple[SpeculativeConfig | None, str]:
    """None: no drafts; and why. ValueError, one line, where what was asked for cannot be."""
    config = parse_speculative_config({"method": default} if asked is None else asked)
    if config is None:
        return None, "as asked"
    if state_groups(facts.cache_spec("float32")):
        if asked is not None:
            raise ValueError(
                f"speculative_config: {facts.architecture} keeps states, which drafts cannot be taken from"
            )
        return None, "the model keeps states, which drafts cannot be taken back from"
    if asked is not None:
        return config, "as asked"
    return config, "requests may bring a prediction of their output"


def with_speculation(plan: Plan, speculation: SpeculativeConfig | None, reason: str) -> Plan:
    if speculation is not None and plan.async_scheduling:
        reason += ASYNC_WAITS
    return replace(plan, speculation=speculation, reasons={**plan.reasons, "speculation": reason})
