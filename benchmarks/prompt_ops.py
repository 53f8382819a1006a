"""What bench_ops.py measures of prompts and of sampling: attention of a prompt's tokens, and tokens drawn from logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from layer_ops import BLOCK_SIZE, in_torch
from op_clock import Op

from engine.sampling.sampler import sample
from engine.sampling.sampling_table import SamplingTable
from engine.schedule import NewRow
from front.params import SamplingParams
from layers.attention import AttentionPlan, HeadCounts, paged_attention
from layers.step import StepInput
from mla.attention import TorchMla
from mla.protocol import MlaShape

PROMPTS = ((1, 0, 1024), (1, 3072, 1024), (32, 0, 128))  # sequences, tokens before, tokens of each
VOCABULARIES = (32000, 151936)
ROWS = (1, 32, 128)
SAMPLINGS = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5},
}


def _prompts(num_sequences: int, context: int, num_queries: int) -> StepInput:
    length = context + num_queries
    blocks_each = -(-length // BLOCK_SIZE)
    table = torch.randperm(num_sequences * blocks_each).view(num_sequences, blocks_each)
    lens, none = torch.full((num_sequences,), length), torch.zeros(num_sequences * num_queries, dtype=torch.int64)
    starts = tuple(range(0, num_sequences * num_queries + 1, num_queries))
    return StepInput(none, none, none, starts, (length,) * num_sequences, lens, table, 0, BLOCK_SIZE, none)


def prompt_ops(_: Sequence[int]) -> list[Op]:
    """16 query heads over 4 key heads of 64, over 8 of 128; and MLA of 16 heads, 128 + 64 wide, values 128, latents 512."""
    ops = []
    shape = MlaShape(16, 128, 64, 512, 128)
    w_uk, w_uv = (torch.randn(16, 128, 512).bfloat16() * 0.05 for _ in range(2))
    for num_sequences, context, num_queries in PROMPTS:
        step = _prompts(num_sequences, context, num_queries)
        size = step.block_table_BN.numel() * BLOCK_SIZE
        tokens, pairs = step.num_tokens, num_sequences * num_queries * (context + (num_queries + 1) / 2)
        name = f"B={num_sequences} ctx={context} T={num_queries}"
        for heads in (HeadCounts(16, 4, 64), HeadCounts(16, 8, 128)):
            kv = [torch.randn(size, heads.num_kv_heads, heads.head_dim).bfloat16() for _ in range(2)]
            q = torch.randn(tokens, heads.num_heads, heads.head_dim).bfloat16()
            plan = AttentionPlan(step, heads, torch.bfloat16)
            slow = in_torch(lambda step=step, heads=heads: AttentionPlan(step, heads, torch.bfloat16))
            ops.append(
                Op(
                    "prompt attention", f"{name} H=16/{heads.num_kv_heads} D={heads.head_dim}", 4.0 * kv[0].numel(),
                    4.0 * pairs * heads.num_heads * heads.head_dim,
                    lambda _, a=(q, *kv, plan): paged_attention(*a, 0.1),  # type: ignore[misc]
                    lambda _, a=(q, *kv, slow): paged_attention(*a, 0.1),  # type: ignore[misc]
                )
            )  # fmt: skip
        latent = torch.randn(size, shape.cache_dim).bfloat16()
        q_THK = torch.randn(tokens, 16, shape.key_dim).bfloat16()
        q_nope, q_pe = q_THK[..., : shape.qk_nope_head_dim], q_THK[..., shape.qk_nope_head_dim :]
        backend = TorchMla(shape, 0.1, "naive", torch.bfloat16)
        ours, theirs = backend.prepare(step), in_torch(lambda backend=backend, step=step: backend.prepare(step))
        built = sum(step.kv_lens) * 16 * 2.0 * shape.latent_dim * (shape.qk_nope_head_dim + shape.v_head_dim)
        ops.append(
            Op(
                "prompt mla", f"{name} H=16 naive", 2.0 * latent.numel() + 4.0 * w_uk.numel(),
                built + 2.0 * pairs * 16 * (shape.key_dim + shape.v_head_dim),
                lambda _, a=(q_nope, q_pe, latent, w_uk, w_uv), run=ours: run(*a),  # type: ignore[misc]
                lambda _, a=(q_nope, q_pe, latent, w_uk, w_uv), run=theirs: run(*a),  # type: ignore[misc]
            )
        )  # fmt: skip
    return ops


def sampling_ops(_: Sequence[int]) -> list[Op]:
    """Random logits, some far above the rest as a model's are. The limit is one reading of the logits."""
    ops = []
    for vocab_size in VOCABULARIES:
        for num_rows in ROWS:
            logits_PV = (torch.randn(num_rows, vocab_size) * 3).bfloat16()
            for name, params in SAMPLINGS.items():
                table = SamplingTable(num_rows, vocab_size)
                for row in range(num_rows):
                    history = torch.randint(vocab_size, (200,)).tolist()
                    table.set(row, NewRow(row, row, history, 100, SamplingParams(**params), row, (0,)))
                batch = table.gather(list(range(num_rows)), [200] * num_rows)
                ops.append(
                    Op(
                        "sampling", f"{name} P={num_rows} V={vocab_size}", 2.0 * logits_PV.numel(), logits_PV.numel(),
                        lambda _, x=logits_PV, b=batch: sample(x, b),  # type: ignore[misc]
                        lambda _, x=logits_PV, b=batch: in_torch(lambda: sample(x, b)),  # type: ignore[misc]
                        False,
                    )
                )  # fmt: skip
    return ops
