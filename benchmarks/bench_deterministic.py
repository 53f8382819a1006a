"""The price of `--deterministic`: the engine with and without it, in turns, same prompts, one process each.

    python benchmarks/bench_deterministic.py --model DIR [--json] [--repeats 3] [--ranks 1]

Cases and figures are those of bench_throughput.py. The last row is the price: above 0 it is slower, in percent.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench_throughput import EMBEDDED, figures, make_cases, measure
from engines import Engine


def price(plain: dict[str, float], fixed: dict[str, float]) -> dict[str, float]:
    """Percent of more time."""
    ratios = {name: fixed[name] / one if name.endswith("_ms") else one / fixed[name] for name, one in plain.items()}
    return {f"{name.rpartition('_')[0]}_price_pct": round(100 * (ratio - 1), 1) for name, ratio in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32, help="of the throughput case")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    arguments = parser.parse_args()
    config = json.loads((Path(arguments.model) / "config.json").read_text())
    cases = make_cases(config["max_position_embeddings"], arguments.prompts)
    options = ["--dtype", arguments.dtype, "--ranks", str(arguments.ranks)]
    engines = {
        "plain": Engine("ours", arguments.model, options),
        "fixed": Engine("ours", arguments.model, [*options, "--deterministic"]),
    }
    measured = measure(engines, cases, arguments.repeats)
    rows = {name: figures(measured[name], cases) for name in engines}
    for engine in engines.values():
        engine.close()
    if not arguments.json:
        for name, row in rows.items():
            print(name, row)
    print(json.dumps({"model": Path(arguments.model).name, **rows["fixed"], **price(rows["plain"], rows["fixed"])}))


if __name__ == "__main__":
    main()
