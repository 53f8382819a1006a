"""How experts are balanced at run time: the fields of --eplb-config (a JSON object). Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbConfig:
    """Steps are steps of the engine in which some rank had tokens.

    placement: a file of `moesaic eplb plan` to start with; None: the linear one.
    """

    window_size: int = 1000  # steps that a report of balancedness covers
    memory_steps: int = 20  # loads are averaged with exponential weights of this time constant
    reweight_interval: int = 5  # steps between new shares of the replicas; 0: never
    move_interval: int = 20  # steps between decisions about moves; 0: never
    move_budget_mib: float = 64.0  # weights that one rank may receive per step
    min_gain: float = 0.005  # a move must bring at least this much balancedness, per layer
    placement: str | None = None
    log_balancedness: bool = False
