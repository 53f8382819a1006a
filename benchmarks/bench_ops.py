"""Each operation beside the limit of the machine: `python benchmarks/bench_ops.py [--json] [--threads N] [--only TEXT]`.

The limit is the longer of two times: what must be read from memory at the speed at which memory was read, and the products at the
speed at which products were made, both probed in the same run (benchmarks/op_clock.py). Weights of several layers are taken in turn,
so that they come from memory, as in a model.

Columns: ms (fastest call), limit_ms, pct_of_limit, bound (what the limit is made of), gb_s, gflop_s, torch_ms (the reference path),
ratio (torch_ms / ms); with --isas the ms of lesser instruction sets. Products are probed on the widest units that rows of that kind
have: matrix tiles, where there are any.
With --threads 1 a call's time is that of its thread, so others on the machine disturb it less. Another operation: add a function
that returns a list of Op to BUILDERS.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from layer_ops import attention_ops, linear_ops, row_ops
from linear_ops import linear_attention_ops
from op_clock import Machine, Op, be_preferred, measure
from prompt_ops import prompt_ops, sampling_ops
from sparse_ops import sparse_ops
from window_ops import window_ops

from moe_kernels import TokenBatch, WeightFormat
from moe_kernels.packed import PackedExperts
from moe_kernels.weights import PlainExperts
from native import Isa, best_isa, choose, isa, measured

LAYERS = 2  # taken in turn
CHOICES = 16  # different routings, taken in turn


def experts_ops(tokens: Sequence[int]) -> list[Op]:
    """The fused experts of one layer: hidden 1024, width 384, 64 experts, 8 per token."""
    hidden, width, num_experts, top_k = 1024, 384, 64, 8
    ops = []
    torch.manual_seed(0)
    plain = [PlainExperts(num_experts, hidden, width, torch.bfloat16, torch.device("cpu")) for _ in range(LAYERS)]
    for layer in plain:
        for weights in (layer.gate_up_S2FD, layer.down_SDF):
            weights.normal_(0.0, 0.03)
    for form in WeightFormat:
        if form is WeightFormat.BF16:  # of rows of bfloat16 it is PLAIN
            continue
        packed = [PackedExperts(num_experts, hidden, width, torch.bfloat16, form) for _ in range(LAYERS)]
        for ours, theirs in zip(packed, plain, strict=True):
            for slot in range(num_experts):
                if form is WeightFormat.PLAIN or slot < 2:
                    ours.fill(slot, *theirs.read(slot))
                else:  # quantising takes long, and the numbers do not matter
                    ours.packed_SB[slot] = ours.packed_SB[slot % 2]
        for num_tokens in tokens:
            batches = []
            for _ in range(CHOICES):
                weight_TK, slot_TK = torch.randn(num_tokens, num_experts).softmax(-1).topk(top_k)
                x_TD = torch.randn(num_tokens, hidden).bfloat16()
                batches.append(TokenBatch(x_TD, slot_TK, weight_TK.contiguous(), 0, torch.bfloat16))
            active = sum(batch.slot_TK.unique().numel() for batch in batches) / CHOICES
            name = {"plain": "bf16"}.get(form.value, form.value)
            ops.append(
                Op(
                    f"experts {name}",
                    f"T={num_tokens} D={hidden} F={width} E={num_experts} K={top_k}",
                    active * packed[0].packed_SB.shape[1],
                    num_tokens * top_k * 3 * 2 * hidden * width,
                    lambda i, packed=packed, batches=batches: packed[i % LAYERS].run_tokens(batches[i % CHOICES]),  # type: ignore[misc]
                    lambda i, batches=batches: plain[i % LAYERS].run_tokens(batches[i % CHOICES]),  # type: ignore[misc]
                )
            )
    return ops


BUILDERS: dict[str, Callable[[Sequence[int]], list[Op]]] = {
    "experts": experts_ops,
    "linear": linear_ops,
    "attention": attention_ops,
    "rows": row_ops,
    "prompts": prompt_ops,
    "sampling": sampling_ops,
    "linear attention": linear_attention_ops,
    "sparse": sparse_ops,
    "window": window_ops,
}


def row(op: Op, machine: Machine, seconds: float, levels: Sequence[Isa]) -> dict[str, Any]:
    timed = measure(op, machine, seconds, levels)
    limit, bound = machine.limit(op)
    return {
        "op": op.name,
        "shape": op.shape,
        "threads": machine.threads,
        "ms": round(timed.seconds * 1e3, 4),
        "limit_ms": round(limit * 1e3, 4),
        "pct_of_limit": round(100 * limit / timed.seconds, 1),
        "bound": bound,
        "gb_s": round(op.bytes / timed.seconds / 1e9, 1),
        "gflop_s": round(op.flops / timed.seconds / 1e9, 1),
        "torch_ms": None if timed.reference_seconds is None else round(timed.reference_seconds * 1e3, 4),
        "ratio": None if timed.reference_seconds is None else round(timed.reference_seconds / timed.seconds, 2),
        "read_gb_s": round(machine.read / 1e9, 1),
        "peak_gflop_s": round(machine.products[op.pairs] / 1e9),
        "isa": isa().name.lower(),
        "isa_ms": {level.name.lower(): round(took * 1e3, 4) for level, took in timed.isa_seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument(
        "--only", default="", help="only this group of operations, or those whose name contains one of these, as a|b"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each operation")
    parser.add_argument("--no-torch", action="store_true", help="do not run the torch path")
    parser.add_argument(
        "--isas",
        nargs="+",
        default=[],
        choices=[level.name.lower() for level in Isa if Isa.NONE < level < best_isa()],
        help="these lesser instruction sets too, in turns",
    )
    parser.add_argument("--json", action="store_true", help="nothing but one JSON line per row")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the rows of gpu_ops.py")
    options = parser.parse_args()
    if options.device == "cuda":
        script = Path(__file__).with_name("gpu_ops.py")
        os.execv(sys.executable, [sys.executable, str(script), "--only", options.only, *["--json"] * options.json])
    levels = [Isa[name.upper()] for name in options.isas]
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    be_preferred()
    choose(measured(best_isa())[0])  # the ways that an engine takes here
    machine = Machine(options.threads)
    if not options.json:
        print(
            f"{'op':16} {'shape':34} {'ms':>8} {'% limit':>8} {'bound':9} {'GB/s':>6} {'GFLOP/s':>8} {'torch ms':>9} {'ratio':>6}"
        )
    group = BUILDERS.get(options.only)
    for build in BUILDERS.values() if group is None else [group]:
        for op in build(options.tokens):
            if group is None and not any(only in op.name for only in options.only.split("|")):
                continue
            got = row(replace(op, reference=None) if options.no_torch else op, machine, options.seconds, levels)
            if options.json:
                print(json.dumps(got), flush=True)
                continue
            print(
                f"{got['op']:16} {got['shape']:34} {got['ms']:8.3f} {got['pct_of_limit']:8.1f} {got['bound']:9} {got['gb_s']:6.1f} "
                f"{got['gflop_s']:8.1f} {got['torch_ms'] or '':>9} {got['ratio'] or '':>6}"
                + "".join(f" {name} {ms:.3f}" for name, ms in got["isa_ms"].items()),
                flush=True,
            )
    if not options.json:
        print(
            f"memory {machine.read / 1e9:.1f} GB/s, products {machine.products[True] / 1e9:.0f} GFLOP/s, {machine.threads} thread(s)"
        )


if __name__ == "__main__":
    main()
