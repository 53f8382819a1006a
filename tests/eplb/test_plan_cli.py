"""`moesaic eplb plan, replay, curve, whatif, cost` as users type them: results, files, gates and exit codes."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from verbs import answer, run

from eplb.balance import placement_balance
from eplb.offline.placement_file import read_placement
from eplb.offline.trace import TraceMeta, make_trace, read_trace, write_trace

LAYERS, EXPERTS, RANKS = 3, 128, 8
GPU = ("--gpu", "h800", "--model", "qwen3-235b")


def refused(code: int, *arguments: str | Path) -> str:
    """The one line that says why."""
    result = run(*arguments)
    if code == 2:  # main() turns these into one line and exit code 2
        assert isinstance(result.exception, ValueError), result.output + repr(result.exception)
        return str(result.exception)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    log = rng.normal(0, 1.1, (LAYERS, EXPERTS))
    out = []
    for _ in range(40):
        part = np.exp(log) / np.exp(log).sum(1, keepdims=True)
        out.append(rng.multinomial(60_000, part))
        log = log + rng.normal(0, 0.05, log.shape)
    path = tmp_path_factory.mktemp("eplb") / "load.jsonl"
    write_trace(path, make_trace(np.stack(out), TraceMeta("toy", RANKS, 8, "made by a test", (3, 4, 5))))
    return path


# ---- plan --------------------------------------------------------------------------------------------------------


def test_plan_writes_a_placement_that_has_the_balance_it_says(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = answer("plan", trace, "--slots", 18, "--nodes", 2, "-o", out)
    file = read_placement(out)
    load = read_trace(trace).window(0, 40)
    assert placement_balance(file.placement, load).mean() == pytest.approx(result["in_window"], abs=2e-4)
    assert result["in_window"] <= result["bound"] + 1e-6
    assert result["next_window"] < result["in_window"]
    assert result["slots_per_layer"] == [18] * LAYERS and result["nodes"] == 2
    assert file.layer_ids == (3, 4, 5) and file.model == "toy"
    assert file.placement.failure_domains == (0,) * 4 + (1,) * 4
    assert file.provenance["made_by"] == "moesaic eplb plan"
    assert "step" in result and len(result["balance_per_layer"]) == LAYERS


def test_plan_is_deterministic(trace: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        answer("plan", trace, "--redundant", 16, "-o", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_flat_plan_has_equal_shares(trace: Path, tmp_path: Path) -> None:
    answer("plan", trace, "--slots", 18, "--flat", "-o", tmp_path / "flat")
    placement = read_placement(tmp_path / "flat").placement
    for layer in range(LAYERS):
        for slots in placement.slots_of(layer):
            assert max(share for _, share in slots) - min(share for _, share in slots) < 1e-4


def test_slots_may_differ_by_layer(trace: Path, tmp_path: Path) -> None:
    result = answer("plan", trace, "--slots-per-layer", "auto", "--total-slots", 52, "-o", tmp_path / "p")
    assert sum(result["slots_per_layer"]) == 52 and min(result["slots_per_layer"]) >= 16
    assert read_placement(tmp_path / "p").slots == tuple(result["slots_per_layer"])
    named = answer("plan", trace, "--slots-per-layer", "16,20,17")
    assert named["slots_per_layer"] == [16, 20, 17]


def test_coverage_of_two_leaves_nothing_uncovered(trace: Path) -> None:
    result = answer("plan", trace, "--slots", 34, "--coverage", 2)
    assert result["uncovered_by_worst_rank"] == 0


def test_moves_stay_within_the_budget(trace: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    answer("plan", trace, "--slots", 18, "--window", 10, "--flat", "-o", first)
    free = answer("plan", trace, "--current", first)
    assert free["moves"] > 5 and free["slots"] == 18
    size = 3 * 4096 * 1536 / (1 << 30)  # GiB of an expert of the named model
    bound = answer("plan", trace, "--current", first, "--model", "qwen3-235b", "--max-move-gib", 4.5 * size)
    assert bound["moves"] <= 4 and bound["move_gib"] == pytest.approx(bound["moves"] * size)
    kept = answer("plan", trace, "--current", first, "--model", "qwen3-235b", "--max-move-gib", 0)
    assert kept["moves"] == 0
    said = refused(5, "plan", trace, "--current", first, "--model", "qwen3-235b", "--max-move-gib", size, "--full")
    assert "GiB would move" in said


def test_gates_of_plan(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "never"
    assert "--min-balance is 1" in refused(3, "plan", trace, "--slots", 17, "--min-balance", 1, "-o", out)
    assert "--max-uncovered is 0" in refused(4, "plan", trace, "--slots", 17, "--max-uncovered", 0, "-o", out)
    assert not out.exists()


def test_what_does_not_fit_prints_the_smallest_s(trace: Path) -> None:
    assert refused(6, "plan", trace, "--slots", 15).endswith("the smallest feasible S is 16")
    assert refused(6, "plan", trace, "--slots", 31, "--coverage", 2).endswith("the smallest feasible S is 32")
    assert "whatever S is" in refused(6, "plan", trace, "--coverage", 9)
    assert "smallest feasible total is 48" in refused(
        6, "plan", trace, "--slots-per-layer", "auto", "--total-slots", 47
    )
    assert refused(6, "plan", trace, "--slots-per-layer", "16,15,16").endswith("the smallest feasible S is 16")


@pytest.mark.parametrize(
    "options",
    [
        ("--slots", 18, "--redundant", 3),
        ("--max-move-gib", 1),
        ("--slots-per-layer", "auto"),
        ("--total-slots", 60),
        ("--slots-per-layer", "16,x,16"),
        ("--domains", "a,b"),
        ("--objective", "speed"),
        ("--cluster", "x.json", "--no-such-flag"),
    ],
)
def test_usage_errors_exit_with_1(trace: Path, options: tuple[str | int, ...]) -> None:
    assert run("plan", trace, *map(str, options)).exit_code == 1


def test_bad_input_is_one_line(trace: Path, tmp_path: Path) -> None:
    assert "3 entries for 8 ranks" in refused(2, "plan", trace, "--domains", "0,0,1")
    assert "cannot be shared out equally" in refused(2, "plan", trace, "--nodes", 3)
    assert "2 numbers for 3 layers" in refused(2, "plan", trace, "--slots-per-layer", "16,16")
    assert "nonesuch" in refused(2, "plan", trace, "--model", "nonesuch")
    assert "has 256 experts a layer; the loads are of 128" in refused(2, "plan", trace, "--model", "deepseek-v3")
    missing = tmp_path / "missing.json"
    assert str(missing) in refused(2, "plan", trace, "--cluster", missing)
    path = tmp_path / "nan.jsonl"
    path.write_text(trace.read_text().replace('"load":[[', '"load":[[NaN,', 1))
    assert "nan.jsonl" in refused(2, "plan", path)


def test_a_trace_without_ranks_asks_for_them(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    write_trace(path, make_trace(np.ones((3, 1, 8))))
    assert run("plan", path).exit_code == 1
    assert answer("plan", path, "--ranks", 4)["slots"] == 3


# ---- replay --------------------------------------------------------------------------------------------------------


def test_replay_has_a_row_per_combination_and_marks_one(trace: Path) -> None:
    result = answer("replay", trace, "--grid", "window=5,10 interval=5", "--grid", "slots=17,18", *GPU)
    rows = result["rows"]
    by_policy = {name: [row for row in rows if row["policy"] == name] for name in ("none", "static", "greedy", "ours")}
    assert {name: len(found) for name, found in by_policy.items()} == {"none": 2, "static": 4, "greedy": 4, "ours": 4}
    assert sum(row["best"] for row in rows) == 1 and rows[result["best"]]["best"] and result["why"]
    for row in rows:
        assert row["step_ms"] > 0 and row["tokens_per_s_per_gpu"] > 0
        assert row["step_p95"] <= row["step_p50"]
    assert all(row["pause_s"] > 0 and "break_even_steps" in row for row in by_policy["greedy"])
    assert any("overlapped" in note for note in result["notes"])


def test_replay_says_what_it_left_out(trace: Path) -> None:
    result = answer("replay", trace, "--records", 8, "--policies", "static,ours", "--grid", "window=5")
    assert [row["policy"] for row in result["rows"]] == ["static", "ours"]
    assert any("the last 8 of 35 records" in note for note in result["notes"])


def test_replay_in_words_shows_the_assumptions(trace: Path) -> None:
    text = run("replay", trace, "--policies", "none,static", *GPU).stdout
    assert "* " in text and "8 x h800" in text and "cost --check" in text


@pytest.mark.parametrize(
    "options",
    [("--policies", "best"), ("--policies", ""), ("--grid", "speed=3"), ("--grid", "window"), ("--grid", "window=x"),
     ("--grid", "window=0"), ("--grid", "slots=17 redundant=3"), ("--grid", "budget=1Q")],
)  # fmt: skip
def test_usage_errors_of_replay(trace: Path, options: tuple[str, ...]) -> None:
    assert run("replay", trace, *options).exit_code == 1


def test_limits_of_replay(trace: Path) -> None:
    assert "leaves none to score: the trace has 40" in refused(2, "replay", trace, "--grid", "window=40")
    assert "smallest feasible S is 16" in refused(6, "replay", trace, "--grid", "slots=15")


# ---- curve ---------------------------------------------------------------------------------------------------------


def test_curve_rows_rise_with_slots_and_cost_memory(trace: Path) -> None:
    result = answer("curve", trace, "--max-slots", 20, "--window", 10, *GPU)
    rows = result["rows"]
    assert [row["slots"] for row in rows] == [16, 17, 18, 19, 20]
    assert [row["redundant"] for row in rows] == [0, 8, 16, 24, 32]
    assert [row["kv_tokens_lost"] for row in rows] == sorted(row["kv_tokens_lost"] for row in rows)
    assert rows[-1]["expert_gb"] > rows[0]["expert_gb"] and rows[0]["replica_gb"] == 0
    assert all(row["in_window"] <= row["bound"] + 1e-6 for row in rows)
    assert result["best_slots"] in range(16, 21) and result["why"]


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_curve_is_drawn(trace: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"curve.{suffix}"
    shown = run("curve", trace, "--max-slots", 18, "--window", 10, "-o", path)
    assert shown.exit_code == 0 and "bound of any placement" in shown.stdout
    text = path.read_text()
    assert "stroke-dasharray" in text and "src=" not in text and "href" not in text
    ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])


def test_limits_of_curve(trace: Path) -> None:
    assert "the curve begins at 18" in refused(2, "curve", trace, "--slots", 18, "--max-slots", 17)
    assert "the smallest feasible S is 16" in refused(6, "curve", trace, "--slots", 3)


# ---- whatif --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(trace: Path) -> Path:
    path = trace.parent / "planned.json"
    answer("plan", trace, "--slots", 19, "--nodes", 4, "-o", path)
    return path


def test_whatif_of_a_placement_and_of_a_trace_agree(trace: Path, planned: Path) -> None:
    kills = ("--kill", "any-rank", "--kill", "rank:3")
    ours = answer("whatif", planned, "--trace", trace, *kills)["cases"]
    again = answer("whatif", trace, "--slots", 19, "--nodes", 4, *kills)["cases"]
    for a, b in zip(ours, again, strict=True):
        assert a["worst"]["uncovered_per_layer"] == b["worst"]["uncovered_per_layer"]
        assert a["worst"]["load_part"] == pytest.approx(b["worst"]["load_part"])
    assert {row["id"][:2] for row in ours[0]["guarantees"]} == {"F0", "F1", "F2", "F3", "F4", "F5"}


def test_whatif_without_loads_says_so(planned: Path) -> None:
    result = answer("whatif", planned, "--kill", "rank:0")
    assert any("every expert counts alike" in note for note in result["notes"])
    assert result["cases"][0]["worst"]["load_part"] == pytest.approx(
        result["cases"][0]["worst"]["uncovered"] / EXPERTS, abs=2e-6
    )


def test_whatif_predicts_the_survivors(trace: Path, planned: Path) -> None:
    worst = answer("whatif", planned, "--trace", trace, "--kill", "rank:0", *GPU)["cases"][0]["worst"]
    assert worst["step_ms_before"] > 0 and worst["step_ms_after"] > 0


def test_gates_of_whatif(trace: Path, planned: Path) -> None:
    assert "--max-uncovered is 1" in refused(4, "whatif", planned, "--kill", "any-rank", "--max-uncovered", 1)
    assert "--max-load" in refused(4, "whatif", planned, "--trace", trace, "--kill", "any-rank", "--max-load", 0.001)
    assert "--min-balance is 1" in refused(
        3, "whatif", planned, "--trace", trace, "--kill", "rank:1", "--min-balance", 1
    )
    assert refused(6, "whatif", planned, "--kill", "node:1").endswith("the smallest feasible S is 22")
    both = ("--kill", "node:1", "--max-uncovered", 0)
    assert "--max-uncovered is 0" in refused(4, "whatif", planned, *both)  # the lowest code of several


def test_whatif_without_kill_only_looks(planned: Path) -> None:
    result = answer("whatif", planned)
    assert [case["kill"] for case in result["cases"]] == ["any-rank", "any-node"]
    assert not result["cases"][1]["worst"]["feasible"]


def test_bad_input_of_whatif(trace: Path, planned: Path) -> None:
    assert "no live rank 99" in refused(2, "whatif", planned, "--kill", "rank:99")
    assert run("whatif", trace, "--trace", trace).exit_code == 1


# ---- cost ----------------------------------------------------------------------------------------------------------


def test_cost_of_a_described_cluster() -> None:
    rows = answer("cost", "--gpu", "h800", "--gpus", 32, "--balance", "1,0.5")["rows"]
    assert rows[0]["total_ms"] < rows[1]["total_ms"] and rows[0]["balance"] == 1
    prefill = answer("cost", "--gpu", "h800", "--gpus", 320, "--phase", "prefill", "--balance", "1")
    assert prefill["slots"] == 2 and prefill["rows"][0]["tokens_per_s_per_gpu"] > 1000
    assert any("data-parallel" in line for line in prefill["assumptions"])


def test_cost_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"gpu": "h800", "gpus": 32, "nvlink_gbps": 400}')
    faster = answer("cost", "--cluster", path, "--balance", "1")["rows"][0]
    assert faster["total_ms"] <= answer("cost", "--gpu", "h800", "--gpus", 32, "--balance", "1")["rows"][0]["total_ms"]


def test_cost_check_shows_every_error() -> None:
    result = answer("cost", "--check")
    assert result["summary"]["figures"] == len(result["rows"]) >= 40
    assert all({"published", "predicted", "error_percent", "source"} <= set(row) for row in result["rows"])
    assert "DeepEP" in run("cost", "--check").stdout


def test_wrong_use_of_cost(tmp_path: Path) -> None:
    assert run("cost").exit_code == 1
    assert run("cost", "--gpu", "h800", "--gpus", "8", "--balance", "x").exit_code == 1
    assert "balance is 2" in refused(2, "cost", "--gpu", "h800", "--gpus", 8, "--balance", "2")
    assert "smallest feasible S is 32" in refused(6, "cost", "--gpu", "h800", "--gpus", 8, "--slots", 3)
