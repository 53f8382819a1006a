"""One stream over HTTP, as a person sees it: the first, the second and the tenth request after a start, from one rank with all
threads and from ranks with one thread each.

    python benchmarks/bench_streams.py [--model DIR] [--ranks 1,2] [--threads 2] [--tokens 146] [--repeats 1] [--json]

Servers of `--ranks` share `--threads`. A row per server and request: seconds, to the first token and to the last, and tokens
per second from the first to the last. Requests are greedy and begin differently, so that no prefix is found; the texts of all servers are
the same, which is checked, in float32 (`--dtype`), in which they do not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from server_process import Server

TOLD = (1, 2, 10)
BEGINNINGS = ("Lily", "Tom", "Sara", "Ben", "Anna", "Max", "Mia", "Sam", "Zoe", "Leo")


async def one(url: str, prompt: str, tokens: int) -> tuple[str, float, float]:
    """The text, seconds to its first part and to its end."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    began, first, text = time.perf_counter(), 0.0, []
    writer.write(head.encode() + data)
    async for line in reader:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            text.append(json.loads(line[6:])["choices"][0]["text"])
    ended = time.perf_counter() - began
    writer.close()
    return "".join(text), first, ended


def measure(ranks: int, options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], str]]:
    """A row and its text for each request that is told."""
    words = ["--data-parallel-size", str(ranks), "--threads-per-rank", str(max(1, options.threads // ranks))]
    words += ["--dtype", options.dtype]
    server = Server([*([options.model] if options.model else []), *words])
    server.wait_ready()
    for number in range(1, max(TOLD) + 1):
        prompt = f"{BEGINNINGS[number % len(BEGINNINGS)]} and her friend went to the park and"
        text, first, ended = asyncio.run(one(server.url, prompt, options.tokens))
        if number in TOLD:
            rate = (options.tokens - 1) / max(ended - first, 1e-9)
            row = {"ranks": ranks, "request": number, "first_s": round(first, 4), "s": round(ended, 4)}
            yield {**row, "tokens_per_s": round(rate)}, text
    server.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=146)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=1, help="servers of each kind, in turns")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    texts: dict[int, str] = {}
    for _ in range(options.repeats):
        for ranks in map(int, options.ranks.split(",")):
            for row, text in measure(ranks, options):
                if options.dtype == "float32" and texts.setdefault(row["request"], text) != text:
                    sys.exit(f"{ranks} ranks gave another text")
                print(json.dumps(row) if options.json else row, flush=True)


if __name__ == "__main__":
    main()
