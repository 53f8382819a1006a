"""What serving over HTTP costs: a real server under load from a client on the same cores.

    python benchmarks/bench_serving.py [--cases overhead,online] [--models DIR] [--repeats 5] [--url URL] [--json]
    python benchmarks/bench_serving.py --cases online --models DIR --vllm-python PATH [--json]

overhead: 256 streams at once, 16 prompt and 32 output tokens, a tiny random model, so that the engine itself is what costs.
host, host-long: the same of a model that computes next to nothing, with 32 and 160 output tokens: what a request costs, and a token.
online: 64 streams at once, 128 prompt and 64 output tokens, qwen3moe-small. start: seconds from the command to the first token.
Costs are CPU time of the front, the ranks and the client divided by output tokens: unlike times on the clock they mean something
while others use the machine. --url: measure this server instead (its costs are then not known).
--vllm-python: of a virtual environment that has vLLM: its server runs beside ours, the two are measured in turn (both sleep
while they have no requests), and a line per figure says `ours`, `peer` and `ratio` (above 1 we are better), with the memory
bandwidth before each repetition.

All figures of a line are those of one repeat, the middle one by requests per second; `repeats` has that of each, and `foreign_cores`
says how much of the machine others kept busy in the worst of them (of a server at --url this cannot be known). Figures on the clock
mean something only where it is near 0 and the repeats agree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from make_models import SHAPES, make
from quiet import Bandwidth, Watch, await_rest
from server_process import Server, command_line, descendants
from vllm_server import SERVED_NAME, VllmServer

READ_SECONDS = 120.0
SETTLE_SECONDS = 4.0  # from the first token to the first repeat: whoever serves has been up for more than a moment
REST_CORES, REST_SECONDS = 0.3, 20.0  # between two servers in turn
ROLES = {"server.process": "front", "engine.process.rank_process": "ranks"}


@dataclass(frozen=True)
class Case:
    shape: str
    streams: int
    num_prompt: int
    num_output: int
    options: list[str] = field(default_factory=list)
    num_words: int = 20000  # that prompts are drawn from


CASES = {
    "overhead": Case("tiny-qwen3moe", 256, 16, 32, ["--dtype", "bfloat16", "--max-num-batched-tokens", "4096"]),
    "host": Case("tiny-host", 256, 16, 32, ["--dtype", "float32", "--max-num-batched-tokens", "4096"], 1024),
    "host-long": Case("tiny-host", 256, 16, 160, ["--dtype", "float32", "--max-num-batched-tokens", "4096"], 1024),
    "online": Case("qwen3moe-small", 64, 128, 64),
}
COMPARED = {"requests_per_s": True, "ttft_p50_ms": False, "ttft_p99_ms": False, "tpot_p50_ms": False}  # is more better


class Stream(asyncio.Protocol):
    """One request on a connection of its own. Only the end of the answer is parsed; before it, pieces are noted as they come."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first = self.last = 0.0
        self.began = time.perf_counter()
        self._request = request
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.first:
            if b"data: " not in data and b" 200 " in data:  # the headers alone
                return
            self.first = time.perf_counter()
        self._tail = (self._tail + data)[-1024:]
        if b"data: [DONE]" in self._tail:
            self.last = time.perf_counter()
            self._transport.close()
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the answer ended early: {self._tail[-300:]!r}"))

    @property
    def num_output(self) -> int:
        """As the server counts: text may come in fewer pieces than there were tokens."""
        return int(self._tail.rpartition(b'"completion_tokens":')[2].split(b",")[0].split(b"}")[0])


