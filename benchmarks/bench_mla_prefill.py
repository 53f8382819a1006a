"""Measures the crossover of MLA prefill: naive against absorbed, over context and query lengths.

Prints one JSON line per case, and as the last line the constant that mla/plan.py uses (ABSORBED_COST): the time of one
floating-point operation done the absorbed way over that of one done the naive way (median over the cases).

    python benchmarks/bench_mla_prefill.py [--threads 2] [--dtype bfloat16] [--heads 16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from layers.step import StepInput
from mla.attention import TorchMla
from mla.plan import prefill_flops
from mla.protocol import MlaShape, PrefillMode

BLOCK_SIZE = 16
CASES = ((64, 0), (256, 0), (1024, 0), (16, 512), (64, 512), (256, 512), (16, 2048), (64, 2048), (256, 2048))
REPEATS = 5


def one_sequence(num_queries: int, num_keys: int) -> StepInput:
    blocks = torch.arange(-(-num_keys // BLOCK_SIZE))
    slots = torch.arange(num_keys - num_queries, num_keys)
    return StepInput(
        token_ids_T=torch.zeros(num_queries, dtype=torch.int64),
        positions_T=slots,
        slots_T=slots,
        query_starts=(0, num_queries),
        kv_lens=(num_keys,),
        kv_lens_B=torch.tensor([num_keys]),
        block_table_BN=blocks[None],
        num_decodes=0,
        block_size=BLOCK_SIZE,
        logits_rows_P=torch.tensor([num_queries - 1]),
    )


def best_seconds(call: Callable[[], Tensor]) -> float:
    call()
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure(shape: MlaShape, dtype: torch.dtype, num_queries: int, context: int) -> dict[str, float]:
    num_keys = num_queries + context
    step = one_sequence(num_queries, num_keys)
    cache = torch.randn(-(-num_keys // BLOCK_SIZE) * BLOCK_SIZE, shape.cache_dim).to(dtype)
    q_nope = torch.randn(num_queries, shape.num_heads, shape.qk_nope_head_dim).to(dtype)
    q_pe = torch.randn(num_queries, shape.num_heads, shape.qk_rope_head_dim).to(dtype)
    w_uk = torch.randn(shape.num_heads, shape.qk_nope_head_dim, shape.latent_dim).to(dtype)
    w_uv = torch.randn(shape.num_heads, shape.v_head_dim, shape.latent_dim).to(dtype)

    def seconds(prefill: PrefillMode) -> float:
        prepared = TorchMla(shape, shape.key_dim**-0.5, prefill, dtype).prepare(step)
        return best_seconds(lambda: prepared(q_nope, q_pe, cache, w_uk, w_uv))

    naive, absorbed = seconds("naive"), seconds("absorbed")
    flops = prefill_flops(shape, num_queries, num_keys)
    return {
        "queries": num_queries,
        "context": context,
        "naive_ms": round(naive * 1e3, 3),
        "absorbed_ms": round(absorbed * 1e3, 3),
        "ratio": round(absorbed / naive, 3),
        "flop_ratio": round(flops.absorbed / flops.naive, 3),
        "naive_gflops": round(flops.naive / naive / 1e9, 1),
        "absorbed_gflops": round(flops.absorbed / absorbed / 1e9, 1),
        "cost": round(absorbed / flops.absorbed * flops.naive / naive, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = MlaShape(args.heads, qk_nope_head_dim=128, qk_rope_head_dim=64, latent_dim=512, v_head_dim=128)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[args.dtype]
    rows = []
    with torch.inference_mode():
        for num_queries, context in CASES:
            rows.append(measure(shape, dtype, num_queries, context))
            print(json.dumps({"op": "mla_prefill", "heads": args.heads, "dtype": args.dtype, **rows[-1]}), flush=True)
    chosen = sum(min(row["naive_ms"], row["absorbed_ms"]) for row in rows)
    cost = statistics.median(row["cost"] for row in rows)
    print(
        json.dumps({"op": "mla_prefill", "threads": args.threads, "absorbed_cost": cost, "best_ms": round(chosen, 3)})
    )


if __name__ == "__main__":
    main()
