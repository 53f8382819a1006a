"""Synthetic loads that drift, for trying things out: how skewed they are follows published artefacts of DeepSeek-V3,
how they drift is an assumption.

Each layer's loads are lognormal (sigma uniform in 0.8 to 1.5); three such domains are mixed with weights that wander
(AR(1), 0.9 per 100 steps), every expert has a wandering factor of its own (standard deviation 0.15), and each record
draws its tokens at random.

Legend: T records, L MoE layers, E logical experts, N domains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb.offline.trace import Progress, Trace, TraceMeta, make_trace

STEPS_PER_WINDOW = 100  # the loads wander from one window's to the next's
_KEEP, _MIX_SD, _NOISE_SD, _NUM_DOMAINS, _LEAD = 0.9, 0.5, 0.15, 3, 1.5

Floats = npt.NDArray[np.float64]


def synthetic_trace(
    layer_ids: Sequence[int],
    num_experts: int,
    top_k: int,
    *,
    records: int,
    steps_per_record: int,
    tokens_per_step: int,
    seed: int,
    switch_at: Sequence[int] = (),
    model: str = "",
    ranks: int = 0,
    progress: Progress | None = None,
) -> Trace:
    """Counts of `records` records. switch_at: records at which the workload changes its leading domain. Equal arguments
    give equal traces. Raises ValueError for numbers out of range."""
    for name, value in (("records", records), ("steps_per_record", steps_per_record), ("tokens", tokens_per_step)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more")
    if top_k > num_experts:
        raise ValueError(f"top_k is {top_k}; there are {num_experts} experts")
    rng = np.random.default_rng(seed)
    walk = _Walk(rng, len(layer_ids), num_experts)
    loads = np.empty((records, len(layer_ids), num_experts), dtype=np.float32)
    now_LE, then_LE, window, turned = walk.load(0), walk.advance().load(0), 0, 0
    for index in range(records):
        at = index * steps_per_record
        if index in switch_at:
            turned += 1
            now_LE, then_LE = walk.load(turned), walk.advance().load(turned)
        while at >= (window + 1) * STEPS_PER_WINDOW:
            window += 1
            now_LE, then_LE = then_LE, walk.advance().load(turned)
        along = at / STEPS_PER_WINDOW - window
        part_LE = now_LE * (1 - along) + then_LE * along
        loads[index] = rng.multinomial(tokens_per_step * steps_per_record * top_k, part_LE)
        if progress:
            progress(index + 1, records)
    meta = TraceMeta(model, ranks, top_k, f"synthetic, seed {seed}", tuple(layer_ids))
    steps = [steps_per_record] * records
    return make_trace(loads, meta, steps=steps, tokens=[tokens_per_step * steps_per_record] * records)


class _Walk:
    """The wandering weights of the domains, and the wandering factors of the experts."""

    def __init__(self, rng: np.random.Generator, num_layers: int, num_experts: int) -> None:
        self.rng = rng
        sigma_L = rng.uniform(0.8, 1.5, num_layers)
        base = np.exp(sigma_L[None, :, None] * rng.normal(size=(_NUM_DOMAINS, num_layers, num_experts)))
        self.base_NLE: Floats = base / base.mean(2, keepdims=True)
        self.mix_N = rng.normal(0, _MIX_SD, _NUM_DOMAINS)
        self.noise_LE = rng.normal(0, _NOISE_SD, (num_layers, num_experts))

    def advance(self) -> _Walk:
        """One window on."""
        fresh = np.sqrt(1 - _KEEP**2)
        self.mix_N = _KEEP * self.mix_N + fresh * self.rng.normal(0, _MIX_SD, _NUM_DOMAINS)
        self.noise_LE = _KEEP * self.noise_LE + fresh * self.rng.normal(0, _NOISE_SD, self.noise_LE.shape)
        return self

    def load(self, turned: int) -> Floats:
        """Expected loads, float64 [L, E], every layer summing to 1; domain `turned` (cyclically) leads."""
        weight_N = np.exp(self.mix_N + _LEAD * (np.arange(_NUM_DOMAINS) == turned % _NUM_DOMAINS))
        load_LE = np.tensordot(weight_N / weight_N.sum(), self.base_NLE, 1) * np.exp(self.noise_LE)
        part_LE: Floats = load_LE / load_LE.sum(1, keepdims=True)
        return part_LE
