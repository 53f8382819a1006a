"""What balancing costs a step, and a rebalance of a running server under load (for bench_eplb.py).

counting: one process, 32 sequences of the embedded model; blocks of steps without counting, with it, and with a
recording as well follow each other, so that all meet the same noise; CPU time of the thread. What the leading rank does
beside the steps (on a thread of its own) is in the block here, so the figures are upper bounds.
server: a server of several ranks that balances all the while: recording on and off in turns. Tokens per second, and CPU
seconds of all its ranks per token, which other work on the machine disturbs less.
live: a server without balancing says what is expected; one that balances only when told to gets the same load, is told
to take a full plan in the middle of it, and goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_faults import Goodput, Load
from server_process import Server
from torch import nn

from configs.engine import EngineConfig
from engine.build import build_rank
from engine.plan import make_plan
from ep.moe import MoE
from eplb.load import ExpertLoad, RowLoad
from eplb.offline.trace import TraceMeta, header_line, record_line
from front.messages import AddRequest
from front.params import SamplingParams
from moesaic.http_client import Client

KEY = "bench"
WINDOW = 100  # steps
GATHER = 5  # steps between gatherings, the default of reweight_interval
WAYS = ("off", "counted", "recorded")
SEQUENCES, STEPS_AHEAD = 32, 900
PHASE_SECONDS = 1.5
WAIT_SECONDS = 120.0


# ---- the cost of counting and of recording -------------------------------------------------------------------


def counting(blocks: int, directory: Path) -> dict[str, Any]:
    """Percent of step time; each block is `GATHER` steps. alone: what is done once per block, timed by itself."""
    # Eager, as steps are whose experts are balanced: their layers show what they route.
    plan = make_plan(EngineConfig(dtype="float32", max_num_seqs=SEQUENCES, max_model_len=1024, cudagraph_mode="none"))
    rank = build_rank(plan)
    model = rank._team._model
    assert isinstance(model, nn.Module)
    moes = [module for module in model.modules() if isinstance(module, MoE)]
    load, rows = ExpertLoad(len(moes), plan.num_experts), RowLoad(len(moes))
    params = SamplingParams(max_tokens=STEPS_AHEAD, temperature=0.0, ignore_eos=True)
    for number in range(SEQUENCES):
        prompt = list(range(5 + number, 13 + number))
        rank.submit(AddRequest(request_id=number, token_ids=prompt, prompt_len=len(prompt), params=params, seed=0))
    rank.step()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    gather: list[float] = []
    write: list[float] = []
    with (directory / "counting.jsonl").open("wb") as file:
        file.write(header_line(TraceMeta(), len(moes), plan.num_experts))
        for block in range(min(blocks * len(WAYS), STEPS_AHEAD // GATHER - 2)):
            way = (WAYS + WAYS[::-1])[block % (2 * len(WAYS))]  # to and fro: steps get slower as sequences grow
            for layer, moe in enumerate(moes):
                moe.load = None if way == "off" else load.recorder(layer)
                moe.arrivals = None if way == "off" else rows.recorder(layer)
            began = time.thread_time()
            for _ in range(GATHER):
                rank.step()
                rows.end_step(way != "off")
            if way != "off":
                stepped = time.thread_time()
                rows.take()
                counts_LE = load.window()
                load.reset()
                counted = time.thread_time()
                gather.append(counted - stepped)
                if way == "recorded":
                    file.write(record_line(block, GATHER, GATHER * SEQUENCES, counts_LE))
                    write.append(time.thread_time() - counted)
            seconds[way].append(time.thread_time() - began)
    middle = {way: statistics.median(values) for way, values in seconds.items()}
    return {
        "step_ms": round(middle["off"] / GATHER * 1e3, 3),
        "counting_pct": _excess(seconds["counted"], seconds["off"]),
        "recording_pct": _excess(seconds["recorded"], seconds["counted"]),
        "gather_alone_pct": round(statistics.median(gather) / middle["off"] * 100, 3),
        "write_alone_pct": round(statistics.median(write) / middle["off"] * 100, 3),
    }


def _excess(with_it: list[float], without: list[float]) -> float:
    """Percent; the median of the ratios of pairs of blocks, of which one came before and one after the other way's."""
    pairs = range(0, min(len(with_it), len(without)) - 1, 2)
    ratios = [sum(with_it[i : i + 2]) / sum(without[i : i + 2]) for i in pairs]
    return round((statistics.median(ratios) - 1) * 100, 2)


def writing(directory: Path) -> float:
    """Microseconds per step for a record of DeepSeek-V3's 58 layers of 256 experts every `GATHER` steps."""
    counts_LE = np.random.default_rng(0).integers(0, 2000, (58, 256))
    with (directory / "writing.jsonl").open("wb") as file:
        seconds = []
        for step in range(50):
            began = time.perf_counter()
            file.write(record_line(step, GATHER, 1000, counts_LE))
            seconds.append(time.perf_counter() - began)
    return round(statistics.median(seconds) / GATHER * 1e6, 1)


