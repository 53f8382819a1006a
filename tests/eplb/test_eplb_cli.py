"""`moesaic eplb`: every verb through the command line that users type, exit codes and messages.

Most run in this process through click's runner; what matters about the process (imports, exit codes of main) runs as one.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from verbs import answer, run

from eplb.offline.placement_file import describe, read_placement, write_placement
from eplb.offline.trace import TraceMeta, make_trace, read_trace, write_trace
from eplb.placement import Placement, linear_placement
from eplb.planner import plan
from moesaic.eplb import VERBS

LAYERS, EXPERTS, RANKS = 3, 16, 4


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    """12 records of 20 steps; expert e of layer l has a load of its own, which moves a little."""
    rng = np.random.default_rng(0)
    part = rng.lognormal(0, 1.2, (LAYERS, EXPERTS))
    load = rng.poisson(part * 1000 * rng.lognormal(0, 0.05, (12, LAYERS, EXPERTS)))
    meta = TraceMeta("toy", RANKS, 2, "made by a test", (3, 4, 5))
    path = tmp_path / "load.jsonl"
    write_trace(path, make_trace(load, meta, steps=[20] * 12, tokens=(load.sum((1, 2)) // 6).tolist()))
    return path


@pytest.fixture
def planned(tmp_path: Path, trace_path: Path) -> Path:
    trace = read_trace(trace_path)
    made = plan(trace.window(0, 12), RANKS, 5, method="flat", failure_domains=(0, 0, 1, 1))
    path = tmp_path / "plan.json"
    write_placement(path, describe(made.placement, "toy", trace.layer_ids))
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home.json"
    write_placement(path, describe(linear_placement(LAYERS, EXPERTS, RANKS, 5), "toy", (3, 4, 5)))
    return path


# ---- the frame ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_of_every_verb(verb: str) -> None:
    result = run(*([verb] if verb else []), "--help")
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output
    assert not verb or "--json" in result.output


def test_help_imports_nothing_heavy_and_verbs_no_torch(tmp_path: Path, trace_path: Path) -> None:
    script = (
        "import sys, moesaic.cli as c\n"
        "try:\n    c.cli(sys.argv[1:], prog_name='moesaic')\n"
        "except SystemExit:\n    pass\n"
        "print('LOADED', *sys.modules)"
    )
    for arguments, forbidden in (
        (["eplb", "--help"], {"numpy", "torch", "msgspec", "rich"}),
        (["eplb", "stats", str(trace_path)], {"torch"}),
        (["eplb", "import", str(trace_path), "-o", str(tmp_path / "x.npz")], {"torch"}),
    ):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
        loaded = set(done.stdout.rpartition("LOADED")[2].split())
        assert loaded, done.stderr
        assert not forbidden & loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Usage"),
        (["stats"], "Missing argument"),
        (["stats", "x", "--window", "0"], "--window"),
        (["import", "missing.json"], "--output PATH is needed"),
        (["import", "missing.json", "-o", "x", "--layers", "4-2"], "ends before it begins"),
        (["import", "missing.json", "-o", "x", "--layers", "a"], "not a list of layers"),
        (["check", "missing.json", "--min-balance", "0.9"], "--min-balance needs --trace"),
        (["check", "missing.json", "--max-move-gib", "1"], "--max-move-gib needs --against"),
        (["export", "missing.json", "-o", "x"], "--format"),
        (["check", "placement.json", "--min-balance", "nan"], "'nan' is not a number"),
    ],
)
def test_usage_errors_exit_with_1(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nonsense"], 1, "No such command"),
        (["stats", "missing.jsonl"], 2, "missing.jsonl cannot be read"),
        (["import", "missing.json", "-o", "x"], 2, "missing.json cannot be read"),
        (["sample", "--model", "nothing", "-o", "x"], 2, "nothing"),
    ],
)
def test_exit_codes_of_a_process(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    """1 for usage, 2 for input; for input one line, never a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "moesaic", "eplb", *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert code == 1 or done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_quiet_and_output(tmp_path: Path, trace_path: Path) -> None:
    target = tmp_path / "out.npz"
    assert run("import", trace_path, "-o", target, "-q").stdout == ""
    assert target.is_file()
    assert run("stats", trace_path, "--json", "-o", tmp_path / "stats.json").stdout == ""
    assert json.loads((tmp_path / "stats.json").read_text())["records"] == 12


