"""Replaying policies over a trace: what they may see, what is counted, which row is best."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from eplb.offline.cluster import make_cluster
from eplb.offline.cost import Workload
from eplb.offline.replay import (
    POLICIES,
    PolicyName,
    Settings,
    Setup,
    add_break_even,
    best_row,
    replay,
    slot_part,
    step_counts,
)
from eplb.offline.shapes import MODELS
from eplb.offline.trace import Trace, make_trace
from eplb.placement import linear_placement

LAYERS, EXPERTS, RANKS, SLOTS = 2, 32, 8, 5


def drifting(records: int = 60, steps: int = 1, seed: int = 0, sharp: float = 1.0) -> Trace:
    """Counts of lognormal experts whose logarithms walk a little every record."""
    rng = np.random.default_rng(seed)
    log = rng.normal(0, 1.1, (LAYERS, EXPERTS))
    out = []
    for _ in range(records):
        part = np.exp(log)
        part /= part.sum(1, keepdims=True)
        out.append(rng.multinomial(int(8000 * steps), part))
        log = log + rng.normal(0, 0.06 * sharp, log.shape)
    return make_trace(np.stack(out), steps=[steps] * records)


def setup_of(trace: Trace, start: int = 20, stop: int | None = None, gpu: str | None = None) -> Setup:
    return Setup(
        num_ranks=RANKS,
        domains=(0, 0, 0, 0, 1, 1, 1, 1),
        coverage="spread",
        min_copies=1,
        expert_bytes=1 << 20,
        memory=20,
        start=start,
        stop=trace.num_records if stop is None else stop,
        shape=MODELS["deepseek-v3"] if gpu else None,
        cluster=make_cluster(gpu, RANKS) if gpu else None,
        work=Workload("decode", 128, 4096) if gpu else None,
    )


def run(trace: Trace, policy: PolicyName, **options: Any) -> dict[str, Any]:
    settings = Settings(policy, SLOTS, window=20, interval=20 if policy == "greedy" else 4, reweight=2, budget=64 << 20)
    return replay(trace, settings, setup_of(trace, **options), functools.partial(step_counts, trace))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_never_sees_what_comes_later(policy: PolicyName) -> None:
    """Everything from record 40 on is another load: the scores of the first records stay what they were."""
    trace, other = drifting(seed=1), drifting(seed=2)
    mixed = make_trace(np.concatenate([trace.load[:40], other.load[40:]]))
    rows = [run(t, policy, stop=40) for t in (trace, mixed)]
    for row in rows:
        row.pop("plan_ms")
    assert rows[0] == rows[1]


def test_policies_in_their_order_on_a_drifting_load() -> None:
    trace = drifting()
    rows = {policy: run(trace, policy) for policy in POLICIES}
    step = {policy: row["step"] for policy, row in rows.items()}
    assert step["none"] < step["static"] < step["ours"]
    assert step["greedy"] < step["ours"] + 0.01
    assert rows["none"]["moved_per_window"] == rows["static"]["moved_per_window"] == 0
    assert 0.3 < rows["greedy"]["moved_per_window"] <= 1
    assert rows["ours"]["moved_per_window"] < rows["greedy"]["moved_per_window"]
    for policy in ("static", "greedy"):
        assert rows[policy]["in_window"] > rows[policy]["next_window"]


@pytest.mark.parametrize("policy", POLICIES)
def test_balances_are_parts_of_one_and_quantiles_in_order(policy: PolicyName) -> None:
    row = run(drifting(), policy)
    for name in ("next_window", "step", "step_p50", "step_p95"):
        assert 1 / RANKS <= row[name] <= 1
    assert row["step_p95"] <= row["step_p50"]


def test_a_load_that_does_not_move_is_left_alone() -> None:
    trace = make_trace(np.tile(drifting(1).load[0] * 100, (60, 1, 1)))
    row = run(trace, "ours")
    assert row["step"] > 0.98
    assert row["moved_per_window"] < 0.2
    static = run(trace, "static")
    assert static["next_window"] == pytest.approx(static["in_window"])


def test_with_a_cluster_pauses_cost_tokens_and_break_even_is_consistent() -> None:
    trace = drifting(sharp=2.0)
    rows = [run(trace, policy, gpu="h800") for policy in ("static", "greedy", "ours")]
    add_break_even(rows, 1)
    static, greedy, ours = rows
    assert greedy["pause_s"] > 0 and ours["pause_s"] == 0
    assert greedy["pause_ms_per_step"] == pytest.approx(greedy["pause_s"] * 1e3 / 20, rel=1e-6)
    gain = static["step_ms"] - greedy["step_ms"]
    if gain > 0:
        assert greedy["break_even_steps"] == pytest.approx(greedy["pause_s"] * 1e3 / gain)
    else:
        assert greedy["break_even_steps"] is None
    index, why = best_row(rows)
    assert rows[index]["tokens_per_s_per_gpu"] == max(row["tokens_per_s_per_gpu"] for row in rows)
    assert "pauses" in why


def test_without_a_cluster_the_best_row_moves_least_among_equals() -> None:
    rows = [
        {"step": 0.950, "moved_gib": 9.0, "slots": 5},
        {"step": 0.949, "moved_gib": 1.0, "slots": 5},
        {"step": 0.900, "moved_gib": 0.0, "slots": 5},
    ]
    assert best_row(rows)[0] == 1


def test_single_steps_of_a_long_record_are_noisier_than_the_record() -> None:
    trace = drifting(6, steps=50)
    one = step_counts(trace, 3)
    assert one.sum(1) == pytest.approx([8000, 8000])
    np.testing.assert_array_equal(one, step_counts(trace, 3))
    assert (one != step_counts(trace, 3, seed=1)).any()
    single = drifting(6)
    np.testing.assert_array_equal(step_counts(single, 2), single.load[2])


def test_a_layer_without_tokens_is_no_error() -> None:
    load = np.array(drifting(30).load)
    load[:, 1] = 0
    for steps in (1, 10):
        trace = make_trace(load, steps=[steps] * 30)
        for policy in POLICIES:
            assert np.isfinite(float(run(trace, policy)["step"]))


def test_slot_parts_sum_to_one_and_follow_the_shares() -> None:
    placement = linear_placement(LAYERS, EXPERTS, RANKS, SLOTS)
    load = np.random.default_rng(0).random((LAYERS, EXPERTS))
    part = slot_part(placement, load)
    assert part.sum((1, 2)) == pytest.approx([1, 1])
    slot = placement.slot_to_expert[0, 3, 1]
    assert part[0, 3, 1] == pytest.approx(load[0, slot] / load[0].sum() * placement.share[0, 3, 1])
    assert slot_part(placement, np.zeros((LAYERS, EXPERTS))).sum((1, 2)) == pytest.approx([1, 1])


def test_settings_are_values() -> None:
    one = Settings("ours", 5, 20)
    assert structs.replace(one) == one and hash(one) == hash(structs.replace(one))
