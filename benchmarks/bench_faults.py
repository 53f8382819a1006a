"""Goodput under faults: a real server under load whose ranks are killed again and again.

    python benchmarks/bench_faults.py [--ranks 4] [--streams 64] [--kills 20] [--signal KILL|STOP] [--all2all shm|gloo]
        [--spacing-ms N | --during load|repair|rebalance] [--spare-ranks N] [--model DIR] [--json]

Every stream asks for the same continuation again and again (half of them greedy, half with a seed), first without faults (its
first answer is what is expected, the next two give the goodput), then with. The streams begin one after another, so that not all
of their prompts come at once. A request fails when it ends with an error or without its end; it mismatches when its tokens are not those
of the run without faults. 503 with Retry-After (too few ranks are left to hold all experts) is tried again, as clients do.

When the next kill comes: 5 s after all ranks serve again; with --spacing-ms so many milliseconds after the last one; with --during
they come in pairs, the second one while the first rank loads again (load) or right after its loss is known, while the
others repair (repair); with --during rebalance, one at a time, while experts are being moved between ranks. The last rank that serves is never killed.

A gap is the time between two pieces of a stream. The pause of a stream at a kill is its longest gap of those that lie, at least in part,
between the kill and 5 s after all ranks serve again: so what the return of the rank costs counts too. p95_first_s and max_first_s are the same of
the waits of requests for their first piece: a request that comes in the middle of a step waits for the next one's end, a kill or not. The percentiles
are over all streams and kills. Without a kill there are gaps as well: without --json the longest ones of the run
without faults are printed. orphans: processes of the server that are left when it has ended.

--spare-ranks N: expert slots for the loss of N ranks at once (default: of one). overhead_pct: what surviving costs when nothing
fails; benchmarks/fault_overhead.py says what is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fault_overhead import measure as measure_overhead
from server_process import START_SECONDS, Server

from models.registry import read_config
from models.tiny import CHECKPOINT
from moesaic.http_client import Client, HttpError

RETURN_SECONDS = 180.0
MOVE_SECONDS = 10.0  # within which some expert is to be moved
BACK_SECONDS = 5.0  # for so long after all ranks serve again the pauses are still those of the kill
BEGIN_SECONDS = 5.0  # within which the streams begin
LOOK_SECONDS = 0.2  # how often the server is asked who serves, which takes time from it
# Moves by the operator's command only, few bytes per step, so that there is time for a kill.
BALANCE = {"window_size": 100, "reweight_interval": 5, "move_interval": 0, "move_budget_mib": 0.25}
BALANCING = ["--enable-eplb", "--eplb-config", json.dumps(BALANCE)]


def server_words(arguments: argparse.Namespace) -> list[str]:
    words = ["-dp", str(arguments.ranks), "--all2all-backend", arguments.all2all]
    words += ["--model", arguments.model] if arguments.model else []
    words += BALANCING if arguments.during == "rebalance" else []
    return words + spare_slots(arguments.ranks, arguments.spare_ranks, arguments.model) + arguments.options


def spare_slots(num_ranks: int, spare: int | None, model: str | None) -> list[str]:
    """The option that gives any num_ranks - spare ranks room for all experts."""
    if spare is None:
        return []
    num_experts = read_config(model or CHECKPOINT).num_experts
    slots = -(-num_experts // (num_ranks - spare))
    return ["--num-redundant-experts", str(slots * num_ranks - num_experts)]


@dataclass
class Load:
    """All streams. gaps: of each, (start, end) between two pieces of it; firsts: from its start to its first."""

    client: Client
    num_streams: int
    max_tokens: int
    in_words: bool = True  # the prompts; False: token ids
    expected: dict[int, list[int]] = field(default_factory=dict)
    num_requests: int = 0
    num_done: Counter[int] = field(default_factory=Counter)  # by stream
    num_tokens: int = 0
    num_refused: int = 0
    failures: list[str] = field(default_factory=list)
    mismatched: int = 0
    gaps: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    firsts: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    async def one(self, number: int) -> list[int]:
        payload: dict[str, Any] = {
            "prompt": f"{number} little foxes lived in a hollow tree, and" if self.in_words else [number + 5, 7, 11],
            "max_tokens": self.max_tokens,
            "temperature": 0.0 if number % 2 else 0.9,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        token_ids: list[int] = []
        reason = None
        found, last = self.firsts, time.monotonic()
        async with contextlib.aclosing(self.client.events("/v1/completions", payload)) as events:  # type: ignore[type-var]
            async for event in events:
                now = time.monotonic()
                found[number].append((last, now))
                found, last = self.gaps, now
                choice = event["choices"][0]
                new = choice.get("token_ids") or []
                token_ids += new
                self.num_tokens += len(new)
                reason = choice["finish_reason"]
        if reason != "length":
            raise RuntimeError(f"ended with {reason}")
        return token_ids

    async def worker(self, number: int, stopping: asyncio.Event) -> None:
        await asyncio.sleep(BEGIN_SECONDS * number / self.num_streams)
        while not stopping.is_set():
            self.num_requests += 1
            try:
                token_ids = await self.one(number)
            except HttpError as error:
                if error.status == 503 and "ranks serve" in str(error):
                    self.num_refused += 1
                    self.num_requests -= 1
                else:
                    self.failures.append(str(error))
                await asyncio.sleep(0.25)
            except Exception as error:
                self.failures.append(repr(error))
                await asyncio.sleep(0.25)
            else:
                self.num_done[number] += 1
                if self.expected.setdefault(number, token_ids) != token_ids:
                    self.mismatched += 1

    async def done(self, times: int) -> None:
        """Return when every stream has had so many answers more. RuntimeError when that takes too long, or one failed."""
        before = Counter(self.num_done)
        deadline = time.monotonic() + START_SECONDS
        while any(self.num_done[number] - before[number] < times for number in range(self.num_streams)):
            if self.failures or time.monotonic() > deadline:
                raise RuntimeError(f"not every stream was answered before the first kill: {self.failures[:3]}")
            await asyncio.sleep(LOOK_SECONDS)

    async def run(self, stopping: asyncio.Event) -> None:
        """All streams, until told to stop."""
        await asyncio.gather(*(self.worker(number, stopping) for number in range(self.num_streams)))

    def pauses(self, windows: Sequence[tuple[float, float]]) -> list[float]:
        """Seconds, ascending: of every stream that is open in it, its longest gap of each window (start, end)."""
        return _longest(self.gaps, windows)

    def waits(self, windows: Sequence[tuple[float, float]]) -> list[float]:
        """The same of waits for first pieces, where there are any."""
        return _longest(self.firsts, windows)


def _longest(of: Mapping[int, list[tuple[float, float]]], windows: Sequence[tuple[float, float]]) -> list[float]:
    found = []
    for gaps in of.values():
        for start, end in windows:
            inside = [after - before for before, after in gaps if before < end and after > start]
            found += [max(inside)] if inside else []
    return sorted(found)


class Goodput:
    """Tokens per second, from when this is made."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.began, self._tokens = time.monotonic(), load.num_tokens

    def now(self) -> float:
        return (self._load.num_tokens - self._tokens) / (time.monotonic() - self.began)


