"""Decode steps that run eager beside the same ones replayed from a CPU's graph (engine/capture.py), in turn.

    python benchmarks/bench_tapes.py [--model DIR] [--streams 1,8,32] [--context 128] [--threads N] [--json]

A row: streams, eager_ms and replayed_ms (medians of a forward pass, without the head), ratio (eager / replayed), and
layout_ms (the median of laying out what both read). Without --model a tiny one is made, of which nearly all is Python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from make_models import make
from torch import Tensor

from cache.memory import CacheMemory
from cache.spec import CacheSizes
from dbo.steps import drain
from engine.capture import Capture, GraphPolicy
from engine.prepared import PreparedStep
from engine.schedule import NewRow, Schedule
from engine.step_buffers import StepBuffers
from engine.step_memory import Limits
from ep.backends.local import LocalAllToAll
from ep.parallel import Parallel
from eplb.placement import linear_placement
from front.params import SamplingParams
from layers.weights import Checkpoint
from models.base import CausalLM
from models.registry import build, read_config
from native.tape import CpuGraphs

BLOCK_SIZE = 16
REPEATS = 40


def load(path: Path) -> CausalLM:
    facts = read_config(path)
    placement = linear_placement(facts.num_moe_layers, facts.num_experts, 1) if facts.num_experts else None
    parallel = Parallel(0, 1, placement, lambda num_slots, _: [LocalAllToAll(num_slots)])
    model = build(facts, parallel, torch.bfloat16, torch.device("cpu"))
    checkpoint = Checkpoint(path)
    model.load(checkpoint)
    return model


def prompts(num_streams: int, context: int) -> Schedule:
    """So many sequences of `context` tokens each, of which all but the last are in the cache already."""
    blocks_each = -(-(context + REPEATS + 4) // BLOCK_SIZE)
    schedule = Schedule(0)
    for row in range(num_streams):
        schedule.new_rows.append(NewRow(row, row, [row + 1] * context, context, SamplingParams(), 1, ()))
        schedule.new_blocks.append((row, [list(range(row * blocks_each, (row + 1) * blocks_each))]))
    return decodes(schedule, num_streams, context - 1)


def decodes(schedule: Schedule, num_streams: int, position: int) -> Schedule:
    schedule.rows, schedule.starts = list(range(num_streams)), [position] * num_streams
    schedule.counts, schedule.samples = [1] * num_streams, [True] * num_streams
    return schedule


def compare(model: CausalLM, num_streams: int, context: int) -> dict[str, float]:
    context = max(1, context - REPEATS // 2)  # they grow by a token with every turn
    longest = context + REPEATS + 4
    sizes = CacheSizes(BLOCK_SIZE, num_streams * -(-longest // BLOCK_SIZE))
    kv = CacheMemory.allocate(model.cache_spec(), sizes, torch.device("cpu"))
    buffers = StepBuffers(Limits(num_streams, num_streams, longest, BLOCK_SIZE), torch.device("cpu"))
    policy = GraphPolicy(exact=num_streams)
    capture = Capture(lambda step, breaks, lane: model.steps(step, kv, lane, breaks), CpuGraphs(), policy, buffers)
    capture.capture()
    seconds: dict[str, list[float]] = {"eager": [], "replayed": [], "layout": []}
    ways: dict[str, Callable[[PreparedStep], Tensor]] = {
        "eager": lambda step: drain(model.steps(step.inputs[0], kv)),
        "replayed": lambda step: drain(capture.steps(step)),
    }
    schedule = prompts(num_streams, context)
    for turn in range(REPEATS + 3):
        began = time.perf_counter()
        step = buffers.fill(schedule, choose=capture.choose)
        seconds["layout"].append(time.perf_counter() - began)
        for name, run in ways.items():
            began = time.perf_counter()
            run(step)
            if turn >= 3:
                seconds[name].append(time.perf_counter() - began)
        buffers.write_tokens(step, torch.randint(model.config.vocab_size, (num_streams,)))
        schedule = decodes(Schedule(turn + 1), num_streams, context + turn)
    if capture.refused:
        raise SystemExit(f"nothing was captured: {capture.refused[num_streams]}")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "streams": num_streams,
        "eager_ms": round(middle["eager"] * 1e3, 3),
        "replayed_ms": round(middle["replayed"] * 1e3, 3),
        "ratio": round(middle["eager"] / middle["replayed"], 3),
        "layout_ms": round(middle["layout"] * 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--context", type=int, default=128, help="tokens of each sequence, on the average")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="a JSON line per row")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        model = load(arguments.model or make("tiny-qwen3moe", Path(scratch)))
        for streams in map(int, arguments.streams.split(",")):
            row = compare(model, streams, arguments.context)
            print(json.dumps(row) if arguments.json else "  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
