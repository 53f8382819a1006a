"""What structured output costs: time per output token with a grammar and without, and what a new schema adds to the first token.

    python benchmarks/bench_structured.py [--json] [--model DIR] [--streams 1 16 64] [--tokens 64] [--repeats 5]

Both run in turns in one process, the least of the repeats counts. The grammar is a list of strings that goes on as long as it is asked
for, so that both generate the same number of tokens. ttft_added_ms: a prompt's first token with a schema that no request had before,
less one without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from moesaic import LLM, SamplingParams, StructuredOutputsParams

PROMPT = "Once upon a time there was a small fox"


def schema(number: int) -> StructuredOutputsParams:
    """A different one for each number."""
    person = {
        "type": "object",
        "properties": {
            f"name{number}": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": [f"name{number}", "age", "tags"],
    }
    return StructuredOutputsParams(json={"type": "array", "items": person, "minItems": 50})


def seconds(llm: LLM, streams: int, tokens: int, asked: StructuredOutputsParams | None) -> float:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=1, structured_outputs=asked)
    began = time.perf_counter()
    results = llm.generate([f"{PROMPT} {number}" for number in range(streams)], params)
    assert all(len(result.outputs[0].token_ids) == tokens for result in results)
    return time.perf_counter() - began


def cost(llm: LLM, streams: int, tokens: int, repeats: int) -> dict[str, object]:
    least = {False: float("inf"), True: float("inf")}
    asked = schema(0)
    for _ in range(repeats + 1):  # the first time is for what is made once
        for guided in (False, True):
            own = asked if guided else None
            whole, one = seconds(llm, streams, tokens, own), seconds(llm, streams, 1, own)
            least[guided] = min(least[guided], (whole - one) / (tokens - 1))
    free, bound = least[False] * 1e3, least[True] * 1e3
    return {
        "streams": streams, "tpot_ms": round(free, 4), "structured_tpot_ms": round(bound, 4),
        "cost_percent": round(100 * (bound / free - 1), 2),
    }  # fmt: skip


def first_token(llm: LLM, repeats: int) -> dict[str, object]:
    added = []
    for number in range(1, 2 * repeats + 1):
        free = min(seconds(llm, 1, 1, None) for _ in range(2))
        added.append((seconds(llm, 1, 1, schema(number)) - free) * 1e3)
    return {"ttft_added_ms": round(statistics.median(added), 3), "worst_ms": round(max(added), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default=None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    more = {
        "speculative_config": {"method": "none"},
        "enable_prefix_caching": True,
        "max_num_seqs": max(options.streams),
    }
    with LLM(*([options.model] if options.model else []), **more) as llm:
        seconds(llm, 1, 2, schema(0))
        for streams in options.streams:
            row = cost(llm, streams, options.tokens, options.repeats)
            print(json.dumps(row) if options.json else row, flush=True)
        row = first_token(llm, options.repeats)
        print(json.dumps(row) if options.json else row, flush=True)


if __name__ == "__main__":
    main()
