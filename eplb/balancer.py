"""The policy that runs beside the engine: re-weight often, move rarely.

Pure and deterministic: equal placements and equal counts give equal decisions, so every rank computes its own.

Legend: L MoE layers, E logical experts.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from eplb.balance import Floats, checked_load
from eplb.mover import improve
from eplb.placement import Placement
from eplb.repair import SlotUpdate, diff
from eplb.shares import reweight

_SLOW = 3  # the slow average remembers so many times longer; its distance to the fast one is the trend
_CATCH_UP = 0.25  # of the distance between the two, for new shares
_LEAD_STEPS = 20  # moves are made for the loads expected so far ahead: weights that were brought stay a while
_CALM = 0.005  # part of all slots moved per _CHURN_STEPS; beyond it a move must gain proportionally more
_CHURN_STEPS = 100
# A gain must be at least this part of the standard deviation that sampling gives a rank's load, and, where that is
# large (few tokens: any placement can then be fitted to chance), this multiple of its square.
_NOISE, _CHANCE = 0.25, 8.0


class BalancerConfig(Struct, frozen=True, kw_only=True):
    """All in steps, bytes and balancedness (mean / max of rank loads).

    memory_steps: time constant of the average of loads; reweight_interval, move_interval: steps between decisions, 0
    never; move_budget_bytes: what one rank may receive per step; min_gain: balancedness of its layer that an expert
    brought must gain, more while many are being moved; max_moves_per_layer: experts brought per decision. Several
    tokens' worth of sampling noise are never taken for a gain.
    """

    memory_steps: int = 10
    reweight_interval: int = 5
    move_interval: int = 10
    move_budget_bytes: int = 64 << 20
    min_gain: float = 0.003
    bytes_per_expert: int = 44 << 20
    max_moves_per_layer: int = 4


class Decision(Struct, frozen=True):
    """The placement to use from now on. moved: the experts to be brought to a slot before (none when only shares
    change).

    reason: one line for people.
    """

    placement: Placement
    moved: tuple[SlotUpdate, ...]
    reason: str


class Balancer:
    """Watches the tokens per expert of every step and says when to change shares or to move experts."""

    def __init__(self, placement: Placement, config: BalancerConfig) -> None:
        self.placement = placement
        self._config = config
        shape = (placement.num_layers, placement.num_experts)
        self._fast_LE, self._slow_LE = np.zeros(shape), np.zeros(shape)
        self._steps = 0
        self._seeded = False
        self._churn = 0.0  # experts brought, forgotten over _CHURN_STEPS

    @property
    def load_LE(self) -> Floats:
        """What new shares are made from: tokens per step, float64 [L, E]: the average, and a part of the way that the
        trend has gone since, for an average lags behind."""
        ahead: Floats = np.maximum(self._fast_LE + _CATCH_UP * (self._fast_LE - self._slow_LE), 0.5 * self._fast_LE)
        return ahead

    def seed(self, load_LE: npt.ArrayLike) -> None:
        """Begin with these loads instead of none; any unit, the first step that is observed gives the scale."""
        self._fast_LE = checked_load(load_LE, self.placement.num_experts).copy()
        self._slow_LE = self._fast_LE.copy()
        self._seeded = True

    def resync(self, placement: Placement) -> None:
        """The placement was changed by others (a rank was lost or came back, a move was not carried out): go on from
        it. Raises ValueError when it has other layers or experts."""
        shape = (placement.num_layers, placement.num_experts)
        if shape != self._fast_LE.shape:
            raise ValueError(
                f"the placement has {shape[0]} layers of {shape[1]} experts; before {list(self._fast_LE.shape)}"
            )
        self.placement = placement

    def observe(self, counts_LE: npt.ArrayLike) -> Decision | None:
        """Counts of one step, [L, E]; a decision when there is one. It is taken as applied at once.

        Raises ValueError, and forgets the step, when a count is negative or not finite, or the shape does not fit.
        """
        counts = checked_load(counts_LE, self.placement.num_experts)
        if counts.shape != self._fast_LE.shape:
            raise ValueError(f"counts have {len(counts)} layers; the placement has {self.placement.num_layers}")
        self._learn(counts)
        config = self._config
        if not self._fast_LE.any():
            return None
        if config.move_interval and self._steps % config.move_interval == 0:
            decision = self._move()
            if decision is not None:
                return decision
        if config.reweight_interval and self._steps % config.reweight_interval == 0:
            return self._reweight()
        return None

    def _learn(self, counts: Floats) -> None:
        if self._steps == 0 and self._seeded:
            self._fast_LE *= counts.sum() / max(self._fast_LE.sum(), 1e-300)
            self._slow_LE = self._fast_LE.copy()
        self._steps += 1
        self._churn *= 1 - 1 / _CHURN_STEPS
        for average, memory in ((self._fast_LE, self._config.memory_steps), (self._slow_LE, self._slow_steps)):
            weight = 1 / memory if self._seeded else 1 / min(self._steps, memory)
            average += weight * (counts - average)

    @property
    def _slow_steps(self) -> int:
        return _SLOW * self._config.memory_steps

    def _expected(self) -> Floats:
        """The loads in _LEAD_STEPS steps if the trend goes on; never less than a fifth of today's."""
        fast, slow = (
            average / np.maximum(average.sum(1, keepdims=True), 1e-300) for average in (self._fast_LE, self._slow_LE)
        )
        trend = (fast - slow) / (self._slow_steps - self._config.memory_steps)
        ahead: Floats = np.maximum(fast + _LEAD_STEPS * trend, 0.2 * fast)
        return ahead

    def _least_gain(self) -> float:
        """What an expert brought must gain: more when many were brought lately, and more than chance brings about."""
        live = sum(self.placement.alive)
        slots = max(1, self.placement.num_layers * live * self.placement.slots_per_rank)
        price = max(1.0, self._churn / slots / _CALM)
        tokens = self._fast_LE.sum() / len(self._fast_LE) * 2 * self._config.memory_steps
        noise = math.sqrt(live / max(tokens, 1.0))
        return max(self._config.min_gain * price, _NOISE * noise, _CHANCE * noise * noise)

    def _move(self) -> Decision | None:
        if self.placement.everywhere:
            return None
        config = self._config
        gain = self._least_gain()
        better = improve(
            self.placement,
            self._expected(),
            max_moves=self.placement.slot_to_expert.size,
            max_moves_per_layer=config.max_moves_per_layer,
            min_gain=gain,
            bytes_per_expert=config.bytes_per_expert,
            budget_bytes=max(config.move_budget_bytes * config.move_interval, config.bytes_per_expert),
            share_load_LE=self.load_LE,
        )
        if better is None:
            return None
        moved = diff(self.placement, better)
        self._churn += len(moved)
        self.placement = better
        return Decision(better, moved, f"{len(moved)} expert(s) to bring, each for at least {gain:.4f} of balancedness")

    def _reweight(self) -> Decision:
        old = self.placement
        share = reweight(old.slot_to_expert, self.load_LE, old.alive)
        self.placement = replace(old, share=share)
        return Decision(self.placement, (), "new shares")
