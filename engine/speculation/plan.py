"""What is decided about drafts before there are ranks. No torch here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cache.spec import state_groups
from configs.engine import EngineConfig, Plan
from configs.speculation import Method, SpeculativeConfig, parse_speculative_config
from models.facts import ModelFacts, mtp_layers


def default_method(model: str | None, facts: ModelFacts) -> Method:
    """What drafts where nothing is asked for. model: None: the embedded one."""
    return "mtp" if model is None and mtp_layers(facts) else "prediction"


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
    if config.method == "mtp" and not mtp_layers(facts):
        raise ValueError("speculative_config: method mtp needs an MTP layer in the checkpoint; this one has none")
    if asked is not None:
        return config, "as asked"
    if config.method == "mtp":
        return config, "its own MTP layer drafts"
    return config, "requests may bring a prediction of their output"


def with_speculation(plan: Plan, config: EngineConfig, speculation: SpeculativeConfig | None, reason: str) -> Plan:
    """The plan with what was decided, and with what follows from it."""
    if speculation is not None and plan.device == "cuda" and config.speculative_config is None:
        speculation, reason = None, "on a GPU only if asked for: a step would wait for the tokens of the last one"
    more = {"speculation": reason}
    if speculation is not None and speculation.method != "prediction" and plan.async_scheduling:
        if config.async_scheduling is None:
            plan = replace(plan, async_scheduling=False)
            more["async_scheduling"] = (
                "drafts follow tokens that are known: a step cannot be scheduled beside the last one"
            )
        else:
            more["speculation"] += "; a step of a request with drafts is not scheduled beside the last one"
    return replace(plan, speculation=speculation, reasons={**plan.reasons, **more})
