"""A head that ranks share (ep/vocab_parallel.py) beside one that each has for itself.

    python benchmarks/bench_head.py [--ranks 2,4] [--mib 8,16,32,64,600] [--rows 1,4] [--hidden 2048] [--rounds 9] [--json]

Rows {"ranks", "mib", "rows", "own_ms", "shared_ms", "ratio"}: the head's weights in bfloat16, packed, in memory that all ranks map; rows of each
rank. Ranks are processes of one thread. Milliseconds from when the first rank begins until the last one has its logits, the median of the rounds,
both in turns; before each of them every rank reads --between MiB of other memory, as a step's experts are read between two heads. ratio: own / shared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from ep.transport.shm_group import shm_group
from ep.vocab_parallel import VocabParallel
from layers.head import LMHead

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SECONDS = 60.0
MEBI = 1 << 20
Span = tuple[float, float]  # when a rank began, and when it was done


def head_of(vocab_size: int, hidden: int) -> LMHead:
    """Its weights lie in memory that forked processes share."""
    with torch.inference_mode():
        head = LMHead(hidden, vocab_size, None, BF16, CPU)
        head.weight.data = torch.randn(head.weight.shape).bfloat16().share_memory_()  # type: ignore[no-untyped-call]
        if head.can_pack:
            head.pack(head.weight)
    return head


def be_rank(
    pipe: Connection,
    there: Barrier,
    place: Path,
    rank: int,
    ranks: int,
    head: LMHead,
    vocab_size: int,
    arguments: argparse.Namespace,
) -> None:
    """Sends for each number of rows the spans of its own heads and of shared ones."""
    torch.set_num_threads(1)
    group = shm_group(place, rank, ranks, SECONDS, "head")
    vocab = VocabParallel(group, arguments.hidden, vocab_size, BF16)
    between = torch.ones(max(1, arguments.between * MEBI // 8), dtype=torch.int64)

    def timed(act: Callable[[], object]) -> Span:
        between.sum()
        there.wait(SECONDS)
        began = time.monotonic()
        act()
        return began, time.monotonic()

    with torch.inference_mode():
        for rows in arguments.rows:
            hidden_PD = torch.randn(rows, arguments.hidden).bfloat16()
            spans: tuple[list[Span], list[Span]] = [], []
            for _ in range(arguments.rounds):
                spans[0].append(timed(lambda hidden_PD=hidden_PD: head(hidden_PD)))  # type: ignore[misc]
                spans[1].append(timed(lambda hidden_PD=hidden_PD: vocab.logits(hidden_PD, head.part)))  # type: ignore[misc]
            pipe.send(spans)
    group.close()


def measure(ranks: int, mib: int, arguments: argparse.Namespace) -> None:
    vocab_size, context = mib * MEBI // (2 * arguments.hidden), mp.get_context("fork")
    head, there = head_of(vocab_size, arguments.hidden), context.Barrier(ranks)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            words = (theirs, there, Path(folder), rank, ranks, head, vocab_size, arguments)
            processes.append(context.Process(target=be_rank, args=words, daemon=True))
            processes[-1].start()
            pipes.append(ours)
        for rows in arguments.rows:
            found = [pipe.recv() if pipe.poll(SECONDS) else _late(rank) for rank, pipe in enumerate(pipes)]
            own, shared = (milliseconds([spans[which] for spans in found]) for which in (0, 1))
            row = {"ranks": ranks, "mib": mib, "rows": rows, "own_ms": round(own, 3), "shared_ms": round(shared, 3)}
            print(json.dumps({**row, "ratio": round(own / shared, 3)}), flush=True)
        for process in processes:
            process.join(SECONDS)


def _late(rank: int) -> tuple[list[Span], list[Span]]:
    raise TimeoutError(f"rank {rank} has not replied within {SECONDS:g} s")


def milliseconds(spans: list[list[Span]]) -> float:
    """spans: of each rank those of its rounds."""
    rounds = zip(*spans, strict=True)
    return 1e3 * float(
        statistics.median(max(end for _, end in ends) - min(begin for begin, _ in ends) for ends in rounds)
    )


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[2, 4], help="numbers with commas between them")
    parser.add_argument("--mib", type=numbers, default=[8, 16, 32, 64, 600], help="of the head's weights")
    parser.add_argument("--rows", type=numbers, default=[1, 4], help="of each rank")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--between", type=int, default=320, help="MiB of other memory that a rank reads in between")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="which is all that there is")
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        for mib in arguments.mib:
            measure(ranks, mib, arguments)


if __name__ == "__main__":
    main()
