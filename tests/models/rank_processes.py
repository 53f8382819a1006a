"""Ranks in processes of their own, joined by gloo. Does not import transformers: each process imports this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from drive import generate_on_ranks, load_ours, parallel_of
from forked import forked_with_torch
from gloo_groups import gloo_group

TIMEOUT = 60.0

Prompts = list[list[int]]


def generate_in_processes(path: Path, store: Path, prompts: list[Prompts], count: int) -> list[list[list[int]]]:
    """The next `count` tokens of each prompt of each rank. `store`: a file that does not exist yet."""
    context = forked_with_torch()
    results = context.Queue()
    size = len(prompts)
    processes = [
        context.Process(target=_rank, args=(path, str(store), rank, size, own, count, results))
        for rank, own in enumerate(prompts)
    ]
    for process in processes:
        process.start()
    try:
        of_rank = dict(results.get(timeout=2 * TIMEOUT) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    return [of_rank[rank] for rank in range(size)]


def _rank(path: Path, store: str, rank: int, size: int, prompts: Prompts, count: int, results: Any) -> None:
    torch.set_num_threads(1)
    group = gloo_group(store, rank, size, TIMEOUT, "model")
    model = load_ours(path, parallel_of(path, group, "gloo"))
    [tokens] = generate_on_ranks([model], [prompts], count)
    group.all_gather_ints([rank]).wait()  # nobody leaves while another may still need it
    results.put((rank, tokens))
    group.close()
