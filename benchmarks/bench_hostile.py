"""Hostile requests: how long every stream stands still while bodies arrive that cost much to look at.

    python benchmarks/bench_hostile.py [--ranks 2] [--streams 8] [--bytes 8000000] [--bodies 4] [--seconds 3] [--cases A,B]
        [--model DIR] [--option WORD] [--json]

A server under `--streams` streams gets, for each case, `--bodies` such bodies at once, on a connection each, again and again
for `--seconds`. Printed for each case: the longest time between two pieces of any stream, the longest that GET
/health took, the answers' statuses, and the memory of the front afterwards. The case "none" sends nothing: what the
machine itself does to the streams. Bodies are sent by another process, so that this one measures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from server_process import Server, command_line, descendants

from moesaic.http_client import Client

READ_SECONDS = 120.0
STREAM_TOKENS = 256


def _filled(head: str, piece: str, tail: str, size: int) -> bytes:
    return (head + ",".join([piece] * max(1, (size - len(head) - len(tail)) // (len(piece) + 1))) + tail).encode()


def _prompt(text: str) -> bytes:
    return json.dumps({"prompt": text, "max_tokens": 1}).encode()


MESSAGE = '{"role":"user","content":"a"}'
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# name -> route, and its body of about so many bytes
CASES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "none": ("", lambda size: b""),
    "one_word": (COMPLETIONS, lambda size: _prompt("a" * size)),
    "text": (COMPLETIONS, lambda size: _prompt("the little dog went out. " * (size // 25))),
    "texts": (COMPLETIONS, lambda size: _filled('{"prompt":[', '"a b"', "]}", size)),
    "long_texts": (COMPLETIONS, lambda size: json.dumps({"prompt": ["the dog. " * (size // 9000)] * 1000}).encode()),
    "token_ids": (COMPLETIONS, lambda size: _filled('{"prompt":[', "17", "]}", size)),
    "token_id_lists": (COMPLETIONS, lambda size: _filled('{"prompt":[', "[7]", "]}", size)),
    "cut_text": (COMPLETIONS, lambda size: b'{"truncate_prompt_tokens":8,"max_tokens":1,' + _prompt("a b " * (size // 4))[1:]),
    "chat": (CHAT, lambda size: json.dumps({"messages": [{"role": "user", "content": "a b " * (size // 4)}]}).encode()),
    "messages": (CHAT, lambda size: _filled('{"messages":[', MESSAGE, "]}", size)),
    "bias": (COMPLETIONS, lambda size: json.dumps({"prompt": "a", "logit_bias": dict.fromkeys(range(size // 11), 1)}).encode()),
    "stop_ids": (COMPLETIONS, lambda size: _filled('{"prompt":"a","max_tokens":1,"stop_token_ids":[', "7", "]}", size)),
    "nested": (COMPLETIONS, lambda size: b'{"prompt":' + b"[" * size),
    "tokenize": ("/tokenize", lambda size: json.dumps({"prompt": "a b " * (size // 4), "return_token_strs": True}).encode()),
    "detokenize": ("/detokenize", lambda size: _filled('{"tokens":[', "17", "]}", size)),
    "choices": (COMPLETIONS, lambda size: json.dumps({"prompt": "a", "n": 128, "max_tokens": 1}).encode()),
    "prompts": (COMPLETIONS, lambda size: json.dumps({"prompt": [[7]] * 1024, "max_tokens": 1}).encode()),
}  # fmt: skip


def hostile(url: str, orders: Connection) -> None:
    """The other process: (route, body, how many at once, seconds) -> counts of statuses and the longest answer."""
    parts = urlsplit(url)

    def post(order: tuple[str, bytes]) -> tuple[str, float]:
        route, body = order
        head = f"POST {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        began, first = time.perf_counter(), b""
        address = parts.hostname or "", parts.port or 80
        with contextlib.suppress(OSError), socket.create_connection(address, READ_SECONDS) as connection:
            connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body))
            with contextlib.suppress(OSError):  # it is refused before all has gone
                connection.sendall(body)
            while piece := connection.recv(1 << 20):
                first = first or piece
        return first[9:12].decode() or "none", time.perf_counter() - began

    while (order := orders.recv()) is not None:
        route, body, count, seconds = order
        statuses: dict[str, int] = {}
        longest, end = 0.0, time.perf_counter() + seconds
        with ThreadPoolExecutor(count) as pool:
            while time.perf_counter() < end:
                for status, took in pool.map(post, [(route, body)] * count):
                    statuses[status] = statuses.get(status, 0) + 1
                    longest = max(longest, took)
        orders.send((statuses, longest))


@dataclass
class Watch:
    """What streams and probes see."""

    client: Client
    max_gap: float = 0.0
    max_health: float = 0.0
    num_pieces: int = 0
    failures: list[str] = field(default_factory=list)
    over: bool = False

    async def stream(self, number: int) -> None:
        while not self.over:
            body: dict[str, Any] = {"prompt": [number + 5, 7, 11], "max_tokens": STREAM_TOKENS, "ignore_eos": True}
            last = None
            try:
                async for _ in self.client.events("/v1/completions", body | {"stream": True, "temperature": 0}):
                    now = time.perf_counter()
                    if last is not None:
                        self.max_gap = max(self.max_gap, now - last)
                    last = now
                    self.num_pieces += 1
                    if self.over:  # said while this waited
                        return  # type: ignore[unreachable]
            except Exception as error:
                self.failures.append(repr(error))
                return

    async def probe(self) -> None:
        while not self.over:
            began = time.perf_counter()
            try:
                await self.client.get("/health")
            except Exception as error:
                self.failures.append(repr(error))
                return
            self.max_health = max(self.max_health, time.perf_counter() - began)
            await asyncio.sleep(0.02)


def memory_mb(server: Server) -> float:
    """Resident memory of the front."""
    for pid in descendants(server.process.pid):
        if "server.process" in command_line(pid):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024
    return 0.0


async def measure(case: str, arguments: argparse.Namespace, server: Server, orders: Connection) -> dict[str, Any]:
    route, make = CASES[case]
    body = make(arguments.bytes)
    watch = Watch(Client(server.url))
    tasks = [asyncio.create_task(watch.stream(number)) for number in range(arguments.streams)]
    tasks.append(asyncio.create_task(watch.probe()))
    while watch.num_pieces < 8 * arguments.streams and not watch.failures:  # all have begun
        await asyncio.sleep(0.01)
    watch.max_gap = watch.max_health = 0.0
    statuses: dict[str, int] = {}
    longest = 0.0
    if route:
        orders.send((route, body, arguments.bodies, arguments.seconds))
        while not orders.poll():
            await asyncio.sleep(0.005)
        statuses, longest = orders.recv()
    else:
        await asyncio.sleep(arguments.seconds)
    gap, health = watch.max_gap, watch.max_health
    watch.over = True
    await asyncio.gather(*tasks)
    return {
        "case": case,
        "bytes": len(body),
        "statuses": statuses,
        "max_gap_s": round(gap, 4),
        "max_health_s": round(health, 4),
        "max_answer_s": round(longest, 3),
        "front_mb": round(memory_mb(server)),
        "failed_streams": len(watch.failures),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=8_000_000)
    parser.add_argument("--bodies", type=int, default=4, help="at once")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--model")
    parser.add_argument("--option", action="append", default=[], help="one more word for `moesaic serve`; repeatable")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON lines")
    arguments = parser.parse_args()
    words = ["-dp", str(arguments.ranks), *(["--model", arguments.model] if arguments.model else [])]
    server = Server([*words, *arguments.option])
    rows = []
    try:
        server.wait_ready()
        ours, theirs = multiprocessing.Pipe()
        sender = multiprocessing.get_context("spawn").Process(target=hostile, args=(server.url, theirs), daemon=True)
        sender.start()
        for case in arguments.cases.split(","):
            rows.append(asyncio.run(measure(case, arguments, server, ours)))
            if not arguments.json:
                print(rows[-1], file=sys.stderr, flush=True)
        ours.send(None)
        sender.join(10)
    finally:
        left = server.end()
    for row in rows:
        print(json.dumps(row))
    total = {name: max(row[name] for row in rows) for name in ("max_gap_s", "max_health_s", "front_mb")}
    print(json.dumps(total | {"failed_streams": sum(row["failed_streams"] for row in rows), "orphans": left}))


if __name__ == "__main__":
    main()
