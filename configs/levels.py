"""-O, the levels of optimization: what each of them leaves out. Standard library only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from configs.engine import EngineConfig

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
