"""Our fused experts beside zentorch's, the ones that vLLM's fastest CPU form runs: same shapes, same number of threads, in turns.

    python benchmarks/bench_duel.py --vllm-python PATH [--tokens T ...] [--repeats N] [--json]

PATH: the Python of a virtual environment with vLLM and zentorch (docs/benchmarks.md says how to make one). Each side is a process of
its own; a turn is a quarter of a second of calls, over weights of several layers, so that they come from memory. One line per number of
tokens: milliseconds of each (the median over turns of the median call), `ratio` (the median over pairs of turns; above 1 we are better),
its range, and the memory bandwidth seen between turns. Weights of bfloat16: hidden 1024, width 384, 64 experts, 8 per token.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 1024, 384, 64, 8
LAYERS = 5  # taken in turn
CHOICES = 5  # different routings, taken in turn
TURN_SECONDS, PAUSE_SECONDS = 0.25, 0.02

Call = Callable[[int, Any], object]  # number of the layer, (x, expert, weight)


def ours() -> Call:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from moe_kernels import TokenBatch, WeightFormat
    from moe_kernels.packed import PackedExperts

    matrices = [
        torch.randn(shape).mul_(0.03).bfloat16() for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    ]
    layers = []
    for _ in range(LAYERS):
        layers.append(PackedExperts(NUM_EXPERTS, HIDDEN, WIDTH, torch.bfloat16, WeightFormat.PLAIN))
        for slot in range(NUM_EXPERTS):
            layers[-1].fill(slot, *matrices)

    def call(layer: int, given: Any) -> object:
        x_TD, expert_TK, weight_TK = given
        return layers[layer].run_tokens(TokenBatch(x_TD, expert_TK, weight_TK, 0, torch.bfloat16))

    return call


def zentorch() -> Call:
    import torch

    importlib.import_module("zentorch")  # registers its operations

    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN).mul_(0.03).bfloat16()
    down = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH).mul_(0.03).bfloat16()
    layers = [(gate_up.clone(), down.clone()) for _ in range(LAYERS)]

    def call(layer: int, given: Any) -> object:
        x_TD, expert_TK, weight_TK = given
        y_TD = torch.empty_like(x_TD)
        torch.ops.zentorch.zentorch_fused_moe(
            y_TD, x_TD, *layers[layer], None, None, weight_TK, expert_TK, False, "silu"
        )
        return y_TD

    return call


def serve(side: str, threads: int) -> None:
    """Answers every {"tokens": T} with a turn's {"median": seconds, "least": seconds}; the first line says that it is ready."""
    import torch

    out = sys.stdout
    sys.stdout = sys.stderr  # whatever libraries print must not get between the answers
    with contextlib.suppress(OSError):
        os.nice(-15)  # a call that is interrupted says nothing
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    call = ours() if side == "ours" else zentorch()
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        num_tokens = json.loads(line)["tokens"]
        given = []
        for _ in range(CHOICES):
            weight_TK, expert_TK = torch.randn(num_tokens, NUM_EXPERTS).softmax(-1).topk(TOP_K)
            expert_TK = expert_TK if side == "ours" else expert_TK.int()
            given.append((torch.randn(num_tokens, HIDDEN).bfloat16(), expert_TK, weight_TK.contiguous()))
        call(0, given[0])
        seconds: list[float] = []
        stop = time.perf_counter() + TURN_SECONDS
        while len(seconds) < 6 or time.perf_counter() < stop:
            began = time.perf_counter()
            call(len(seconds) % LAYERS, given[len(seconds) % CHOICES])
            seconds.append(time.perf_counter() - began)
        print(json.dumps({"median": statistics.median(seconds), "least": min(seconds)}), file=out, flush=True)


def duel(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from engines import Engine
    from quiet import Bandwidth

    environment = {"OMP_NUM_THREADS": str(arguments.threads), "KMP_BLOCKTIME": "1"}  # no spinning into the other's turn
    options = ["--threads", str(arguments.threads)]
    pythons = {"ours": sys.executable, "zentorch": arguments.vllm_python}
    sides = {name: Engine(name, "", options, python, __file__, environment) for name, python in pythons.items()}
    bandwidth = Bandwidth()
    turns: dict[tuple[str, int], list[dict[str, float]]] = {}
    read: dict[int, list[float]] = {tokens: [] for tokens in arguments.tokens}
    for repeat in range(arguments.repeats):
        for tokens in arguments.tokens:
            read[tokens].append(bandwidth.now())
            for name in sorted(sides, reverse=bool(repeat % 2)):
                turns.setdefault((name, tokens), []).append(sides[name].run({"tokens": tokens}))
                time.sleep(PAUSE_SECONDS)
    for side in sides.values():
        side.close()
    return [row(turns["ours", tokens], turns["zentorch", tokens], tokens, read[tokens]) for tokens in arguments.tokens]


def row(own: list[dict[str, float]], peer: list[dict[str, float]], tokens: int, read: list[float]) -> dict[str, Any]:
    ratios = [theirs["median"] / ours["median"] for ours, theirs in zip(own, peer, strict=True)]
    return {
        "op": "experts bf16",
        "tokens": tokens,
        "ours_ms": round(statistics.median(turn["median"] for turn in own) * 1e3, 3),
        "peer_ms": round(statistics.median(turn["median"] for turn in peer) * 1e3, 3),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "ours_least_ms": round(min(turn["least"] for turn in own) * 1e3, 3),
        "peer_least_ms": round(min(turn["least"] for turn in peer) * 1e3, 3),
        "read_gb_s": round(statistics.median(read), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", nargs="?", choices=["ours", "zentorch"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)  # what benchmarks/engines.py passes to every process
    parser.add_argument("--vllm-python", metavar="PATH")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="nothing but one JSON line per row")
    arguments = parser.parse_args()
    if arguments.side:
        serve(arguments.side, arguments.threads)
        return
    if not arguments.vllm_python:
        parser.error("--vllm-python is needed: the Python of a virtual environment with zentorch")
    rows = duel(arguments)
    if not arguments.json:
        print(f"{'T':>5} {'ours ms':>8} {'peer ms':>8} {'ratio':>6} {'range':>12} {'read GB/s':>10}")
    for got in rows:
        low, high = got["ratio_range"]
        text = f"{got['tokens']:5} {got['ours_ms']:8.3f} {got['peer_ms']:8.3f} {got['ratio']:6.2f} {low:5.2f}-{high:.2f} {got['read_gb_s']:10.1f}"
        print(json.dumps(got) if arguments.json else text)


if __name__ == "__main__":
    main()
