"""The machine's store of weights: starts without and with packed weights on disk, memory, and ranks that come back under load.

    python benchmarks/bench_store.py [--model DIR] [--ranks 1,2,4] [--streams 16] [--kills 10] [--json] [-- more options of `moesaic serve`]

One row for each number of ranks. cold_s: until the server is ready with an empty cache of packed weights, in a directory that this script
makes and removes (whether the checkpoint is in the system's page cache is the caller's business); warm_s: the same once the weights have been
written there and lie in the page cache. pss_mb: memory of all processes of the server together (proportional set size, /proc/PID/smaps_rollup), under load; standby_mb: of those
that wait to become ranks.
return_s: from a kill until all ranks serve again, the mean. p95_gap_s and max_gap_s: of each stream the longest gap around each kill
(bench_faults.py says how), and quiet_gap_s 95 % of those of five seconds before the first kill; p95_first_s and max_first_s: of waits for first pieces. With one rank every kill is the loss of all ranks. failed and mismatched: requests, compared with the same ones
before the first kill, which comes when a process waits for each rank. --together: every kill is one of all ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_faults import BACK_SECONDS, Killer, Load, at
from server_process import Server, command_line

from moesaic.http_client import Client
from store.pages import brought_in

WRITTEN_SECONDS = 600.0
COUNTED_SECONDS = 2.0  # after pss_bytes: a process that is asked for its own stands still until the kernel has counted
MEGA = 10**6


def pss_bytes(server: Server) -> int:
    """Of the supervisor, the front and the ranks."""
    server.ranks()
    return sum(map(pss_of, {server.process.pid, *server.seen}))


def pss_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 0


def started(words: list[str]) -> tuple[Server, float]:
    """A server that is ready, and the seconds that it took."""
    began = time.monotonic()
    server = Server(words)
    try:
        server.wait_ready()
    except BaseException:
        server.end()
        raise
    return server, time.monotonic() - began


def wait_written(cache: Path) -> bool:
    """False: the cache does not take it."""
    deadline = time.monotonic() + WRITTEN_SECONDS
    while not list(cache.glob("*.weights")):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def in_page_cache(cache: Path) -> Iterator[None]:
    """What was written stays there for a block, in the large pages of a file that a server has written; a copy, or a
    reader before, may have left small ones."""
    with contextlib.ExitStack() as stack:
        for path in cache.glob("*.weights"):
            file = stack.enter_context(path.open("rb"))
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            stack.enter_context(brought_in(file.fileno()))
        yield


async def under_load(server: Server, arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    load = Load(Client(server.url), arguments.streams, arguments.max_tokens, in_words=not arguments.model)
    stopping = asyncio.Event()
    running = asyncio.create_task(load.run(stopping))
    killer = Killer(server, argparse.Namespace(**{**vars(arguments), "ranks": ranks}))
    try:
        await load.done(1)
        await asyncio.to_thread(server.wait_standby, ranks)
        pss = pss_bytes(server)
        waiting = [pid for pid in server.seen if "engine.process.standby_process" in command_line(pid)]
        standby = sum(map(pss_of, waiting))
        await asyncio.sleep(COUNTED_SECONDS)
        quiet = time.monotonic(), time.monotonic() + BACK_SECONDS
        await asyncio.sleep(BACK_SECONDS)
        await killer.run()
        await asyncio.sleep(BACK_SECONDS)
    finally:
        stopping.set()
        await running
    for failure in load.failures[:5]:
        print(f"failed: {failure}", file=sys.stderr)
    gaps, waits = load.pauses(killer.windows), load.waits(killer.windows)
    returns = [end - BACK_SECONDS - when for when, end in killer.windows]
    return {
        "pss_mb": round(pss / MEGA),
        "standby_mb": round(standby / MEGA),
        "return_s": round(sum(returns) / len(returns), 2) if returns else None,
        "quiet_gap_s": at(load.pauses([quiet]), 0.95),
        "p95_gap_s": at(gaps, 0.95),
        "max_gap_s": at(gaps, 1.0),
        "p95_first_s": at(waits, 0.95),
        "max_first_s": at(waits, 1.0),
        "failed": len(load.failures),
        "mismatched": load.mismatched,
    }


def measure(arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    cache = arguments.cache or Path(tempfile.mkdtemp(prefix="bench-store-", dir=arguments.cache_root))
    words = ["-dp", str(ranks), "--weight-cache", str(cache), *arguments.options]
    words += ["--model", arguments.model] if arguments.model else []
    try:
        cold, written = None, True
        if not arguments.cache:
            server, seconds = started(words)
            cold, written = round(seconds, 2), wait_written(cache)
            server.end()
        with in_page_cache(cache):
            server, warm = started(words)
        try:
            found = asyncio.run(under_load(server, arguments, ranks))
        finally:
            orphans = server.end()
    finally:
        if not arguments.cache:
            shutil.rmtree(cache)
    row = {"ranks": ranks, "cold_s": cold, "warm_s": round(warm, 2) if written else None, **found}
    return {**row, "orphans": orphans}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's directory; default: the embedded model")
    parser.add_argument("--ranks", default="1,2,4", help="numbers with commas between them")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="which ranks are killed, and when")
    parser.add_argument("--cache-root", type=Path, help="where the cache is made; default: the temporary directory")
    parser.add_argument("--cache", type=Path, help="that has the packed weights already: no cold start")
    parser.add_argument("--together", action="store_true", help="each kill is one of all ranks at once")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON lines")
    parser.add_argument("options", nargs="*", help="more options of `moesaic serve`, after --")
    parser.set_defaults(signal="KILL", spacing_ms=None, during=None)
    arguments = parser.parse_args()
    bad = False
    for ranks in [int(word) for word in arguments.ranks.split(",")]:
        row = measure(arguments, ranks)
        bad |= bool(row["failed"] or row["mismatched"] or row["orphans"])
        print(json.dumps(row), flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
