"""Exchanges between the ranks of one machine: shared memory beside gloo, in one run.

    python benchmarks/bench_all_to_all.py [--json] [--ranks 2 4] [--hidden 1024] [--top-k 8]

Operations (all ranks do each at once; a figure is the best block's mean):
    agreement   all_gather_ints of 8 numbers, the step's record
    exchange    the rows of so many tokens to every other rank, and nothing else
    moe         AllToAll.dispatch, experts and combine, each waited for; the experts are real but only --width wide, so that
                sorting by slot and summing show; --isa none: the same in torch
bytes: what one rank sends to all others (moe: there and back). pct_of_memcpy: the time of copying those bytes within every
rank at once, over shm's; null where copying is not what takes the time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import multiprocessing.queues
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.process.malloc import tune_malloc
from ep.experts import Experts
from ep.protocol import Routing
from ep.table import make_groups, make_lanes
from ep.transport.group import GlooGroup, Group
from ep.transport.shm_group import ShmGroup
from native import Isa, limit_isa

SECONDS = 60.0  # the bound of every wait
SLOTS = 32  # of a rank
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 512, 2048], help="per rank")
    parser.add_argument("--moe-tokens", type=int, nargs="+", default=[8, 512], help="the same for moe")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--width", type=int, default=32, help="of the experts of moe")
    parser.add_argument("--isa", choices=[isa.name.lower() for isa in Isa], help="the most that the experts may use")
    parser.add_argument("--only", choices=("agreement", "exchange", "moe"), help="nothing but this operation")
    parser.add_argument("--block-ms", type=float, default=60.0, help="length of a block")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="nothing but one JSON line per row")
    options = parser.parse_args()
    if not options.json:
        print(f"{'op':18} {'ranks':>5} {'bytes':>9} {'gloo_us':>9} {'shm_us':>8} {'ratio':>6} {'% of memcpy':>11}")
    for size in options.ranks:
        for row in measure(size, options):
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                percent = "" if row["pct_of_memcpy"] is None else f"{row['pct_of_memcpy']:.0f}"
                print(
                    f"{row['op']:18} {row['ranks']:5} {row['bytes']:9} {row['gloo_us']:9.1f} {row['shm_us']:8.1f} "
                    f"{row['ratio']:6.1f} {percent:>11}"
                )


def measure(size: int, options: argparse.Namespace) -> list[Row]:
    context = mp.get_context("spawn")
    rows: multiprocessing.queues.Queue[list[Row]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (size, Path(folder), options, rows)
        processes = [context.Process(target=run_rank, args=(rank, *args), daemon=True) for rank in range(size)]
        for process in processes:
            process.start()
        result = rows.get(timeout=600)
        for process in processes:
            process.join(30)
            if process.exitcode != 0:
                sys.exit(f"a rank ended with {process.exitcode}")
    return result


@torch.inference_mode()
def run_rank(
    rank: int, size: int, folder: Path, options: argparse.Namespace, rows: multiprocessing.queues.Queue[list[Row]]
) -> None:
    torch.set_num_threads(1)
    tune_malloc()
    if options.isa is not None:
        limit_isa(Isa[options.isa.upper()])
    groups = {name: make_groups(name, folder, rank, size, SECONDS) for name in ("gloo", "shm")}
    meet = Meet(groups["shm"][0], options.block_ms / 1e3, options.blocks)
    result = []
    row_bytes = options.hidden * 2 + options.top_k * 12
    if options.only in (None, "agreement"):
        agree = {name: gather(group) for name, (group, _) in groups.items()}
        result.append(meet.row("agreement", (size - 1) * 64, agree, None))
    for tokens in options.tokens if options.only in (None, "exchange") else []:
        num_bytes = tokens * row_bytes
        raw = {name: exchange(group, num_bytes) for name, (_, group) in groups.items()}
        copies = memcpy((size - 1) * num_bytes)
        result.append(meet.row(f"exchange T={tokens}", (size - 1) * num_bytes, raw, copies))
    for tokens in options.moe_tokens if options.only in (None, "moe") else []:
        back = tokens * options.top_k * options.hidden * 2 * (size - 1) // size  # a row for each choice, evenly spread
        num_bytes = (size - 1) * tokens * row_bytes + back
        moe = {name: there_and_back(group, tokens, options) for name, (_, group) in groups.items()}
        result.append(meet.row(f"moe T={tokens}", num_bytes, moe, None))
    if rank == 0:
        rows.put(result)
    meet.together()
    for pair in groups.values():
        for group in pair:
            group.close()


class Meet:
    """Blocks of equally many calls on all ranks, the contestants in turn."""

    def __init__(self, group: Group, block_seconds: float, num_blocks: int) -> None:
        self._group = group
        self._block_seconds = block_seconds
        self._num_blocks = num_blocks

    def together(self) -> None:
        self._group.all_gather_ints([0]).wait()

    def row(self, op: str, num_bytes: int, acts: dict[str, Callable[[], None]], copy: Callable[[], None] | None) -> Row:
        contestants = acts if copy is None else {**acts, "memcpy": copy}
        calls = {name: self._calls(act) for name, act in contestants.items()}
        best = dict.fromkeys(contestants, float("inf"))
        for _ in range(self._num_blocks):
            for name, act in contestants.items():
                best[name] = min(best[name], self._block(act, calls[name]))
        return {
            "op": op,
            "ranks": self._group.size,
            "bytes": num_bytes,
            "gloo_us": round(best["gloo"] * 1e6, 1),
            "shm_us": round(best["shm"] * 1e6, 1),
            "ratio": round(best["gloo"] / best["shm"], 1),
            "pct_of_memcpy": None if copy is None else round(100 * best["memcpy"] / best["shm"]),
        }

    def _calls(self, act: Callable[[], None]) -> int:
        """How many calls make a block; the same on all ranks."""
        self._block(act, 3)
        mine = int(self._block_seconds / self._block(act, 5))
        return max(5, min(calls for (calls,) in self._group.all_gather_ints([mine]).wait()))

    def _block(self, act: Callable[[], None], calls: int) -> float:
        self.together()
        began = time.perf_counter()
        for _ in range(calls):
            act()
        self.together()
        return (time.perf_counter() - began) / calls


def gather(group: Group) -> Callable[[], None]:
    record = [1 << 40, 2, 3, 4, 5, 6, 7, 8]
    return lambda: (group.all_gather_ints(record).wait(), None)[1]


def exchange(group: Group, num_bytes: int) -> Callable[[], None]:
    size, rank = group.size, group.rank
    source = torch.ones(num_bytes, dtype=torch.uint8)
    if isinstance(group, GlooGroup):
        rows = source.repeat(size - 1)
        out = torch.empty_like(rows)
        splits = [num_bytes] * size
        splits[rank] = 0
        return lambda: group.all_to_all(out, rows, splits, splits).wait()
    assert isinstance(group, ShmGroup)
    heap, signals = group.heap, group.signals
    word = signals.reserve()
    # Two rooms per sender: while a rank still reads one, its peers may be writing the other, but are not a step further.
    offset = heap.reserve(2 * size * num_bytes)
    peers = [peer for peer in range(size) if peer != rank]
    rooms = [
        {peer: heap.window(peer, offset + (half * size + rank) * num_bytes, num_bytes) for peer in peers}
        for half in range(2)
    ]
    step = 0

    def act() -> None:
        nonlocal step
        step += 1
        for peer, room in rooms[step % 2].items():
            room.copy_(source)
            signals.send(peer, word, step)
        signals.wait(word, peers, step)

    return act


def memcpy(num_bytes: int) -> Callable[[], None]:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    return lambda: (target.copy_(source), None)[1]


def there_and_back(group: Group, tokens: int, options: argparse.Namespace) -> Callable[[], None]:
    lane = make_lanes("auto", group, SLOTS, options.hidden, torch.bfloat16)[0]
    generator = torch.Generator().manual_seed(group.rank)
    x_TD = torch.randn(tokens, options.hidden, generator=generator).bfloat16()
    scores = torch.rand(tokens, group.size * SLOTS, generator=generator)
    routing = Routing(scores.topk(options.top_k).indices, torch.rand(tokens, options.top_k, generator=generator))
    out_TD = torch.empty_like(x_TD)
    experts = Experts(SLOTS, options.hidden, options.width, torch.bfloat16)
    wide_FD, down_DF = (
        torch.full((options.width, options.hidden), 0.01),
        torch.full((options.hidden, options.width), 0.01),
    )
    for slot in range(SLOTS):
        experts.fill_slot(slot, wide_FD, wide_FD, down_DF)

    def act() -> None:
        arrived = lane.dispatch(x_TD, routing).wait()
        lane.combine(experts(arrived.batch), arrived.ticket, out_TD).wait()

    return act


if __name__ == "__main__":
    main()
