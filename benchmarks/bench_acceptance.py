"""What drafts of a known acceptance bring a model of random weights, one request at a time, in one process.

    python benchmarks/bench_acceptance.py --model DIR [--quantization int8] [--acceptance 0.8] [--drafts 1,2,3,adaptive]
                                          [--tokens 128] [--repeats 3] [--json]

A request (sampled, with a seed) is computed without drafts; then again, with its own output as its prediction, of which each token is another with
probability 1 - acceptance: as many drafts are right as of a drafter that accepts so (vLLM: rejection_sample_method synthetic),
and making them takes no time. Both in turns; the tokens are the same, which is checked. A row per number of drafts: k_mean,
acceptance (of the drafts that were computed, those behind a wrong one too), ratio (the middle one of tokens per second over
those without).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from msgspec.structs import replace

from configs.engine import EngineConfig
from engine.build import build_rank
from engine.plan import make_plan
from engine.rank import Rank
from front.messages import AddRequest
from front.params import SamplingParams

PROMPT = list(range(100, 164))


def answer(rank: Rank, number: int, tokens: int, predicted: tuple[int, ...] = ()) -> tuple[list[int], float]:
    """Its tokens, and the seconds of all but the first."""
    params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, prediction_token_ids=predicted)
    rank.submit(
        AddRequest(
            request_id=number, token_ids=PROMPT, prompt_len=len(PROMPT), params=params, seed=0, arrival=float(number)
        )
    )
    found: list[int] = []
    began = time.perf_counter()
    while rank.has_work:
        for output in rank.step():
            if not found:
                began = time.perf_counter()
            found += output.new_token_ids
    return found, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--drafts", default="1,2,3,adaptive")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = random.Random(0)
    for drafts in options.drafts.split(","):
        adaptive = drafts == "adaptive"
        asked = {"method": "prediction", "num_speculative_tokens": 5 if adaptive else int(drafts), "adaptive": adaptive}
        config = EngineConfig(
            model=options.model, quantization=options.quantization, speculative_config=asked, data_parallel_size=1,
            max_model_len=1024, max_num_seqs=4, async_scheduling=False, weight_cache="off",
        )  # fmt: skip
        plan = make_plan(config)
        assert plan.speculation is not None
        rank = build_rank(replace(plan, weight_store=False, speculation=replace(plan.speculation, memory="")))
        expected, _ = answer(rank, 0, options.tokens)
        ratios, number = [], 0
        for repeat in range(-1, options.repeats):
            wrong = [token if rng.random() < options.acceptance else rng.choice(PROMPT) for token in expected]
            plain, without = answer(rank, number + 1, options.tokens)
            if repeat < 0:
                rank._scheduler.forget_counts()
                rank._scheduler.speculation.forget_counts()
            got, seconds = answer(rank, number + 2, options.tokens, tuple(wrong))
            number += 2
            assert plain == got == expected, "the tokens differ"
            if repeat >= 0:
                ratios.append(without / seconds)
        stats = rank.stats
        row = {
            "model": options.model.rsplit("/", 1)[-1],
            "method": f"synthetic {options.acceptance:g}, {drafts}",
            "streams": 1,
            "k_mean": round(stats.spec_draft_tokens / max(1, stats.spec_drafts), 2),
            "acceptance": round(stats.spec_accepted_tokens / max(1, stats.spec_draft_tokens), 3),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "plain_ms_per_token": round(1e3 * without / (options.tokens - 1), 2),
        }
        print(json.dumps(row) if options.json else row, flush=True)
        rank.close()


if __name__ == "__main__":
    main()
