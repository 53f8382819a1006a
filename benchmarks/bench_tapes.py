"""Decode steps as they are written beside the same ones played from a tape (engine/tapes.py), in turn.

    python benchmarks/bench_tapes.py [--model DIR] [--streams 1,8,32] [--context 128] [--threads N] [--json]

A row: streams, written_ms and played_ms (medians of a forward pass, without the head), ratio (written / played). Without --model a
tiny one is made, of which nearly all is Python.
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
from engine.tapes import Tapes
from ep.backends.local import LocalAllToAll
from ep.parallel import Parallel
from eplb.placement import linear_placement
from layers.step import StepInput
from layers.weights import Checkpoint
from models.base import CausalLM
from models.registry import build, read_config

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


def decodes(num_streams: int, context: int, vocab_size: int) -> StepInput:
    """One token for each of so many sequences, of `context` tokens each, in a cache of which nobody else has a block."""
    blocks_each = -(-context // BLOCK_SIZE)
    table_BN = torch.arange(num_streams * blocks_each).view(num_streams, blocks_each)
    last = context - 1
    return StepInput(
        token_ids_T=torch.randint(vocab_size, (num_streams,)),
        positions_T=torch.full((num_streams,), last),
        slots_T=table_BN[:, -1] * BLOCK_SIZE + last % BLOCK_SIZE,
        query_starts=tuple(range(num_streams + 1)),
        kv_lens=(context,) * num_streams,
        kv_lens_B=torch.full((num_streams,), context),
        block_table_BN=table_BN,
        num_decodes=num_streams,
        block_size=BLOCK_SIZE,
        logits_rows_P=torch.arange(num_streams),
    )


def compare(model: CausalLM, num_streams: int, context: int) -> dict[str, float]:
    blocks_each = -(-context // BLOCK_SIZE)
    kv = CacheMemory.allocate(
        model.cache_spec(), CacheSizes(BLOCK_SIZE, num_streams * blocks_each), torch.device("cpu")
    )
    tapes = Tapes(lambda step, breaks, lane: model.steps(step, kv, lane, breaks), num_streams, blocks_each, BLOCK_SIZE)
    tapes.capture()
    seconds: dict[str, list[float]] = {"written": [], "played": []}
    ways: dict[str, Callable[[StepInput], Tensor]] = {
        "written": lambda step: drain(model.steps(step, kv)),
        "played": lambda step: drain(tapes.steps(step)),
    }
    for turn in range(REPEATS + 3):
        step = decodes(num_streams, context, model.config.vocab_size)
        for name, run in ways.items():
            began = time.perf_counter()
            run(step)
            if turn >= 3:
                seconds[name].append(time.perf_counter() - began)
    if tapes.refused():
        raise SystemExit(f"nothing was recorded: {tapes.refused()[num_streams]}")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "streams": num_streams,
        "written_ms": round(middle["written"] * 1e3, 3),
        "played_ms": round(middle["played"] * 1e3, 3),
        "ratio": round(middle["written"] / middle["played"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--context", type=int, default=128, help="tokens of each sequence")
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
