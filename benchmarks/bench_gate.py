"""What a model that may draft costs where no drafts pay: two engines in one process, with the gate and without any drafts, that take turns
of a few steps each, so that whatever else the machine does meets both alike.

    python benchmarks/bench_gate.py [--model DIR] [--method mtp] [--streams 64] [--tokens 64] [--rounds 40] [--slice 4] [--drafts N]
                                    [--threads 1] [--json]

A round: so many greedy requests on either engine, of the prompts of bench_speculation.py, with the same tokens, which is checked. Its ratio:
tokens per second with the gate over those without. One row: k_mean, drafts of a sequence and step; plain_step_ms, step_ms: of a step, the
middle one of the rounds' means; tokens_per_step, of a sequence, with the gate; ratio, the mean over the rounds (of logarithms), and
interval, in which it lies with 95 % certainty by Student's t; ratio_cpu, the same of this thread's processor time. --drafts: always so many.
Before the rounds that count there are some in which the gate learns (--learn).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from bench_speculation import PROMPTS
from msgspec.structs import replace
from tokenizers import Tokenizer

from configs.engine import EngineConfig
from engine.build import build_rank
from engine.plan import make_plan
from engine.rank import Rank
from engine.speculation.gate import Gate
from front.messages import AddRequest
from front.params import SamplingParams
from models.tiny import CHECKPOINT

T_95 = {10: 2.23, 20: 2.09, 30: 2.04, 40: 2.02, 60: 2.0}  # by degrees of freedom, at least so many


def build(options: argparse.Namespace, config: dict[str, Any]) -> Rank:
    engine = EngineConfig(
        model=options.model, speculative_config=config, data_parallel_size=1, max_model_len=1024, weight_cache="off"
    )
    plan = make_plan(engine)
    speculation = plan.speculation and replace(plan.speculation, memory="")
    return build_rank(replace(plan, weight_store=False, speculation=speculation, threads_per_rank=options.threads))


class Side:
    """One engine, its clocks of this round, and the tokens that its requests got. What its gate measures by stands still
    during the other's turns."""

    def __init__(self, rank: Rank, prompts: list[list[int]]) -> None:
        self.rank, self.prompts = rank, prompts
        self._others = self._ended = time.perf_counter()  # seconds of others' turns; when its last one ended
        for gate in rank._companions.members:
            if isinstance(gate, Gate):
                gate.meter.clock = self.now
        self.begin(0, 0, 0)

    def now(self) -> float:
        return time.perf_counter() - self._others

    def begin(self, first: int, streams: int, tokens: int) -> None:
        self.seconds = self.cpu = 0.0
        self.steps = 0
        self.tokens: dict[int, list[int]] = {}
        for number in range(streams):
            prompt = self.prompts[number]
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            request = AddRequest(
                request_id=first + number, token_ids=prompt, prompt_len=len(prompt), params=params, seed=0,
                arrival=float(first + number),
            )  # fmt: skip
            self.rank.submit(request)
            self.tokens[first + number] = []

    def turn(self, steps: int) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        self._others += began - self._ended
        for _ in range(steps):
            if not self.rank.has_work:
                break
            self.steps += 1
            for output in self.rank.step():
                self.tokens[output.request_id] += output.new_token_ids
        self._ended = time.perf_counter()
        self.seconds += self._ended - began
        self.cpu += time.thread_time() - cpu


def one_round(plain: Side, gated: Side, number: int, options: argparse.Namespace) -> tuple[float, float]:
    """Logarithms of the ratios: of seconds, and of processor time."""
    for side in (plain, gated):
        side.begin(1 + number * options.streams, options.streams, options.tokens)
    turns = number
    while plain.rank.has_work or gated.rank.has_work:
        for side in (plain, gated) if turns % 2 else (gated, plain):
            side.turn(options.slice)
        turns += 1
    assert plain.tokens == gated.tokens, "the tokens differ"
    return math.log(plain.seconds / gated.seconds), math.log(plain.cpu / gated.cpu)


def mean_and_interval(logs: list[float]) -> tuple[float, list[float]]:
    mean, num = statistics.fmean(logs), len(logs)
    t = min((value for least, value in T_95.items() if num - 1 >= least), default=2.6)
    wide = t * statistics.stdev(logs) / math.sqrt(num)
    return round(math.exp(mean), 4), [round(math.exp(mean - wide), 4), round(math.exp(mean + wide), 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--method", choices=["mtp", "ngram", "suffix"], default="mtp")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--learn", type=int, default=6)
    parser.add_argument("--slice", type=int, default=4, help="steps of a turn")
    parser.add_argument("--drafts", type=int, help="always so many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config: dict[str, Any] = {"method": options.method}
    if options.drafts:
        config |= {"num_speculative_tokens": options.drafts, "adaptive": False}
    tokenizer = Tokenizer.from_file(str(Path(options.model or CHECKPOINT) / "tokenizer.json"))
    texts = [f"{PROMPTS[i % len(PROMPTS)]}{' again' * (i // len(PROMPTS))}" for i in range(options.streams)]
    prompts = [tokenizer.encode(text).ids for text in texts]
    plain, gated = Side(build(options, {"method": "none"}), prompts), Side(build(options, config), prompts)
    found: list[tuple[float, float]] = []
    steps: list[tuple[float, float, float]] = []
    for number in range(options.learn + options.rounds):
        if number == options.learn:
            gated.rank._scheduler.speculation.num_drafts = gated.rank._scheduler.speculation.num_draft_tokens = 0
        found.append(one_round(plain, gated, number, options))
        each = options.tokens / gated.steps
        steps.append((1e3 * plain.seconds / plain.steps, 1e3 * gated.seconds / gated.steps, each))
    counts = gated.rank.stats
    ratio, interval = mean_and_interval([wall for wall, _ in found[options.learn :]])
    ratio_cpu, interval_cpu = mean_and_interval([cpu for _, cpu in found[options.learn :]])
    names, steps = ("plain_step_ms", "step_ms", "tokens_per_step"), steps[options.learn :]
    row = {
        "model": options.model or "moesaic-tiny",
        "method": options.method,
        "streams": options.streams,
        "rounds": options.rounds,
        "k_mean": round(counts.spec_draft_tokens / counts.spec_drafts, 2) if counts.spec_drafts else 0.0,
        **{
            name: round(statistics.median(values), 3)
            for name, values in zip(names, zip(*steps, strict=True), strict=True)
        },
        "ratio": ratio,
        "interval": interval,
        "ratio_cpu": ratio_cpu,
        "interval_cpu": interval_cpu,
    }
    print(json.dumps(row) if options.json else row, flush=True)


if __name__ == "__main__":
    main()
