"""Every script of benchmarks/ is started with its smallest size, so that none rots: the engine goes on and they follow it.

Their figures mean nothing here; what counts is that they run to their end and print the rows that they promise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from models.tiny import CHECKPOINT

pytestmark = pytest.mark.benchmarks
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks"
SECONDS = 300.0  # bounds each, on a machine that does other things too
FAULTS = [
    "requests",
    "failed",
    "mismatched",
    "p50_pause_s",
    "p95_pause_s",
    "max_pause_s",
    "goodput_ratio",
    "overhead_pct",
    "orphans",
]


@dataclass(frozen=True)
class Small:
    """words: {model} is the embedded model, {made} a folder with tiny-qwen3moe, {out} an empty one. keys: of the last line, a JSON object.
    says: what it ends with instead, with exit code `code`. asked: its standard input. after: run first, in the same {out}."""

    words: str
    keys: tuple[str, ...] | list[str] = ()
    says: str = ""
    code: int = 0
    asked: str = ""
    after: tuple[str, ...] = ()


QUICK = {
    "bench_eplb_cli.py": Small("--json --records 2 --verbs plan", ("verb", "seconds", "exit")),
    "lines.py": Small("--json", ("product", "live", "tests", "benchmarks", "longest_file")),
    "tree.py": Small("", says="eplb"),
    "real_weights.py": Small("--help", says="--out"),  # all it does is to fetch them from a registry
}
LONG = {
    "bench_head.py": Small(
        "--json --ranks 2 --mib 1 --rows 1 --hidden 64 --between 1 --rounds 1",
        ("ranks", "mib", "rows", "own_ms", "shared_ms", "ratio"),
    ),
    "train_eagle3.py": Small("--out {out} --minutes 0.01 --stories 8", ("steps", "right")),
    "bench_draws.py": Small("--draws 500 --batch 1 --vocab 2048 --repeats 1", ()),
    "bench_duel.py": Small("ours --threads 1", ("median", "least"), asked='{"tokens": 1}\n'),
    "sign_overhead.py": Small("--json --streams 1 --rounds 2", ("step_us", "extra_us", "calls")),
    "trace_overhead.py": Small("", ("plain_us", "recorded_us", "extra_us")),
    "bench_cadence.py": Small("--json --ranks 2 --requests 4 --prompt 24 --tokens 4 --repeats 1", ("ranks",)),
    "bench_cluster.py": Small(
        "--json --model {model} --mbit 1000 --streams 4 --steps 4 --rounds 1", ("one_ms", "step_ms", "of_ideal")
    ),
    "bench_acceptance.py": Small(
        "--json --model {model} --drafts 1 --tokens 8 --repeats 1", ("method", "k_mean", "acceptance", "ratio")
    ),
    "bench_filling.py": Small(
        "--json --model {model} --formats plain --repeats 1 --threads 1", ("case", "gb_s", "of_copy")
    ),
    "bench_gate.py": Small(
        "--json --streams 2 --tokens 8 --rounds 2 --learn 1", ("k_mean", "ratio", "interval", "ratio_cpu")
    ),
    "bench_structured.py": Small("--json --streams 1 --tokens 4 --repeats 1", ()),
    "bench_streams.py": Small("--json --tokens 8 --ranks 1,2", ("ranks", "request", "first_s", "tokens_per_s")),
    "bench_perplexity.py": Small(
        "{model} --json --tokens 128 --window 64 --dtype float32 --formats plain int4",
        ("format", "perplexity", "ratio", "tokens"),
    ),
    "bench_speculation.py": Small(
        "--json --cases prediction --streams 1 --tokens 16 --repeats 1", ("method", "streams", "k_mean", "ratio")
    ),
    "bench_all_to_all.py": Small(
        "--json --ranks 2 --tokens 8 --moe-tokens 8 --hidden 64 --block-ms 1 --blocks 1", ("op", "shm_us", "ratio")
    ),
    "bench_dbo.py": Small(
        "--hosts 1 --model {model} --tokens 16 --prompts 2 --rounds 1 --json", ("off_ms", "on_ms", "auto_ms")
    ),
    "bench_eplb.py": Small("--part routing --repeats 1 --json", ("routing",)),
    "bench_faults.py": Small("--ranks 2 --streams 2 --kills 1 --max-tokens 8 --overhead-rounds 1 --json", FAULTS),
    "bench_store.py": Small(
        "--ranks 2 --streams 2 --kills 1 --max-tokens 8 --json",
        ("ranks", "cold_s", "warm_s", "pss_mb", "return_s", "p95_gap_s", "max_gap_s", "failed", "mismatched"),
    ),
    "bench_deterministic.py": Small(
        "--repeats 1 --prompts 1 --json", ("tpot_ms", "tpot_price_pct", "prefill_tok_price_pct")
    ),
    "bench_mla_prefill.py": Small("--heads 1 --threads 1", ("absorbed_cost",)),
    "bench_ops.py": Small("--json --only rows --tokens 1 --seconds 0.01 --threads 1", ("op", "ms", "limit_ms")),
    "bench_parsers.py": Small("--repeats 1 --tokens 40 --json", ("us_per_token", "limit_us")),
    "bench_overhead.py": Small("--models {made} --repeats 1 --json", ("us_per_output_token",)),
    "bench_peers.py": Small(
        "--models {made} --only tiny-qwen3moe --repeats 1 --max-foreign 1000 --json", ("model", "case", "ours")
    ),
    "bench_serving.py": Small("--cases overhead --models {made} --repeats 1 --json", ("case", "start_s")),
    "bench_tapes.py": Small(
        "--model {model} --streams 1 --json --context 8", ("eager_ms", "replayed_ms", "ratio", "layout_ms")
    ),
    "bench_throughput.py": Small("--repeats 1 --prompts 1 --no-hf --json", ("decode_tok_s", "ttft_ms", "startup_s")),
    "bench_hostile.py": Small(
        "--json --ranks 1 --streams 1 --seconds 0.1 --bodies 1 --bytes 50000 --cases none",
        ("failed_streams", "orphans"),
    ),
    "engines.py": Small(
        "ours --model {model} --threads 1 --dtype float32",
        ("seconds", "steps"),
        asked='{"prompts": 1, "input": 4, "output": 2, "seed": 0}\n',
    ),
    "fault_overhead.py": Small("--rounds 1 --sequences 1", ("overhead_pct", "own_us", "pairs")),
    "gpu_compile.py": Small("--help", says="--"),
    "gpu_check.py": Small("--device cpu --tiny --only graphs --out {out}", says="0 failed"),
    "gpu_ops.py": Small("", says="there is none here", code=1),  # tests/benchmarks/test_gpu_ops.py goes further
    "gpu_parts.py": Small("graphs --device cpu --tiny --seconds 5", ("name", "ok")),
    "hosts.py": Small("--hosts 1 -- true", says=""),
    "own_text.py": Small("--out {out}/own.txt --stories 4", says="stories"),
    "make_models.py": Small("--out {out} --only tiny-dense", ("model", "megabytes")),
    "make_gguf.py": Small("--models {out} --only none", says="Error", code=1),  # runs in the peer's environment
    "peer_engines.py": Small("llama --model none", says="No module named", code=1),  # runs in the peer's environment
    "trace_picture.py": Small(
        "{out}/off-0.json {out}/on-0.json --out {out}/picture.svg",
        says="",
        after=("bench_dbo.py", "--hosts 1 --model {model} --tokens 16 --prompts 2 --rounds 1 --json --trace-dir {out}"),
    ),
    "tune_triton.py": Small("--minutes 0 --out {out}", says="there is none here", code=1),
}
# Parts of these scripts, by who is started with them.
PARTS = {
    "compile_ahead.py": "tune_triton.py",
    "eplb_live.py": "bench_eplb.py",
    "gpu_cases.py": "gpu_ops.py",
    "gpu_beside.py": "gpu_parts.py",
    "gpu_children.py": "gpu_check.py",
    "gpu_whole.py": "gpu_parts.py",
    "gpu_work.py": "gpu_compile.py",
    "gpu_clock.py": "gpu_ops.py",
    "gpu_libraries.py": "gpu_parts.py",
    "gpu_models.py": "gpu_parts.py",
    "gpu_rows.py": "gpu_parts.py",
    "layer_ops.py": "bench_ops.py",
    "linear_ops.py": "bench_ops.py",
    "sparse_ops.py": "bench_ops.py",
    "op_clock.py": "bench_ops.py",
    "prompt_ops.py": "bench_ops.py",
    "window_ops.py": "bench_ops.py",
    "quiet.py": "bench_peers.py",
    "server_process.py": "bench_faults.py",
    "vllm_server.py": "bench_serving.py",
    "wait_clock.py": "bench_dbo.py",
}


def test_each_script_is_started() -> None:
    names = {path.name for path in SCRIPTS.glob("*.py")}
    assert names == QUICK.keys() | LONG.keys() | PARTS.keys()
    for part, script in PARTS.items():
        assert "__main__" not in (SCRIPTS / part).read_text(), f"{part} can be started by itself"
        name, text = part.removesuffix(".py"), (SCRIPTS / script).read_text()
        assert f"{name} import" in text or f'import_module("{name}")' in text


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    start("make_models.py", ["--out", str(folder), "--only", "tiny-qwen3moe"])
    return folder


def start(name: str, words: list[str], asked: str = "", code: int = 0) -> str:
    """What it says on both its outputs, the errors first."""
    command = [sys.executable, str(SCRIPTS / name), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, input=asked)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr + done.stdout


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)  # peers, devices and networks: as far as it goes without them
def test_it_runs(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    small = (QUICK | LONG)[name]

    def words(text: str) -> list[str]:
        folder = request.getfixturevalue("made") if "{made}" in text else tmp_path
        return text.format(model=CHECKPOINT, made=folder, out=tmp_path).split()

    if small.after:
        start(small.after[0], words(small.after[1]))
    said = start(name, words(small.words), small.asked, small.code)
    assert small.says in said
    if small.keys:
        row = json.loads(said.splitlines()[-1])
        assert set(small.keys) <= row.keys() and None not in [row[key] for key in small.keys], row
