"""What some options say of others: -O, the levels of optimization, and `--deterministic`, results that do not depend
on what else is computed (docs/deterministic.md)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from configs.engine import EngineConfig
from configs.machine import Machine

HIGHEST = 3
_OFF: dict[int, dict[str, tuple[object, object]]] = {  # below a level: field -> (undecided, without it)
    1: {"cudagraph_mode": ("auto", "none"), "async_scheduling": (None, False)},
    2: {"enable_dbo": ("auto", "off"), "speculative_config": (None, {"method": "none"})},
}


def at_level(config: EngineConfig) -> EngineConfig:
    """The config with what its level leaves out turned off, unless that is asked for by a field of its own. ValueError.

    0: eager steps, one after the other; 1: graphs, and a schedule made while a step computes; 2: split steps and
    drafts, where they are measured to pay; 3: native kernels chosen by measurement at the start (engine/plan.py)."""
    level = config.optimization_level
    if not 0 <= level <= HIGHEST:
        raise ValueError(f"optimization_level (-O) must be from 0 to {HIGHEST}, not {level}")
    changed: dict[str, Any] = {}
    for above, fields in _OFF.items():
        if level < above:
            changed |= {name: off for name, (open_, off) in fields.items() if getattr(config, name) == open_}
    return replace(config, **changed)


def fixed_order(config: EngineConfig, machine: Machine, why: dict[str, str]) -> EngineConfig:
    """The same wishes, with every way that adds numbers up in an order of its own taken out. ValueError: it was asked
    for together with something that cannot be had in one order."""
    if not config.deterministic:
        return config
    if machine.device != "cpu":
        raise ValueError("deterministic works on a CPU; the kernels for a GPU split sums by the number of sequences")
    if machine.native_kernels == "none":
        raise ValueError("deterministic needs the native kernels, which are not there: torch adds up as it likes")
    if config.kv_cache_dtype == "fp8":
        raise ValueError("deterministic and kv_cache_dtype 'fp8' exclude each other: torch attends to such a cache")
    if config.mla_prefill == "naive":
        raise ValueError("deterministic and mla_prefill 'naive' exclude each other: decodes are absorbed")
    why["deterministic"] = "asked for: prompts attend as decodes do, weights are packed, sums have one order"
    travel = "bf16" if config.dispatch_dtype == "auto" else config.dispatch_dtype
    return replace(config, mla_prefill="absorbed", dispatch_dtype=travel)
