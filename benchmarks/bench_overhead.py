"""What the engine adds per output token: 256 concurrent requests of 16 prompt and 32 output tokens on a tiny random model.

    python benchmarks/bench_overhead.py [--shape tiny-host] [--dtype bfloat16] [--json] [--repeats 5] [--hf]

The model's own compute is included (32,000 logits x 256 rows), so the figure is an upper bound of the overhead. With --shape tiny-host
there is next to none (one layer, 1,024 logits), on a CPU without products of bfloat16 with --dtype float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines import Engine
from make_models import SHAPES, make

CASE = {"prompts": 256, "input": 16, "output": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny-qwen3moe")
    parser.add_argument("--models", type=Path, help="keep the made model here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--hf", action="store_true", help="Hugging Face generate beside it, one static batch")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = str(make(arguments.shape, arguments.models or Path(scratch)))
        options = ["--max-num-batched-tokens", "4096", "--dtype", arguments.dtype]
        engines = {"async": Engine("ours", model, options), "sync": Engine("ours", model, [*options, "--sync"])}
        if arguments.hf:
            engines["hf"] = Engine("hf", model, [])
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        steps = 0
        for repeat in range(-1, arguments.repeats):
            for name, engine in engines.items():
                answer = engine.run({**CASE, "seed": repeat})
                steps = answer["steps"] or steps
                if repeat >= 0:
                    seconds[name].append(answer["seconds"])
        for engine in engines.values():
            engine.close()
    tokens = CASE["prompts"] * CASE["output"]
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(middle["async"], middle["sync"])
    result: dict[str, Any] = {
        "shape": arguments.shape,
        "us_per_output_token": round(best / tokens * 1e6, 2),
        "requests_per_s": round(CASE["prompts"] / best, 1),
        "steps_per_s": round(steps / best, 1),
        "us_per_output_token_by_mode": {name: round(value / tokens * 1e6, 2) for name, value in middle.items()},
    }
    if "hf" in middle:
        result["ratio_to_hf"] = round(middle["hf"] / best, 2)
    if not arguments.json:
        for name, value in result.items():
            print(f"{name:30} {value}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
