"""What is decided about drafts before there are ranks. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from configs.engine import EngineConfig, Plan
from configs.machine import measured_here
from configs.speculation import Method, SpeculativeConfig, parse_speculative_config
from dbo.memory import file_of
from engine.speculation.times import StepTimes
from models.facts import ModelFacts, mtp_layers, takes_drafts, with_drafts, with_kept_drafts
from models.hub import located
from models.registry import read_config

WHOLE_BYTES = 1 << 30  # of the experts of the layer that drafts in float32, where every rank has all of them


def default_method(model: str | None, facts: ModelFacts) -> Method:
    """What drafts where nothing is asked for. model: None: the embedded one."""
    return "mtp" if model is None and mtp_layers(facts) else "prediction"


def drafter_of(asked: dict[str, Any] | None, download_dir: str | None) -> Path | None:
    """The directory of the checkpoint that is to draft; None: none of its own. ValueError, one line, where that cannot
    be."""
    config = None if asked is None else parse_speculative_config(asked)
    if config is None or not config.model:
        return None
    return located(config.model, None, download_dir, what="drafter")


def plan_speculation(
    asked: dict[str, Any] | None, facts: ModelFacts, default: Method
) -> tuple[SpeculativeConfig | None, str]:
    """None: no drafts; and why. ValueError, one line, where what was asked for cannot be."""
    config = parse_speculative_config({"method": default} if asked is None else asked)
    if config is None:
        return None, "as asked"
    if not takes_drafts(facts):
        if asked is not None:
            raise ValueError(
                f"speculative_config: {facts.architecture} keeps states, which drafts cannot be taken from"
            )
        return None, "the model keeps states, which drafts cannot be taken back from"
    if config.method == "mtp" and not mtp_layers(facts):
        raise ValueError("speculative_config: method mtp needs an MTP layer in the checkpoint; this one has none")
    if config.method == "eagle3":
        return config, f"as asked: {config.model} drafts"
    if asked is not None:
        return config, "as asked"
    if config.method == "mtp":
        return config, "its own MTP layer drafts"
    return config, "requests may bring a prediction of their output"


def speculating(facts: ModelFacts, speculation: SpeculativeConfig | None) -> ModelFacts:
    """The model as it is served with these drafts."""
    if speculation is None:
        return facts
    facts = with_kept_drafts(facts, speculation.num_speculative_tokens)
    return with_drafts(facts, speculation.whole) if speculation.method == "mtp" else facts


def planned_facts(plan: Plan) -> ModelFacts:
    """Of the model as it is served, with what drafts."""
    return speculating(read_config(plan.model_path, plan.hf_overrides), plan.speculation)


def with_whole_layer(speculation: SpeculativeConfig | None, facts: ModelFacts) -> SpeculativeConfig | None:
    """On CPUs: a layer that drafts without asking other ranks for their experts, where that takes little memory."""
    if speculation is None or speculation.method != "mtp":
        return speculation
    num_bytes = 3 * 4 * facts.num_experts * facts.moe_intermediate_size * facts.hidden_size
    return replace(speculation, whole=facts.num_moe_layers > 0 and num_bytes <= WHOLE_BYTES)


def with_speculation(
    plan: Plan, config: EngineConfig, speculation: SpeculativeConfig | None, reason: str, folder: Path
) -> Plan:
    """The plan with what was decided, and with what follows from it. folder: where times are remembered."""
    if speculation is not None and plan.ranks_per_machine and config.speculative_config is None:
        speculation, reason = None, "on a GPU only if asked for: a step would wait for the tokens of the last one"
    if speculation is not None and speculation.whole:
        reason += ", whose experts are all on every rank"
    more = {"speculation": reason}
    if speculation is not None and speculation.method != "prediction" and plan.async_scheduling:
        if config.async_scheduling is None:
            plan = replace(plan, async_scheduling=False)
            more["async_scheduling"] = (
                "drafts follow tokens that are known: a step cannot be scheduled beside the last one"
            )
        else:
            more["speculation"] += "; a step of a request with drafts is not scheduled beside the last one"
    if speculation is not None and speculation.adaptive:
        file = file_of(folder, _key(plan, speculation), "speculation")
        found = StepTimes.read(file)
        speculation = replace(speculation, memory=str(file))
        most = f"at most {speculation.num_speculative_tokens}, as many as make most tokens per second"
        more["speculation"] += f"; {most}; " + (
            "measured while serving, and then remembered" if found is None else f"remembered: {found.told()}"
        )
    return replace(plan, speculation=speculation, reasons={**plan.reasons, **more})


def _key(plan: Plan, speculation: SpeculativeConfig) -> dict[str, str | int]:
    """Everything that the times depend on, as far as it can be known before the ranks run."""
    return {
        **measured_here(),
        "model": plan.model_path,
        "dtype": plan.dtype,
        "experts": plan.expert_format,
        "linears": plan.linear_format,
        "slots": plan.slots_per_rank,
        "ranks": plan.data_parallel_size,
        "local_ranks": plan.data_parallel_size_local,
        "backend": plan.all2all_backend,
        "device": plan.device,
        "threads": plan.threads_per_rank,
        "kernels": plan.native_kernels,
        "graphs": plan.cudagraph_mode,
        "deterministic": int(plan.deterministic),
        "method": speculation.method,
        "whole": int(speculation.whole),
    }
