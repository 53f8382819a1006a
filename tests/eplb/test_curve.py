"""Slots against balance and memory, and the chart that shows it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from eplb.offline.cluster import make_cluster
from eplb.offline.curve import memory, point, window_pairs
from eplb.offline.shapes import MODELS
from eplb.offline.trace import Trace, make_trace
from moesaic.eplb.line_chart import Chart, Line, svg, text

V3 = MODELS["deepseek-v3"]
LAYERS, EXPERTS, RANKS = 2, 24, 6


@pytest.fixture
def trace() -> Trace:
    rng = np.random.default_rng(0)
    part = rng.lognormal(0, 1.3, (LAYERS, EXPERTS))
    return make_trace(rng.poisson(part * 100 * rng.lognormal(0, 0.2, (40, LAYERS, EXPERTS))))


def test_more_slots_are_never_worse_by_the_bound_and_the_plan_stays_under_it(trace: Trace) -> None:
    pairs = window_pairs(trace, 10, 3)
    points = [point(pairs, RANKS, slots) for slots in range(4, 9)]
    bounds = [p["bound"] for p in points]
    assert bounds == sorted(bounds)
    for found in points:
        assert found["in_window"] <= found["bound"] + 1e-6
        assert found["step"] <= 1 and found["next_window"] <= 1
    assert points[-1]["in_window"] > points[0]["in_window"]
    assert points[-1]["uncovered_by_worst_rank"] < points[0]["uncovered_by_worst_rank"]


def test_milliseconds_are_means_over_the_pairs(trace: Trace) -> None:
    pairs = window_pairs(trace, 10, 3)
    calls = iter([3.0, 6.0, 9.0])
    found = point(pairs, RANKS, 5, predict=lambda part: {"total_ms": next(calls), "tokens_per_s_per_gpu": 1.0})
    assert (found["total_ms"], found["tokens_per_s_per_gpu"]) == (6.0, 1.0)


def test_pairs_are_behind_each_other_and_spread_over_the_trace(trace: Trace) -> None:
    pairs = window_pairs(trace, 10, 3)
    assert len(pairs) == 3
    np.testing.assert_allclose(pairs[0].fit_LE, trace.window(0, 10))
    np.testing.assert_allclose(pairs[0].next_LE, trace.window(10, 20))
    np.testing.assert_allclose(pairs[2].next_LE, trace.window(30, 40))
    assert len(window_pairs(trace, 20, 5)) == 1
    with pytest.raises(ValueError, match="needs a trace of 42; this one has 40"):
        window_pairs(trace, 21, 1)


def test_memory_of_replicas_in_tokens_of_the_cache() -> None:
    found = memory(V3, 9, 8, make_cluster("h800", 32))
    assert found["replica_gb"] == pytest.approx(58 * 44.04e-3, rel=1e-3)
    assert found["expert_gb"] == pytest.approx(9 * found["replica_gb"])
    assert found["kv_tokens_lost"] == pytest.approx(found["replica_gb"] * 1e9 / (2 * 576 * 61), rel=1e-4)
    more = memory(V3, 10, 8, make_cluster("h800", 32))
    assert found["kv_tokens"] - more["kv_tokens"] == pytest.approx(found["kv_tokens_lost"], abs=2)
    assert memory(V3, 9, 8, None)["kv_tokens"] is None
    assert memory(V3, 40, 8, make_cluster("h800", 32))["kv_tokens"] == 0  # does not fit at all


CHART = Chart("A & B", "slots", "balance", [8, 9, 10], [Line("a<b", [0.5, 0.9, 1.0]), Line("bound", [0.6, None, 1.0], True)],
              ["1 GB", "2 GB", "3 GB"])  # fmt: skip


def test_the_chart_is_well_formed_and_fetches_nothing() -> None:
    drawn = svg(CHART)
    root = ET.fromstring(drawn)
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"A & B", "a<b", "bound", "slots", "balance", "8", "2 GB"} <= set(words)
    assert not re.search(r"https?://(?!www\.w3\.org)", drawn)
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 2 and "stroke-dasharray" in lines[1].attrib
    for line in lines:
        for x, y in (pair.split(",") for pair in line.attrib["points"].split()):
            assert 0 <= float(x) <= 760 and 0 <= float(y) <= 420


def test_the_chart_in_characters() -> None:
    drawn = text(CHART).plain
    assert "A & B" in drawn and "o a<b" in drawn and "- bound" in drawn
    assert drawn.count("o") >= 3


@pytest.mark.parametrize("ys", [[1.0], [0.0], [None]])
def test_a_chart_of_one_point_or_none_is_drawn_too(ys: list[float | None]) -> None:
    chart = Chart("t", "x", "y", [1], [Line("l", ys)])
    ET.fromstring(svg(chart))
    assert text(chart).plain
