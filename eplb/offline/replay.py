"""What policies would have done with a recorded load: no view of the future, every record scored before it is learnt
from.

Four policies: "none" (experts in order, no balancer), "static" (one plan from the first window, never changed),
"greedy" (a full plan with equal shares from the last window, again and again: the state of practice) and "ours"
(eplb.balancer).

Legend: T records, L MoE layers, E logical experts, G ranks, S slots of a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from eplb.balance import Floats, balancedness, placement_balance, rank_load
from eplb.balancer import Balancer, BalancerConfig
from eplb.coverage import host_matrix
from eplb.offline.cluster import Cluster
from eplb.offline.cost import Workload, pause_s, step_cost, transfer_s
from eplb.offline.shapes import ModelShape
from eplb.offline.trace import Trace
from eplb.placement import Placement, linear_placement
from eplb.planner import Coverage, plan

PolicyName = Literal["none", "static", "greedy", "ours"]
POLICIES: tuple[PolicyName, ...] = ("none", "static", "greedy", "ours")
_SETTLED = 4  # times its memory: how long the balancer is shown a load until its averages are those of the load
_COST_SAMPLES = 24  # records of a replay whose step time is predicted; they lie evenly


class Settings(Struct, frozen=True):
    """One combination. window: records that a full plan is made from; interval: records between two full plans (greedy)
    or two rounds of moves (ours); reweight: records between two re-weightings; budget: bytes that a rank may receive
    per step (ours). Those that a policy does not use are 0."""

    policy: PolicyName
    slots: int
    window: int
    interval: int = 0
    reweight: int = 0
    budget: int = 0


class Setup(Struct, frozen=True):
    """What all combinations share. expert_bytes: of one expert of one layer; shape, cluster, work: for milliseconds."""

    num_ranks: int
    domains: tuple[int, ...]
    coverage: Coverage
    min_copies: int
    expert_bytes: float
    memory: int  # steps that the average of `ours` remembers
    start: int  # the first record that is scored
    stop: int
    shape: ModelShape | None = None
    cluster: Cluster | None = None
    work: Workload | None = None


def slot_part(placement: Placement, load_LE: npt.ArrayLike) -> Floats:
    """float64 [L, G, S]: the part of a layer's tokens that each slot receives; a layer without tokens is spread
    evenly."""
    load = np.array(load_LE, dtype=np.float64)
    load[load.sum(1) <= 0] = 1.0
    ids = placement.slot_to_expert
    picked = np.take_along_axis(load, np.maximum(ids, 0).reshape(len(ids), -1), axis=1).reshape(ids.shape)
    part: Floats = picked * placement.share * (ids >= 0)
    part /= load.sum(1)[:, None, None]
    return part


def step_counts(trace: Trace, record: int, seed: int = 0) -> Floats:
    """float64 [L, E]: the counts of one step of the record. A record of several steps is thinned to one at random, so
    that the noise of a single step is there; equal seeds give equal counts."""
    load_LE = np.asarray(trace.load[record], dtype=np.float64)
    steps = int(trace.steps[record])
    if steps == 1:
        return load_LE
    rng = np.random.default_rng((seed, record))
    total_L = load_LE.sum(1)
    part_LE = np.divide(
        load_LE, total_L[:, None], out=np.full_like(load_LE, 1 / load_LE.shape[1]), where=total_L[:, None] > 0
    )
    drawn = rng.multinomial(np.maximum(np.rint(total_L / steps), 0).astype(np.int64), part_LE)
    return drawn.astype(np.float64)


class _Run:
    """One combination going through the trace."""

    def __init__(self, trace: Trace, settings: Settings, setup: Setup) -> None:
        self.trace, self.settings, self.setup = trace, settings, setup
        self.per_record = max(1, int(np.median(trace.steps[setup.start : setup.stop])))
        self.repeats = min(self.per_record, _SETTLED * setup.memory)
        self.in_window: list[float] = []
        self.plan_s: list[float] = []
        self.moved, self.pause, self.transfer, self.replans = 0, 0.0, 0.0, 0
        # Loads of a layer that the trace does not have are taken to be like those that it has.
        self.layers_scale = setup.shape.num_moe_layers / trace.num_layers if setup.shape is not None else 1.0
        self.balancer: Balancer | None = None
        self.placement = self._first()

    def _first(self) -> Placement:
        setup, settings = self.setup, self.settings
        if settings.policy == "none":
            return linear_placement(
                self.trace.num_layers, self.trace.num_experts, setup.num_ranks, settings.slots, setup.domains
            )
        window = self.trace.window(setup.start - settings.window, setup.start)
        first = self._plan(window, "flat" if settings.policy == "greedy" else "auto")
        if settings.policy == "ours":
            steps = int(self.trace.steps[setup.start - settings.window : setup.start].sum())
            self.balancer = Balancer(first, self._config())
            self.balancer.seed(window / steps)
        return first

    def _config(self) -> BalancerConfig:
        """With records of one step, as it runs live. A longer record is shown to it as `repeats` equal steps, enough
        for its averages to settle, and it decides at the end of records only; what it may move in one is as much as
        live."""
        settings = self.settings
        return BalancerConfig(
            memory_steps=self.setup.memory,
            reweight_interval=settings.reweight * self.repeats,
            move_interval=settings.interval * self.repeats,
            move_budget_bytes=round(settings.budget * self.per_record / self.repeats),
            bytes_per_expert=int(self.setup.expert_bytes),
        )

    def _plan(self, load_LE: Floats, method: Literal["flat", "auto"]) -> Placement:
        setup = self.setup
        began = time.process_time()
        made = plan(
            load_LE,
            setup.num_ranks,
            self.settings.slots,
            failure_domains=setup.domains,
            method=method,
            coverage="load" if method == "flat" else setup.coverage,
            min_copies=setup.min_copies,
        )
        self.plan_s.append(time.process_time() - began)
        self.in_window.append(float(made.balance.mean()))
        return made.placement

    def learn(self, record: int) -> None:
        """Take in a record that was scored; the placement may change."""
        settings, done = self.settings, record + 1 - self.setup.start
        if settings.policy == "greedy" and done % settings.interval == 0:
            self._move_to(self._plan(self.trace.window(record + 1 - settings.window, record + 1), "flat"), waits=True)
            self.replans += 1
        elif self.balancer is not None:
            began = time.process_time()
            step_LE = np.asarray(self.trace.load[record], dtype=np.float64) / int(self.trace.steps[record])
            for _ in range(self.repeats):  # decides after the last, if at all: see _config
                decision = self.balancer.observe(step_LE)
            if decision is not None:
                self.plan_s.append(time.process_time() - began)
                self._move_to(decision.placement, waits=False)

    def _move_to(self, new: Placement, waits: bool) -> None:
        old, self.placement = self.placement, new
        if np.array_equal(old.slot_to_expert, new.slot_to_expert):
            return
        brought = host_matrix(new) & ~host_matrix(old)
        received_G = brought.sum((0, 2))
        self.moved += int(received_G.sum())
        setup = self.setup
        if setup.cluster is None or setup.shape is None:
            return
        busiest = float(received_G.max()) * self.layers_scale
        if waits:
            layers = round(int(brought.any((1, 2)).sum()) * self.layers_scale)
            self.pause += pause_s(setup.cluster, setup.shape, busiest, layers)
        else:
            self.transfer += transfer_s(setup.cluster, setup.shape, busiest)


def replay(
    trace: Trace,
    settings: Settings,
    setup: Setup,
    counts_of: Callable[[int], Floats],
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """One row: the settings, then what came of them. Balances are mean/max of the ranks, averaged over layers.

    counts_of: the counts of one step of a record, as step_counts makes them; several rows can share a cache of them.
    in_window: of the plans, on the loads they were made from; next_window: of the placement at a window's start, on
    that window; step, step_p50, step_p95: of each record's single step under the placement of that moment (95 % of them
    are at least step_p95); moved: experts brought to a rank, as a part of all slots and per window; pause_s: what
    waiting for them took.
    """
    run = _Run(trace, settings, setup)
    step, nexts, costs = [], [], []
    window_from, window_placement = setup.start, run.placement
    span = setup.stop - setup.start
    sampled = set(np.linspace(setup.start, setup.stop - 1, min(_COST_SAMPLES, span)).round().astype(int).tolist())
    for record in range(setup.start, setup.stop):
        counts = counts_of(record)
        loads = rank_load(run.placement.slot_to_expert, run.placement.share, counts)
        step.append(float(balancedness(loads).mean()))
        if record in sampled and setup.cluster is not None and setup.shape is not None and setup.work is not None:
            costs.append(step_cost(setup.cluster, setup.shape, setup.work, slot_part(run.placement, counts)).total_ms)
        run.learn(record)
        if record + 1 - window_from == settings.window or record + 1 == setup.stop:
            total = trace.window(window_from, record + 1)
            nexts.append(float(placement_balance(window_placement, total).mean()))
            if settings.policy == "ours":
                run.in_window.append(float(placement_balance(run.placement, total).mean()))
            window_from, window_placement = record + 1, run.placement
        if progress is not None:
            progress(record + 1 - setup.start)
    return _row(run, step, nexts, costs)


def _row(run: _Run, step: list[float], nexts: list[float], costs: list[float]) -> dict[str, Any]:
    settings, setup, trace = run.settings, run.setup, run.trace
    slots = int((run.placement.slot_to_expert >= 0).sum())
    windows = (setup.stop - setup.start) / settings.window
    steps = int(trace.steps[setup.start : setup.stop].sum())
    row: dict[str, Any] = {
        **structs.asdict(settings),
        "in_window": float(np.mean(run.in_window)) if run.in_window else None,
        "next_window": float(np.mean(nexts)),
        "step": float(np.mean(step)),
        "step_p50": float(np.quantile(step, 0.5)),
        "step_p95": float(np.quantile(step, 0.05)),
        "moved_per_window": run.moved / slots / windows,
        "moved_gib": run.moved * run.layers_scale * setup.expert_bytes / (1 << 30),
        "plan_ms": float(np.median(run.plan_s)) * 1e3 if run.plan_s else 0.0,
    }
    if costs and setup.work is not None:
        pause_ms = run.pause * 1e3 / steps
        step_ms = float(np.mean(costs))
        row |= {
            "step_ms": step_ms,
            "pause_s": run.pause / run.replans if run.replans else 0.0,
            "pause_ms_per_step": pause_ms,
            "links_busy": run.transfer * 1e3 / (steps * step_ms),
            "tokens_per_s_per_gpu": setup.work.tokens_per_gpu / (step_ms + pause_ms) * 1e3,
        }
    return row


def add_break_even(rows: list[dict[str, Any]], per_record: int) -> None:
    """Adds break_even_steps to each row with pauses: how many steps must lie between two of them so that the gain over
    never changing ("static", same slots, the nearest window) pays for the stop; None when there is no gain."""
    for row in rows:
        if not row.get("pause_s"):
            continue
        static = [r for r in rows if r["policy"] == "static" and r["slots"] == row["slots"]]
        row["break_even_steps"], row["interval_steps"] = None, row["interval"] * per_record
        if static:
            base = min(static, key=lambda r: abs(r["window"] - row["window"]))
            gain = base["step_ms"] - row["step_ms"]
            row["break_even_steps"] = row["pause_s"] * 1e3 / gain if gain > 0 else None


def best_row(rows: list[dict[str, Any]]) -> tuple[int, str]:
    """(index, why) of the row to take: the most tokens per second after pauses; without a cluster the best balance of
    single steps, and among those within .002 of it the one that moves least."""
    if "tokens_per_s_per_gpu" in rows[0]:
        index = max(range(len(rows)), key=lambda i: float(rows[i]["tokens_per_s_per_gpu"]))
        return index, "most tokens per second, pauses included"
    top = max(float(row["step"]) for row in rows)
    near = [index for index, row in enumerate(rows) if row["step"] >= top - 0.002]
    index = min(near, key=lambda i: (rows[i]["moved_gib"], rows[i]["slots"]))
    return index, "best balance of single steps" + (", least moved among those within .002" if len(near) > 1 else "")