class Killer:
    """times: when each signal was sent. windows: from each of them to 5 s after all ranks served again."""

    def __init__(self, server: Server, arguments: argparse.Namespace) -> None:
        self.server = server
        self.arguments = arguments
        self.chance = random.Random(arguments.seed)
        self.times: list[float] = []
        self.windows: list[tuple[float, float]] = []
        self.num_moving = 0  # of those signals, how many came while experts were being moved
        self._number = signal.Signals[f"SIG{arguments.signal}"]
        self._gone: set[int] = set()

    async def run(self) -> None:
        arguments = self.arguments
        while len(self.times) < arguments.kills:
            if arguments.spacing_ms is not None:
                self.strike(await self.serving(2))
                await asyncio.sleep(arguments.spacing_ms / 1000)
                continue
            found = await self.all_serving()
            await asyncio.sleep(self.chance.uniform(0.0, 0.5))
            known = self.server.losses_known()
            if arguments.during == "rebalance":
                self.num_moving += await until_experts_move(self.server)
            first = self.strike(found)
            while arguments.together and (left := {rank: pid for rank, pid in found.items() if pid not in self._gone}):
                self.strike(left)
            if arguments.during in MOMENTS:
                await MOMENTS[arguments.during](self, first, known)
                self.strike({rank: pid for rank, pid in found.items() if rank != first})
        await self.all_serving()

    async def all_serving(self) -> dict[int, int]:
        """Process ids of all ranks, once all serve; 5 s later, when there was a kill before."""
        found = await self.serving(self.arguments.ranks)
        struck = self.times[len(self.windows) :]
        if struck:
            end = time.monotonic() + BACK_SECONDS
            self.windows += [(when, end) for when in struck]
            await asyncio.sleep(BACK_SECONDS)
        return found

    def strike(self, found: dict[int, int]) -> int:
        """One of these processes, by rank; which one it was."""
        victim = self.chance.choice(sorted(found))
        self._gone.add(found[victim])
        self.times.append(time.monotonic())
        os.kill(found[victim], self._number)
        return victim

    async def serving(self, needed: int) -> dict[int, int]:
        """Process ids of the ranks that serve, once so many do."""
        deadline = time.monotonic() + RETURN_SECONDS
        while len(found := await asyncio.to_thread(self._serving)) < needed:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only ranks {sorted(found)} serve {RETURN_SECONDS:.0f} s after a kill")
            await asyncio.sleep(LOOK_SECONDS)
        return found

    def _serving(self) -> dict[int, int]:
        """As far as the front and this side know."""
        with contextlib.suppress(urllib.error.URLError, OSError):
            pids, serving = self.server.ranks(), self.server.serving()
            return {rank: pids[rank] for rank in serving if rank in pids and pids[rank] not in self._gone}
        return {}

    def loads_again(self, rank: int) -> bool:
        pid = self.server.ranks().get(rank)
        return pid is not None and pid not in self._gone


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RETURN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing has happened for {RETURN_SECONDS:.0f} s after a kill")
        await asyncio.sleep(0.002)


