"""What it costs to parse calls of tools and reasoning out of a stream of tokens (front/chat): microseconds per token.

    .venv/bin/python benchmarks/bench_parsers.py [--repeats N] [--tokens N] [--json]

A text of each family (reasoning, content, a call with a long text and a list) is fed in pieces of about a token's size, one after
another, and joined to a message as the server does. The least of the repeats counts. The limit is 5 us per token.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

LIMIT_US = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2000, help="about how many a text has")
    parser.add_argument("--json", action="store_true", help="a JSON object per line")
    options = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root), str(root / "tests" / "tools")]

    from tool_formats import RENDERED, SCHEMA, reasoning_of

    from front.chat.events import Message
    from front.chat.format import OutputFormat

    words = options.tokens // 4
    for form, (family, render) in RENDERED.items():
        text = _text(family, words) + render([("f", {"text": "a fox " * words, "many": [*range(words // 2)]})])
        tokens = re.findall(r"<[^<>]*>|\s?\w+|\s|[^\w\s]", text)
        format = OutputFormat(calls=family, reasoning=reasoning_of(family), tools={"f": SCHEMA})
        least = float("inf")
        for _ in range(options.repeats):
            output, message = format.parser("request", 0), Message()
            start = time.perf_counter()
            for token in tokens:
                message.add(output.feed(token))
            message.add(output.finish())
            least = min(least, time.perf_counter() - start)
        assert len(message.calls) == 1 and message.reasoning and message.content, form
        row = {"form": form, "tokens": len(tokens), "us_per_token": round(1e6 * least / len(tokens), 2)}
        row["limit_us"] = LIMIT_US
        print(
            json.dumps(row, ensure_ascii=False)
            if options.json
            else f"{form:16} {row['us_per_token']:6.2f} us per token"
        )


def _text(family: str, words: int) -> str:
    thought, said = "It thinks of a tree. " * (words // 5), "The tree said nothing. " * (words // 5)
    if family == "openai":
        return (
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{said}<|end|>"
        )
    return f"<think>\n{thought}\n</think>\n\n{said}"


if __name__ == "__main__":
    main()
