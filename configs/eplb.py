"""How experts are balanced at run time: the fields of --eplb-config (a JSON object). Without torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, structs

from configs.json_option import json_object


class EplbConfig(Struct, frozen=True, kw_only=True):
    """Steps are steps of the engine in which some rank had tokens.

    placement: a file of `moesaic eplb plan` to start with; None: the linear one.
    """

    window_size: int = 1000  # steps that a report of balancedness covers
    memory_steps: int = 10  # loads are averaged with exponential weights of this time constant
    reweight_interval: int = 5  # steps between new shares of the replicas; 0: never
    move_interval: int = 10  # steps between decisions about moves; 0: never
    move_budget_mib: float = 64.0  # weights that one rank may receive per step
    min_gain: float = 0.003  # a move must bring at least this much balancedness, per layer
    placement: str | None = None
    log_balancedness: bool = False


class EplbOptions(NamedTuple):
    """What --eplb-config may hold: the balancer's fields, and vLLM's place for the number of spare slots."""

    config: EplbConfig
    num_redundant_experts: int | None


FIELDS = tuple(field.name for field in structs.fields(EplbConfig))
# vLLM's fields with the same meaning under another name, or in another place.
STEP_INTERVAL, REDUNDANT, USE_ASYNC = "step_interval", "num_redundant_experts", "use_async"

MAX_STEPS = 1_000_000


def parse_eplb_config(text: str) -> EplbOptions:
    """A JSON object, or the path of a file that holds one ("@" before the path is allowed).

    vLLM's step_interval is move_interval, num_redundant_experts is the engine's option of that name, and use_async may
    only be true: weights always move beside the steps. ValueError on one line that names the field and the limit.
    """
    values, where = json_object("eplb_config", text)
    redundant = values.pop(REDUNDANT, None)
    if redundant is not None and (type(redundant) is not int or redundant < 0):
        raise ValueError(f"{where}: {REDUNDANT} must be an integer of at least 0, not {redundant!r:.100}")
    if values.pop(USE_ASYNC, True) is not True:
        raise ValueError(f"{where}: {USE_ASYNC} must be true: weights always move beside the steps")
    if STEP_INTERVAL in values:
        if "move_interval" in values:
            raise ValueError(f"{where}: {STEP_INTERVAL} and move_interval are the same; give one of them")
        values["move_interval"] = values.pop(STEP_INTERVAL)
    unknown = [name for name in values if name not in FIELDS]
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r:.100}; the fields are {', '.join(FIELDS)}")
    config = EplbConfig(**values)
    check_eplb(config, where)
    return EplbOptions(config, redundant)


def check_eplb(config: EplbConfig, where: str = "eplb_config") -> None:
    """ValueError on one line that names the first field that is wrong, and its limits."""
    for name, least, steps in (
        ("window_size", 1, config.window_size),
        ("memory_steps", 1, config.memory_steps),
        ("reweight_interval", 0, config.reweight_interval),
        ("move_interval", 0, config.move_interval),
    ):
        if type(steps) is not int or not least <= steps <= MAX_STEPS:
            raise ValueError(f"{where}: {name} must be an integer from {least} to {MAX_STEPS}, not {steps!r:.100}")
    budget, gain, placement = config.move_budget_mib, config.min_gain, config.placement
    if not _is_number(budget) or budget <= 0:
        raise ValueError(f"{where}: move_budget_mib must be a number of MiB above 0, not {budget!r:.100}")
    if not _is_number(gain) or not 0 <= gain < 1:
        raise ValueError(f"{where}: min_gain must be a number in [0, 1), not {gain!r:.100}")
    if placement is not None and (not isinstance(placement, str) or not Path(placement).is_file()):
        raise ValueError(f"{where}: placement must be a file of `moesaic eplb plan`; {placement!r:.300} is none")
    if type(config.log_balancedness) is not bool:
        raise ValueError(f"{where}: log_balancedness must be true or false, not {config.log_balancedness!r:.100}")


def plan_eplb(
    config: EplbConfig, enabled: bool, num_experts: int, num_ranks: int, slots_per_rank: int
) -> tuple[EplbConfig | None, str]:
    """How experts are balanced (None: they are not), and why. A wish that has no meaning for this model is no error:
    launch scripts carry it from one to the next."""
    ignored = " (--enable-eplb is ignored)" if enabled else ""
    if not num_experts:
        return None, f"a dense model has no experts to balance{ignored}"
    if num_ranks == 1:
        return None, f"one rank holds every expert: there is nothing to balance{ignored}"
    if not enabled:
        return None, "off unless asked for (--enable-eplb)"
    spare = slots_per_rank * num_ranks - num_experts
    why = f"as asked; {spare} spare slot(s) in each layer let the ranks share hot experts"
    if not spare:
        why = "as asked; without spare slots experts can only change places (--num-redundant-experts)"
    placement = config.placement
    return structs.replace(config, placement=str(Path(placement).absolute())) if placement else config, why


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
