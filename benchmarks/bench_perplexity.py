"""What fewer bits cost: perplexity of one text with weights as the checkpoint has them, and in 8 and 4 bits.

    python benchmarks/bench_perplexity.py MODEL [--text FILE] [--tokens 4096] [--formats plain int8 int4 mxfp4] [--json]

MODEL: a directory or a GGUF file; of a GGUF file `plain` is what lies in it, in the form in which it is kept here. The
text is cut into windows of --window tokens, each predicted from its own beginning on. Default: the language reference
that comes with every Python. A JSON line for each format: its perplexity, and its ratio to the first.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

from moesaic import LLM, SamplingParams

FORMATS = ("plain", "fp8", "int8", "int4", "mxfp4")


def perplexity(model: str, form: str, text: str, tokens: int, window: int, dtype: str) -> tuple[float, int]:
    """And of how many tokens."""
    quantization: dict[str, Any] = {} if form == "plain" else {"quantization": form}
    with LLM(model, dtype=dtype, max_model_len=window + 1, weight_cache="off", **quantization) as llm:
        ids = llm.tokenizer.encode(text, add_special_tokens=False)[:tokens]
        windows = [ids[first : first + window] for first in range(0, len(ids), window)]
        asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        answers = llm.generate([part for part in windows if len(part) > 1], asked)
    total = count = 0.0
    for answer in answers:
        assert answer.prompt_logprobs is not None
        for entry in answer.prompt_logprobs:
            if entry is not None:
                total -= entry.chosen.logprob
                count += 1
    return math.exp(total / count), int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--text", type=Path, help="default: Python's language reference")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["plain", "int8", "int4", "mxfp4"])
    parser.add_argument("--json", action="store_true", help="nothing but the JSON lines")
    arguments = parser.parse_args()
    text = arguments.text.read_text() if arguments.text else "\n".join(pydoc_data.topics.topics.values())
    first = 0.0
    for form in arguments.formats:
        sizes = arguments.tokens, arguments.window, arguments.dtype
        found, count = perplexity(arguments.model, form, text, *sizes)
        first = first or found
        row = {"format": form, "perplexity": round(found, 3), "ratio": round(found / first, 4), "tokens": count}
        print(json.dumps(row), flush=True)
        if not arguments.json:
            print(f"{form:6} {found:8.3f}  {found / first:.4f} of {arguments.formats[0]}", file=sys.stderr)


if __name__ == "__main__":
    main()