async def recording(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        result: dict[str, Any] = {"one_rank": counting(4 * arguments.repeats, directory)}
        result["write_dsv3_us_per_step"] = writing(directory)
        server = _server(arguments, {}, ["--eplb-record-dir", scratch])
        try:
            server.wait_ready()
            result["server"] = await _in_turns(server, arguments)
        finally:
            server.end()
    return result


async def _in_turns(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """Recording on and off under the same load, in pairs; the median of their ratios."""
    admin = Client(server.url, KEY)
    load = Load(Client(server.url), arguments.streams, 128)
    await one_round(load)
    stopping = asyncio.Event()
    running = asyncio.create_task(load.run(stopping))
    pids = list(server.ranks().values())
    rates, costs = [], []
    for pair in range(arguments.repeats // 2):
        rate: dict[bool, float] = {}
        cost: dict[bool, float] = {}
        for on in (True, False) if pair % 2 else (False, True):
            await admin.post("/eplb/record", {"path": f"load-{pair}.jsonl" if on else None})
            began, used, tokens = time.monotonic(), cpu_seconds(pids), load.num_tokens
            await asyncio.sleep(PHASE_SECONDS)
            came = load.num_tokens - tokens
            rate[on] = came / (time.monotonic() - began)
            cost[on] = (cpu_seconds(pids) - used) / came
        rates.append(rate[True] / rate[False])
        costs.append(cost[True] / cost[False])
    await admin.post("/eplb/record", {"path": None})
    stopping.set()
    await running
    return {
        "tokens_per_s_recorded": _spread(rates),
        "cpu_per_token_recorded": _spread(costs),
        "failed": len(load.failures),
        "mismatched": load.mismatched,
    }


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _spread(ratios: list[float]) -> dict[str, float]:
    """Of with : without."""
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"ratio": round(middle, 4), "lower_quartile": round(low, 4), "upper_quartile": round(high, 4)}


# ---- a rebalance under load ----------------------------------------------------------------------------------


def _server(arguments: argparse.Namespace, eplb: dict[str, Any] | None, options: list[str]) -> Server:
    """eplb None: without a balancer."""
    more = ["--dtype", "float32", *options]
    if eplb is not None:
        more += ["--enable-eplb", "--eplb-config", json.dumps(eplb), "--admin-api-key", KEY]
    return Server(["-dp", str(arguments.ranks), "--all2all-backend", arguments.all2all, *more])


async def live(arguments: argparse.Namespace) -> dict[str, Any]:
    reference = _server(arguments, None, [])
    load = Load(Client(reference.url), arguments.streams, 128)
    try:
        reference.wait_ready()
        await one_round(load)
        goodput = Goodput(load)
        await one_round(load)
        without = goodput.now()
    finally:
        reference.end()
    load.gaps.clear()
    load.num_requests = 0
    server = _server(arguments, {"window_size": WINDOW, "reweight_interval": 0, "move_interval": 0}, [])
    orphans = -1
    try:
        server.wait_ready()
        load.client = Client(server.url)
        result = await _rebalance(load, Client(server.url, KEY))
    finally:
        orphans = server.end()
    for failure in load.failures[:5]:
        print(f"failed: {failure}")
    return {
        "requests": load.num_requests,
        "failed": len(load.failures),
        "mismatched": load.mismatched,
        "orphans": orphans,
        **result,
        "tokens_per_s_without": round(without, 1),
    }


async def one_round(load: Load) -> None:
    """Until every stream has had an answer more."""
    stopping = asyncio.Event()
    running = asyncio.create_task(load.run(stopping))
    try:
        await load.done(1)
    finally:
        stopping.set()
        await running


def silences_of(load: Load) -> list[tuple[float, float]]:
    """(start, end) between two pieces that follow each other, whatever streams they are of."""
    return list(itertools.pairwise(sorted(end for gaps in load.gaps.values() for _, end in gaps)))


async def _rebalance(load: Load, admin: Client) -> dict[str, Any]:
    stopping = asyncio.Event()
    running = asyncio.create_task(load.run(stopping))
    try:
        await _until(admin, lambda status: status["steps"] >= 2 * WINDOW)
        started = time.monotonic()
        before = await admin.get("/eplb/status")
        told = time.monotonic()
        answer = await admin.post("/eplb/rebalance", {})
        after_move = await _until(admin, lambda status: status["moving"] == 0 and status["moves"] >= answer["moves"])
        done = time.monotonic()
        end = after_move["steps"] + 2 * WINDOW
        after = await _until(admin, lambda status: status["steps"] >= end)
        silences = silences_of(load)
        rate_before = sum(start < told for start, _ in silences) / (told - silences[0][0])
        ended = time.monotonic()
        rate_after = sum(start >= done for start, _ in silences) / (ended - done)
    finally:
        stopping.set()
        await running
    usual = [end - start for start, end in silences if end < started]
    moving = [end - start for start, end in silences if start < done and end >= told]
    return {
        "balance_before": _mean(before["window_balance"]),
        "balance_after": _mean(after["window_balance"]),
        "step_balance_before": _mean(before["step_balance"]),
        "step_balance_after": _mean(after["step_balance"]),
        "bound_after": _mean(after["lower_bound"]),
        "moves": after["moves"],
        "bytes_moved": after["bytes_moved"],
        "rebalance_s": round(done - told, 3),
        "longest_pause_ms": round(max(moving) * 1e3, 1),
        "longest_pause_before_ms": round(max(usual) * 1e3, 1),
        "p99_gap_before_ms": round(statistics.quantiles(usual, n=100)[-1] * 1e3, 1),
        "events_per_s_before": round(rate_before, 1),
        "events_per_s_after": round(rate_after, 1),
        "failures_of_balancer": after["failures"],
    }


async def _until(admin: Client, reached: Any) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_SECONDS
    while not reached(status := await admin.get("/eplb/status")):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {WAIT_SECONDS:.0f} s: {status}")
        await asyncio.sleep(0.05)
    return dict(status)


def _mean(per_layer: list[float]) -> float:
    return round(statistics.fmean(per_layer), 4)