async def until_experts_move(server: Server) -> bool:
    """False: nothing was to be moved."""
    deadline = time.monotonic() + MOVE_SECONDS
    await asyncio.to_thread(server.rebalance)
    while not await asyncio.to_thread(server.experts_moving):
        if time.monotonic() > deadline:
            return False
    return True


async def while_it_loads(killer: Killer, first: int, losses_known: int) -> None:
    await until(lambda: killer.loads_again(first))
    await asyncio.sleep(killer.chance.uniform(0.0, 0.5))


async def while_others_repair(killer: Killer, first: int, losses_known: int) -> None:
    await until(lambda: killer.server.losses_known() > losses_known)
    await asyncio.sleep(killer.chance.uniform(0.0, 0.02))


# --during: each returns when the second rank is to be killed, after `first`, when so many losses had been known before.
MOMENTS: dict[str, Callable[[Killer, int, int], Awaitable[None]]] = {
    "load": while_it_loads,
    "repair": while_others_repair,
}


async def measure(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    load = Load(Client(server.url), arguments.streams, arguments.max_tokens, in_words=not arguments.model)
    stopping = asyncio.Event()
    running = asyncio.create_task(load.run(stopping))
    killer = Killer(server, arguments)
    try:
        await load.done(1)  # what is expected; also warms everything up
        before = Goodput(load)
        await load.done(2)
        fault_free = before.now()
        undisturbed = load.pauses([(before.began, time.monotonic())])
        during = Goodput(load)
        await killer.run()
        goodput = during.now()
    finally:
        stopping.set()
        await running
    pauses, waits = load.pauses(killer.windows), load.waits(killer.windows)
    for failure in load.failures[:5]:
        print(f"failed: {failure}", file=sys.stderr)
    if not arguments.json:
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in server.recoveries().items())
        print(f"mean seconds of a recovery by phase, as the server counts: {phases}", file=sys.stderr)
        print(
            f"{fault_free:.0f} tokens/s without faults, {goodput:.0f} with; {load.num_refused} tries refused with 503; "
            f"the longest gap of a stream without faults: median {at(undisturbed, 0.5)} s, largest {at(undisturbed, 1.0)} s"
        )
    return {
        "requests": load.num_requests,
        "failed": len(load.failures),
        "mismatched": load.mismatched,
        "p50_pause_s": at(pauses, 0.5),
        "p95_pause_s": at(pauses, 0.95),
        "max_pause_s": at(pauses, 1.0),
        "p95_first_s": at(waits, 0.95),
        "max_first_s": at(waits, 1.0),
        "goodput_ratio": round(goodput / fault_free, 3),
        **({"kills_while_moving": killer.num_moving} if arguments.during == "rebalance" else {}),
    }


def at(ascending: Sequence[float], part: float) -> float | None:
    """What that part of the values does not exceed; None: there are none."""
    return round(ascending[min(len(ascending) - 1, int(len(ascending) * part))], 3) if ascending else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signal", choices=["KILL", "STOP"], default="KILL")
    parser.add_argument("--all2all", choices=["shm", "gloo"], default="shm")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--spacing-ms", type=int)
    when.add_argument("--during", choices=["rebalance", *sorted(MOMENTS)])
    parser.add_argument("--spare-ranks", type=int, help="expert slots for the loss of so many ranks at once")
    parser.add_argument("--together", action="store_true", help="each kill is one of all ranks at once")
    parser.add_argument("--model", help="a checkpoint's directory; default: the embedded model")
    parser.add_argument("--overhead-rounds", type=int, default=3, help="of the measurement of overhead_pct; 0: none")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="which ranks are killed, and when")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    parser.add_argument("options", nargs="*", help="more options of `moesaic serve`, after --")
    arguments = parser.parse_args()
    if arguments.during in MOMENTS and arguments.ranks < 3:
        parser.error("--during needs 3 ranks or more: two of them are killed")
    overhead = measure_overhead(arguments.overhead_rounds, 8, 2) if arguments.overhead_rounds else None
    server = Server(server_words(arguments))
    orphans = -1
    try:
        server.wait_ready()
        result = asyncio.run(measure(server, arguments))
    except BaseException:
        print((server.root / "log").read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        orphans = server.end()
    result["overhead_pct"] = None if overhead is None else overhead["overhead_pct"]
    result["orphans"] = orphans
    print(json.dumps(result))
    sys.exit(bool(result["failed"] or result["mismatched"] or orphans))


if __name__ == "__main__":
    main()
