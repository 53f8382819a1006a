"""What --prefill-cadence brings: two engines of one model, with it and without, that get the same requests in turns.

    python benchmarks/bench_cadence.py [--model DIR] [--ranks 2,4] [--requests 48] [--prompt 384] [--tokens 32] [--load 0.8]
                                       [--repeats 3] [--json]

Requests come at seeded, exponentially distributed moments, at `--load` times the rate at which the engine without it ends them when
all come at once. A row per number of ranks: the median of each figure over the repeats, in milliseconds (itl: between two tokens of a
stream, over all streams; ttft) and tokens per second, off and on, and the ratio of the middle ones, on / off. The tokens are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from front.outputs import Prompt
from moesaic import AsyncLLM, SamplingParams


@dataclass
class Figures:
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def row(self) -> dict[str, float]:
        return {
            "itl_p50_ms": 1000 * quantile(self.gaps, 0.5),
            "itl_p99_ms": 1000 * quantile(self.gaps, 0.99),
            "ttft_p50_ms": 1000 * quantile(self.first, 0.5),
            "ttft_p99_ms": 1000 * quantile(self.first, 0.99),
            "tokens_per_s": sum(map(len, self.tokens.values())) / self.seconds,
        }


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


async def one(llm: AsyncLLM, number: int, token_ids: list[int], num_tokens: int, at: float, figures: Figures) -> None:
    await asyncio.sleep(max(0.0, at - time.perf_counter()))
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    tokens = figures.tokens[number] = []
    last = began = time.perf_counter()
    async for deltas in llm.stream(Prompt(request_id=str(number), token_ids=token_ids, params=params)):
        now = time.perf_counter()
        for delta in deltas:
            if delta.token_ids:
                (figures.gaps if tokens else figures.first).append(now - (last if tokens else began))
                tokens += delta.token_ids
        last = now


async def wave(llm: AsyncLLM, options: argparse.Namespace, rate: float, seed: int) -> Figures:
    """rate: requests per second; 0: all at once."""
    drawn, figures = random.Random(seed), Figures()
    moment = began = time.perf_counter()
    tasks = []
    for number in range(options.requests):
        moment += drawn.expovariate(rate) if rate else 0.0
        token_ids = [drawn.randrange(100, 2000) for _ in range(options.prompt)]
        tasks.append(asyncio.create_task(one(llm, number, token_ids, options.tokens, moment, figures)))
    await asyncio.gather(*tasks)
    figures.seconds = time.perf_counter() - began
    return figures


async def open_engine(options: argparse.Namespace, ranks: int, cadence: str) -> AsyncLLM:
    llm = AsyncLLM(
        options.model, data_parallel_size=ranks, prefill_cadence=cadence, enable_prefix_caching=False, threads_per_rank=1,
        enable_dbo="off", max_num_seqs=64,
    )  # fmt: skip
    while not llm.is_ready:
        await asyncio.sleep(0.05)
    return llm


async def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    engines = {cadence: await open_engine(options, ranks, cadence) for cadence in ("off", "on")}
    for llm in engines.values():
        await wave(llm, options, 0.0, 0)
    rate = options.load * options.requests / (await wave(engines["off"], options, 0.0, 0)).seconds
    rows: dict[str, list[dict[str, float]]] = {cadence: [] for cadence in engines}
    different = 0
    for repeat in range(options.repeats):
        found = {cadence: await wave(llm, options, rate, 1 + repeat) for cadence, llm in engines.items()}
        different += sum(found["off"].tokens[number] != tokens for number, tokens in found["on"].tokens.items())
        for cadence, figures in found.items():
            rows[cadence].append(figures.row())
    stats = engines["on"].stats
    for llm in engines.values():
        await llm.close()
    middle = {c: {name: statistics.median(row[name] for row in of) for name in of[0]} for c, of in rows.items()}
    return {
        "ranks": ranks,
        "requests_per_s": round(rate, 2),
        **{cadence: {name: round(value, 2) for name, value in row.items()} for cadence, row in middle.items()},
        "on / off": {name: round(value / middle["off"][name], 3) for name, value in middle["on"].items()},
        "requests_with_other_tokens": different,
        "interval": max(of_rank.prefill_interval for of_rank in stats),
        "held_steps": max(of_rank.prefill_held_steps for of_rank in stats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for ranks in map(int, options.ranks.split(",")):
        row = asyncio.run(measure(options, ranks))
        print(json.dumps(row) if options.json else row, flush=True)


if __name__ == "__main__":
    main()