def on_a_terminal(*arguments: str | Path) -> tuple[str, str]:
    """(stdout, what went to the terminal) of a verb whose stderr is a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "moesaic", "eplb", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=True)
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    return done.stdout, seen.decode()


def test_a_bar_on_a_terminal_only(trace_path: Path) -> None:
    stdout, seen = on_a_terminal("stats", trace_path, "--json")
    assert "reading" in seen
    assert json.loads(stdout)["records"] == 12
    assert on_a_terminal("stats", trace_path, "--json", "-q")[1] == ""
    assert run("stats", trace_path).stderr == ""


# ---- import and export -------------------------------------------------------------------------------------------


def test_import_finds_out_what_a_file_is(tmp_path: Path) -> None:
    source = tmp_path / "location.json"
    source.write_text('{"physical_to_logical_map": [[0, 1, 1, 2]]}')
    result = run("import", source, "-o", tmp_path / "p.json")
    assert result.exit_code == 1
    assert "--ranks" in result.output
    facts = answer("import", source, "-o", tmp_path / "p.json", "--ranks", "2", "--model", "m")
    assert (facts["kind"], facts["format"], facts["slots"]) == ("placement", "sglang", 2)
    assert read_placement(tmp_path / "p.json").model == "m"


def test_import_shrinks_and_selects(tmp_path: Path, trace_path: Path) -> None:
    facts = answer("import", trace_path, "-o", tmp_path / "x.npz", "--layers", "4-5")
    assert (facts["format"], facts["layers"]) == ("moesaic", 2)
    assert read_trace(tmp_path / "x.npz").layer_ids == (4, 5)


def test_a_cut_recording(tmp_path: Path, trace_path: Path) -> None:
    trace_path.write_bytes(trace_path.read_bytes()[:-40])
    refused = run("import", trace_path, "-o", tmp_path / "x.jsonl")
    assert isinstance(refused.exception, ValueError)
    assert "load.jsonl:13:" in str(refused.exception)
    assert answer("import", trace_path, "-o", tmp_path / "x.jsonl", "--skip-cut-line")["records"] == 11


def test_export_to_every_peer_and_back(tmp_path: Path, planned: Path) -> None:
    original = read_placement(planned).placement
    # The map of vLLM's forks counts MoE layers only; the others know the model's numbers.
    for name, file, layers in (
        ("sglang", "x.json", "3-5"),
        ("trtllm", "x.yaml", "3-5"),
        ("vllm-ascend", "y.json", "3-5"),
        ("vllm", "z.json", "0-2"),
    ):
        path = tmp_path / file
        answer("export", planned, "--format", name, "-o", path)
        answer("import", path, "-o", tmp_path / "back.json", "--ranks", str(RANKS), "--layers", layers)
        back = read_placement(tmp_path / "back.json").placement
        assert np.array_equal(back.slot_to_expert, original.slot_to_expert)
        assert np.allclose(back.share, original.share, atol=1e-4)


def test_export_says_what_is_lost(tmp_path: Path, planned: Path) -> None:
    done = run("export", planned, "--format", "sglang", "-o", tmp_path / "x.json")
    assert "failure domains are left out" in done.stderr
    file = read_placement(planned)
    share = np.array(file.placement.share)
    layer, rank, slot = np.argwhere(share < 0.9)[0]
    ids = file.placement.slot_to_expert
    share[layer][ids[layer] == ids[layer, rank, slot]] = 0
    share[layer, rank, slot] = 1
    weighted = Placement(0, EXPERTS, ids, share, (True,) * RANKS)
    write_placement(tmp_path / "w.json", describe(weighted, "toy", (3, 4, 5)))
    refused = run("export", tmp_path / "w.json", "--format", "trtllm", "-o", tmp_path / "x.yaml")
    assert "splits an expert's tokens evenly" in str(refused.exception)
    assert "--flat" in str(refused.exception)
    assert not (tmp_path / "x.yaml").exists()


def test_export_of_loads(tmp_path: Path, trace_path: Path) -> None:
    answer("export", trace_path, "--format", "adrs", "-o", tmp_path / "x.json")
    assert len(json.loads((tmp_path / "x.json").read_text())["load_history"]) == 12
    assert "--sum" in str(run("export", trace_path, "--format", "vllm-ascend", "-o", tmp_path / "x.pt").exception)
    answer("export", trace_path, "--format", "vllm-ascend", "--sum", "-o", tmp_path / "x.pt")
    answer("import", tmp_path / "x.pt", "-o", tmp_path / "back.jsonl")
    whole = read_trace(trace_path)
    assert np.array_equal(read_trace(tmp_path / "back.jsonl").window(0, 1), whole.window(0, 12))
    refused = run("export", trace_path, "--format", "omniinfer", "-o", tmp_path / "x.npy")
    assert "no file of loads" in str(refused.exception)


# ---- stats, explain, diff, check ---------------------------------------------------------------------------------


def test_stats(trace_path: Path) -> None:
    facts = answer("stats", trace_path, "--slots", "5", "--window", "2")
    assert (facts["records"], facts["steps"], facts["ranks"], facts["windows"]) == (12, 240, RANKS, 6)
    assert [row["layer"] for row in facts["layers"]] == [3, 4, 5]
    assert 0 < facts["summary"]["balance_unplanned"]["mean"] <= facts["summary"]["balance_bound"]["mean"] <= 1
    assert facts["summary"]["spearman_next"]["mean"] > 0.9
    text = run("stats", trace_path, "--per-layer").stdout
    assert "Gini" in text
    assert "never" in text


def test_explain(trace_path: Path, planned: Path) -> None:
    facts = answer("explain", trace_path, "4", "--placement", planned)
    assert facts["layer"] == 4
    assert facts["experts"][0]["times_mean"] == pytest.approx(facts["max_over_mean"], abs=1e-5)
    assert facts["experts"][0]["copies"] == len(facts["experts"][0]["ranks"]) >= 1
    assert facts["balance_unplanned"] < facts["balance"] <= facts["balance_bound"]
    text = run("explain", trace_path, "4", "--slots", "5").stdout
    assert "Layer 4: expert" in text
    refused = run("explain", trace_path, "7")
    assert "no layer 7; its layers are 3 to 5" in str(refused.exception)


def test_diff(home: Path, planned: Path) -> None:
    facts = answer("diff", home, planned, "--expert-bytes", "1Mi", "--ranks-per-node", "2")
    assert facts["bytes"] == facts["moves"] * 2**20 > 0
    assert sum(facts["received_per_rank"]) == facts["moves"] == sum(link["experts"] for link in facts["links"])
    assert sum(row["moves"] for row in facts["layers"]) == facts["moves"]
    assert answer("diff", home, home)["moves"] == 0
    assert answer("diff", home, planned)["bytes"] is None
    assert "What moves" in run("diff", home, planned).stdout
    refused = run("diff", planned, home, "--ranks-per-node", "1")
    assert "contradicts" in str(refused.exception)


@pytest.mark.parametrize(
    ("gates", "code", "message"),
    [
        ([], 0, ""),
        (["--min-balance", "0.1", "--max-uncovered", "9", "--max-move-gib", "9", "--max-slots", "5"], 0, ""),
        (["--min-balance", "0.99999"], 3, "balance is 0."),
        (["--min-worst-balance", "0.99999"], 3, "worst_balance is 0."),
        (["--max-uncovered", "0.5"], 4, "uncovered_by_worst_rank is"),
        (["--max-uncovered-node", "0.5"], 4, "uncovered_by_worst_node is"),
        (["--max-move-gib", "0.001"], 5, "move_gib is"),
        (["--max-moved", "0.001"], 5, "moved_part is"),
        (["--max-moved", "0.001", "--min-balance", "0.99999"], 3, "balance is 0."),
    ],
)
def test_gates(home: Path, planned: Path, trace_path: Path, gates: list[str], code: int, message: str) -> None:
    result = run("check", planned, "--trace", trace_path, "--against", home, "--expert-bytes", "1Mi", *gates, "--json")
    assert result.exit_code == code, result.output
    assert message in result.stderr
    facts = json.loads(result.stdout)
    assert facts["passed"] is (code == 0)
    assert len(facts["failed"]) == (0 if code == 0 else len(gates) // 2)


def test_check_refuses_what_is_no_placement_or_another_model(tmp_path: Path, planned: Path, trace_path: Path) -> None:
    assert "--max-slots is 4" in str(run("check", planned, "--max-slots", "4").exception)
    write_placement(tmp_path / "other.json", describe(linear_placement(1, 4, 2)))
    assert "16 experts and layers 3 to 5" in str(run("check", tmp_path / "other.json", "--trace", trace_path).exception)
    assert "is a trace of loads" in str(run("check", trace_path).exception)
    assert "needs the size of an expert" in run("check", planned, "--against", planned, "--max-move-gib", "1").output


# ---- sample and report -------------------------------------------------------------------------------------------


def test_sample(tmp_path: Path) -> None:
    arguments = ["sample", "--model", "qwen3-30b-a3b", "--records", "3", "--layers", "2", "--ranks", "8"]
    facts = answer(*arguments, "-o", tmp_path / "a.jsonl")
    assert facts["synthetic"] is True
    answer(*arguments, "-o", tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert read_trace(tmp_path / "a.jsonl").load.shape == (3, 2, 128)


def test_report_is_one_sound_file(tmp_path: Path, trace_path: Path, planned: Path) -> None:
    replay, curve = tmp_path / "replay.json", tmp_path / "curve.json"
    replay.write_text(
        json.dumps({"rows": [{"policy": "a<b", "step": 0.9}, {"policy": "ours", "step": 0.95}], "best": 1})
    )
    rows = [{"slots": s, "in_window": 0.9, "next_window": 0.8, "step": 0.7, "bound": 1.0} for s in (4, 5)]
    curve.write_text(json.dumps({"rows": rows, "best_slots": 5, "why": "because", "notes": ["a note"]}))
    target = tmp_path / "report.html"
    facts = answer(
        "report", trace_path, "--placement", f"<new>={planned}", "--replay", replay, "--curve", curve,
        "--window", "2", "--title", "A & B", "-o", target,
    )  # fmt: skip
    text = target.read_text()
    assert facts["bytes"] == len(text.encode())
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)  # nothing is fetched or run
    assert "prefers-color-scheme:dark" in text
    for escaped in ("A &amp; B", "&lt;new&gt;: balance", "a&lt;b"):
        assert escaped in text
    assert "<new>" not in text
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    assert len(pictures) == 8
    for picture in pictures:
        ET.fromstring(picture)
    assert "nan" not in "".join(pictures)
    assert re.search(r"<tr class=best><td>ours", text)


def test_report_of_a_single_record_and_of_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    write_trace(path, make_trace([[[1, 2], [0, 0]]]))
    answer("report", path, "-o", tmp_path / "report.html")
    assert "One window only" in (tmp_path / "report.html").read_text()
    (tmp_path / "bad.json").write_text("{}")
    refused = run("report", path, "--replay", tmp_path / "bad.json", "-o", tmp_path / "x.html")
    assert "bad.json has no rows" in str(refused.exception)
    write_placement(tmp_path / "p.json", describe(linear_placement(1, 2, 2)))
    refused = run("report", path, "--placement", tmp_path / "p.json", "-o", tmp_path / "x.html")
    assert "the trace has 2 in 2 from 0" in str(refused.exception)
    assert not (tmp_path / "x.html").exists()
