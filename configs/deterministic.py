"""Results that do not depend on what else is computed (docs/deterministic.md): what `--deterministic` decides."""

from __future__ import annotations

from dataclasses import replace

from configs.engine import EngineConfig
from configs.machine import Machine


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
