"""Whole engine beside Hugging Face `generate`, in one run, repetitions interleaved, same prompts, bfloat16 weights.

    python benchmarks/bench_throughput.py --model DIR [--json] [--repeats 3] [--no-hf]

Cases (prompts x prompt tokens -> output tokens): throughput 32 x 128 -> 64, stream 1 x 128 -> 64, prefill 1 x 1024 -> 1.
Without --model the embedded model is measured. Absolute numbers mean little on a shared machine: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from engines import Engine

EMBEDDED = Path(__file__).resolve().parent.parent / "models" / "tiny" / "checkpoint"
CASES = {
    "throughput": {"prompts": 32, "input": 128, "output": 64},
    "first": {"prompts": 1, "input": 128, "output": 1},
    "stream": {"prompts": 1, "input": 128, "output": 64},
    "prefill": {"prompts": 1, "input": 1024, "output": 1},
}


def measure(
    engines: dict[str, Engine], cases: dict[str, dict[str, int]], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """seconds[engine][case]; a warm-up first, then the engines take turns."""
    seconds: dict[str, dict[str, list[float]]] = {name: {case: [] for case in cases} for name in engines}
    for repeat in range(-1, repeats):
        for case, shape in cases.items():
            for name, engine in engines.items():
                took = engine.run({**shape, "seed": repeat})
                engine_peak[name] = took["peak_rss_mb"]
                if repeat >= 0:
                    seconds[name][case].append(took["seconds"])
    return seconds


engine_peak: dict[str, int] = {}


def figures(seconds: dict[str, list[float]]) -> dict[str, float]:
    middle = {case: statistics.median(values) for case, values in seconds.items()}
    many, stream = CASES["throughput"], CASES["stream"]
    rows = {
        "decode_tok_s": many["prompts"] * many["output"] / middle["throughput"],
        "ttft_ms": middle["first"] * 1e3,
        "tpot_ms": (middle["stream"] - middle["first"]) / (stream["output"] - 1) * 1e3,
    }
    if "prefill" in middle:
        rows["prefill_tok_s"] = CASES["prefill"]["input"] / middle["prefill"]
    return {name: round(value, 3) for name, value in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    arguments = parser.parse_args()
    config = json.loads((Path(arguments.model) / "config.json").read_text())
    cases = dict(CASES)
    if config["max_position_embeddings"] < 1025:
        cases.pop("prefill")
    options = ["--dtype", arguments.dtype]
    engines = {"ours": Engine("ours", arguments.model, [*options, "--ranks", str(arguments.ranks)])}
    if not arguments.no_hf:
        engines["hf"] = Engine("hf", arguments.model, options)
    seconds = measure(engines, cases, arguments.repeats)
    rows = {name: figures(seconds[name]) for name in engines}
    result: dict[str, Any] = {"model": Path(arguments.model).name, **rows["ours"]}
    result |= {"startup_s": engines["ours"].startup_s, "peak_rss_mb": engine_peak["ours"]}
    for engine in engines.values():
        engine.close()
    if "hf" in rows:
        result["hf"] = {**rows["hf"], "startup_s": engines["hf"].startup_s, "peak_rss_mb": engine_peak["hf"]}
        better = {name: rows["ours"][name] / rows["hf"][name] for name in rows["ours"]}
        result["ratio_to_hf"] = {name: round(1 / r if name.endswith("_ms") else r, 2) for name, r in better.items()}
    if not arguments.json:
        print("measure            ours        hf   times better", file=sys.stderr)
        for name, value in rows["ours"].items():
            peer = rows.get("hf", {}).get(name)
            print(
                f"{name:14} {value:9.2f} {peer or float('nan'):9.2f} {result.get('ratio_to_hf', {}).get(name, ''):>8}",
                file=sys.stderr,
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
