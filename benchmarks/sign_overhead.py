"""What signs of life cost (dbo/alive.py): a decode step of one rank as it is, and without them, in turns.

.venv/bin/python benchmarks/sign_overhead.py [--model DIR] [--streams 8] [--rounds 12] [--json]

step_us, bare_us   microseconds of this thread's processor time per step, medians over all turns; bare: the marks of
                   layers, steps and waits do nothing
extra_us, extra_pct   the difference: the median over the pairs of neighbouring turns
calls              marks per step
call_us            a mark alone, times the calls of a step
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("mark", "place", "at", "waits", "goes_on")
STEPS = 32  # of a turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder; default: the embedded model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="nothing but one JSON line")
    options = parser.parse_args()
    row = measure(options)
    row = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
    print(json.dumps(row) if options.json else row)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from dbo import alive
    from engine.build import build_rank

    counts = [0]
    real: dict[str, Callable[..., None]] = {name: getattr(alive, name) for name in NAMES}
    rooms = [module for name, module in sys.modules.items() if name.split(".")[0] in ("dbo", "ep", "engine")]
    places = [
        (module, key, name)
        for module in rooms
        for key, value in vars(module).items()
        for name, function in real.items()
        if value is function
    ]

    def set_all(chosen: dict[str, Callable[..., None]]) -> None:
        """Wherever they are known by a name."""
        for module, key, name in places:
            setattr(module, key, chosen[name])

    def counted(*arguments: Any) -> None:
        counts[0] += 1

    def bare(*arguments: Any) -> None:
        return

    with torch.inference_mode():
        rank = build_rank(plan_of(options), 0, None)
        submit(rank, options)
        for _ in range(8):
            rank.step()
        set_all(dict.fromkeys(NAMES, counted))
        rank.step()
        calls, turns = counts[0], []
        for number in range(options.rounds):
            seconds = {}
            for way in ("real", "bare") if number % 2 else ("bare", "real"):
                set_all(real if way == "real" else dict.fromkeys(NAMES, bare))
                began = time.thread_time()
                for _ in range(STEPS):
                    rank.step()
                seconds[way] = (time.thread_time() - began) / STEPS * 1e6
            turns.append(seconds)
        set_all(real)
    began = time.perf_counter()
    for layer in range(100_000):
        alive.at(1, layer & 63)
    one = (time.perf_counter() - began) / 100_000 * 1e6
    extra = statistics.median(turn["real"] - turn["bare"] for turn in turns)
    bare_us = statistics.median(turn["bare"] for turn in turns)
    return {
        "step_us": statistics.median(turn["real"] for turn in turns),
        "bare_us": bare_us,
        "extra_us": extra,
        "extra_pct": 100 * extra / bare_us,
        "calls": calls,
        "call_us": calls * one,
    }


def plan_of(options: argparse.Namespace) -> Any:
    from configs.engine import EngineConfig
    from engine.plan import make_plan

    model = str(Path(options.model)) if options.model else None
    return make_plan(
        EngineConfig(
            model=model, threads_per_rank=1, max_model_len=1024, max_num_seqs=options.streams, enable_prefix_caching=False,
            async_scheduling=False, num_kv_blocks=options.streams * 66,
        )
    )  # fmt: skip


def submit(rank: Any, options: argparse.Namespace) -> None:
    from front.messages import AddRequest
    from front.params import SamplingParams

    tokens = 16 + 2 * STEPS * options.rounds
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for number in range(options.streams):
        ids = [10 + (7 * number + place) % 200 for place in range(8)]
        rank.submit(AddRequest(request_id=number, token_ids=ids, prompt_len=8, params=params, seed=0))


if __name__ == "__main__":
    main()
