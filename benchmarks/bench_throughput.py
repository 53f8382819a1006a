"""Whole engine beside Hugging Face `generate`, in one run, repetitions interleaved, same prompts, bfloat16 weights.

    python benchmarks/bench_throughput.py --model DIR [--json] [--repeats 3] [--no-hf]

Cases (prompts x prompt tokens -> output tokens): throughput 32 x 128 -> 64, stream 1 x 128 -> 64, prefill 1 x 1024 -> 1
(or as long as the model allows). Without --model the embedded model is measured. Absolute numbers mean little on a shared machine: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import Engine

EMBEDDED = Path(__file__).resolve().parent.parent / "models" / "tiny" / "checkpoint"
Case = dict[str, int]


@dataclass
class Measured:
    """Of one engine: seconds of every repetition by case, and the most memory it has held."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_rss_mb: int = 0


def make_cases(max_positions: int, num_prompts: int) -> dict[str, Case]:
    return {
        "throughput": {"prompts": num_prompts, "input": 128, "output": 64},
        "first": {"prompts": 1, "input": 128, "output": 1},
        "stream": {"prompts": 1, "input": 128, "output": 64},
        "prefill": {"prompts": 1, "input": min(1024, max_positions - 1), "output": 1},
    }


def measure(engines: dict[str, Engine], cases: dict[str, Case], repeats: int) -> dict[str, Measured]:
    """A warm-up first, then the engines take turns."""
    measured = {name: Measured({case: [] for case in cases}) for name in engines}
    for repeat in range(-1, repeats):
        for case, shape in cases.items():
            for name, engine in engines.items():
                took = engine.run({**shape, "seed": repeat})
                measured[name].peak_rss_mb = took["peak_rss_mb"]
                if repeat >= 0:
                    measured[name].seconds[case].append(took["seconds"])
    return measured


def figures(measured: Measured, cases: dict[str, Case]) -> dict[str, float]:
    middle = {case: statistics.median(values) for case, values in measured.seconds.items()}
    many, stream = cases["throughput"], cases["stream"]
    rows = {
        "prefill_tok_s": cases["prefill"]["input"] / middle["prefill"],
        "decode_tok_s": many["prompts"] * many["output"] / middle["throughput"],
        "tpot_ms": (middle["stream"] - middle["first"]) / (stream["output"] - 1) * 1e3,
        "ttft_ms": middle["first"] * 1e3,
    }
    return {name: round(value, 3) for name, value in rows.items()}


def times_better(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Above 1 we are better: tokens per second are divided by theirs, milliseconds divide theirs."""
    return {
        name: round(theirs[name] / value if name.endswith("_ms") else value / theirs[name], 2)
        for name, value in ours.items()
    }


def show(ours: dict[str, float], hf: dict[str, float], ratio: dict[str, float]) -> None:
    print("measure             ours         hf  times better", file=sys.stderr)
    for name, value in ours.items():
        peer = f"{hf[name]:10.2f}  {ratio[name]:12.2f}" if hf else ""
        print(f"{name:14} {value:9.2f} {peer}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32, help="of the throughput case")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    arguments = parser.parse_args()
    config = json.loads((Path(arguments.model) / "config.json").read_text())
    cases = make_cases(config["max_position_embeddings"], arguments.prompts)
    options = ["--dtype", arguments.dtype, "--max-num-seqs", str(arguments.prompts)]
    engines = {"ours": Engine("ours", arguments.model, [*options, "--ranks", str(arguments.ranks)])}
    if not arguments.no_hf:
        engines["hf"] = Engine("hf", arguments.model, options)
    measured = measure(engines, cases, arguments.repeats)
    rows: dict[str, dict[str, Any]] = {}
    for name, engine in engines.items():
        rows[name] = figures(measured[name], cases)
        engine.close()
    hf = rows.get("hf", {})
    ratio = times_better(rows["ours"], hf) if hf else {}
    if not arguments.json:
        show(rows["ours"], hf, ratio)
    result: dict[str, Any] = {"model": Path(arguments.model).name, "prompts": arguments.prompts, **rows["ours"]}
    result |= {"startup_s": engines["ours"].startup_s, "peak_rss_mb": measured["ours"].peak_rss_mb}
    if hf:
        hf |= {"startup_s": engines["hf"].startup_s, "peak_rss_mb": measured["hf"].peak_rss_mb}
        result |= {"hf": hf, "ratio_to_hf": ratio}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