def requests(case: Case, url: str, model: str, seed: int) -> list[bytes]:
    host = urlsplit(url).netloc
    draw = random.Random(seed)
    found = []
    for _ in range(case.streams):
        body: dict[str, Any] = {
            "model": model,
            "prompt": [draw.randrange(100, case.num_words) for _ in range(case.num_prompt)],
            "max_tokens": case.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        found.append(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return found


async def load(url: str, bodies: list[bytes]) -> list[Stream]:
    """All at once (rate inf)."""
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80

    async def one(body: bytes) -> Stream:
        stream = Stream(body)
        await loop.create_connection(lambda: stream, host, port)
        await stream.done
        return stream

    async with asyncio.timeout(READ_SECONDS):
        return list(await asyncio.gather(*map(one, bodies)))


def cpu_seconds(server: Server | None) -> dict[str, float]:
    """By role."""
    used = {"front": 0.0, "ranks": 0.0, "client": time.process_time()}
    for pid in descendants(server.process.pid) if server is not None else ():
        role = next((name for module, name in ROLES.items() if module in command_line(pid)), None)
        if role is not None:
            used[role] += time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid(3) would answer
    return used


def measure(case: Case, url: str, model: str, server: Server | None, seed: int) -> dict[str, float]:
    """server: of ours, whose costs are then known."""
    bodies = requests(case, url, model, seed)
    before, began = cpu_seconds(server), time.perf_counter()
    with Watch() as watch:
        streams = uvloop.run(load(url, bodies))
        seconds = time.perf_counter() - began
    after = cpu_seconds(server)
    tokens = sum(stream.num_output for stream in streams)
    ttft = sorted((stream.first - stream.began) * 1e3 for stream in streams)
    tpot = sorted((stream.last - stream.first) * 1e3 / (stream.num_output - 1) for stream in streams)
    result = {
        "requests_per_s": case.streams / seconds,
        "output_tokens_per_s": tokens / seconds,
        "us_per_token": seconds / tokens * 1e6,
        "ttft_p50_ms": statistics.median(ttft),
        "ttft_p99_ms": ttft[round(0.99 * (len(ttft) - 1))],
        "tpot_p50_ms": statistics.median(tpot),
        "tpot_p99_ms": tpot[round(0.99 * (len(tpot) - 1))],
        "foreign_cores": watch.foreign,
    }
    roles = after if server is not None else ["client"]
    return result | {f"cpu_us_per_token_{role}": (after[role] - before[role]) / tokens * 1e6 for role in roles}


def middle(rows: list[dict[str, float]]) -> dict[str, Any]:
    """The repeat in the middle, and what tells whether to believe it."""
    ordered = sorted(rows, key=lambda row: row["requests_per_s"])
    shown = {name: round(value, 2) for name, value in ordered[len(rows) // 2].items() if name != "foreign_cores"}
    worst = max(row["foreign_cores"] for row in rows)
    repeats = [round(row["requests_per_s"], 2) for row in rows]
    return shown | {"repeats": repeats, "foreign_cores": round(worst, 2)}


def serve(model: str, options: list[str]) -> tuple[Server, float]:
    """A server, and the seconds from its command to its first token."""
    began = time.perf_counter()
    server = Server(["-dp", "1", "--model", model, *options])
    try:
        server.wait_ready()
        one = Case("", 1, 8, 2, num_words=1000)
        first = uvloop.run(load(server.url, requests(one, server.url, model, 0)))[0].first
    except BaseException:
        server.end()
        raise
    return server, first - began


def run(name: str, arguments: argparse.Namespace, models: Path) -> dict[str, Any]:
    case = CASES[name]
    repeats = range(arguments.repeats + 1)  # the first warms up; each has prompts of its own, or they would be cached
    if arguments.url:
        rows = [measure(case, arguments.url, arguments.served_model, None, repeat) for repeat in repeats]
        for row in rows:
            row["foreign_cores"] = 0.0  # the server's own use is among it
        return {"case": name, "url": arguments.url} | middle(rows[1:])
    model = str(make(case.shape, models))
    server, start = serve(model, [*case.options, *arguments.option])
    try:
        time.sleep(SETTLE_SECONDS)
        rows = [measure(case, server.url, model, server, repeat) for repeat in repeats]
    finally:
        left = server.end()
    assert not left, f"{left} processes of the server are left"
    return {"case": name, "start_s": round(start, 2)} | middle(rows[1:])


def beside_vllm(name: str, arguments: argparse.Namespace, models: Path) -> list[dict[str, Any]]:
    """The two servers in turn; a line per figure."""
    case = CASES[name]
    model = str(make(case.shape, models))
    bandwidth = Bandwidth()
    rows: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    peer = VllmServer(arguments.vllm_python, model, os.cpu_count() or 1)
    try:
        peer.wait_ready()
        server, _ = serve(model, [*case.options, *arguments.option])
        try:
            time.sleep(SETTLE_SECONDS)
            for repeat in range(arguments.repeats + 1):
                for side in rows:
                    if not await_rest(REST_CORES, REST_SECONDS):
                        sys.exit("the machine does not come to rest between the two servers: no figures")
                    level = bandwidth.now()
                    if side == "ours":
                        row = measure(case, server.url, model, server, repeat)
                    else:
                        row = measure(case, peer.url, SERVED_NAME, None, repeat)
                    rows[side].append(row | {"gb_s": level})
        finally:
            server.end()
    finally:
        peer.end()
    found = {side: middle(values[1:]) for side, values in rows.items()}
    lines = []
    for figure, more in COMPARED.items():
        ours, theirs = found["ours"][figure], found["peer"][figure]
        lines.append(
            {
                "case": name,
                "row": figure,
                "peer_name": "vllm",
                "ours": ours,
                "peer": theirs,
                "ratio": round(ours / theirs if more else theirs / ours, 3),
                "ours_gb_s": [round(row["gb_s"]) for row in rows["ours"][1:]],
                "peer_gb_s": [round(row["gb_s"]) for row in rows["peer"][1:]],
                "foreign_cores": max(one["foreign_cores"] for one in found.values()),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="overhead,online", help=", ".join(CASES))
    parser.add_argument("--models", type=Path, help=f"where made models are kept ({', '.join(sorted(SHAPES))})")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--url", help="a server that runs already, e.g. vLLM's")
    parser.add_argument("--served-model", default="", help="the model's name there")
    parser.add_argument("--vllm-python", metavar="PATH", help="measure vLLM's server beside ours, in turn")
    parser.add_argument("--option", action="append", default=[], help="one more word for `moesaic serve`; repeatable")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON lines")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.cases.split(","):
            models = arguments.models or Path(scratch)
            if arguments.vllm_python:
                for line in beside_vllm(name, arguments, models):
                    print(json.dumps(line), flush=True)
                continue
            result = run(name, arguments, models)
            if not arguments.json:
                for key, value in result.items():
                    print(f"{key:28} {value}", file=sys.stderr)
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
