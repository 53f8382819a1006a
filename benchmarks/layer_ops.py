"""What bench_ops.py measures around the experts: linear layers, the head, attention over the paged cache, small operations.

Weights and caches of several layers are taken in turn, so that they come from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from op_clock import Op
from torch import Tensor

from layers.attention import AttentionPlan, HeadCounts, paged_attention
from layers.greedy import greedy
from layers.step import StepInput
from mla.attention import TorchMla
from mla.protocol import MlaShape
from moe_kernels.matrix import HALVES, SCALE_ROWS, WeightFormat, quantize, quantize_halves
from native import Isa, isa, limit_isa, routing, rows
from native.linear import best_output, linear
from native.packed_linear import PackedLinear

FAR = 96 << 20  # bytes taken in turn: more than the caches hold
BLOCK_SIZE = 16
FORMS = ("bf16", "int8", "int4", "mxfp4")
CONTEXTS = ((1, 256), (1, 4096), (32, 192), (128, 64))  # sequences, tokens of each


def in_torch(make: Callable[[], Any]) -> Any:
    """What `make` returns where no native kernel runs."""
    before = isa()
    limit_isa(Isa.NONE)
    made = make()
    limit_isa(before)
    return made


def pack(weights: Sequence[Tensor], form: str) -> list[PackedLinear]:
    """As many layers of this form; of fewer bits all are the first one's, in memory of their own."""
    if form == "bf16":
        return [PackedLinear(weight) for weight in weights]
    kind = WeightFormat(form)
    if kind in HALVES:
        halves = quantize_halves(weights[0], kind)
        first = PackedLinear(halves.codes, halves.words, form=kind, num_inputs=halves.shape[1])
    else:
        scaled = quantize(weights[0], kind)
        first = PackedLinear(scaled.weight_OI, scaled.scale, SCALE_ROWS[kind])
    return [PackedLinear.over(first.packed_B.clone(), kind, *weights[0].shape) for _ in weights]


def linear_ops(tokens: Sequence[int]) -> list[Op]:
    """Projections of the size of a small model's, as they lie and packed, and its head with and without argmax."""
    ops = []
    for num_inputs, num_outputs in ((1024, 1536), (2048, 1024), (1024, 32000)):
        size = 2 * num_inputs * num_outputs
        weights = [torch.randn(num_outputs, num_inputs).bfloat16() for _ in range(-(-FAR // size))]
        num = len(weights)
        packed = {form: pack(weights, form) for form in FORMS} if num_outputs <= 8192 else {}
        for rows_now in tokens:
            x = torch.randn(rows_now, num_inputs).bfloat16()
            shape, flops = f"T={rows_now} I={num_inputs} O={num_outputs}", rows_now * size
            ops.append(
                Op(
                    "linear", shape, size, flops,
                    lambda i, x=x, w=weights, n=num: linear(x, w[i % n]),  # type: ignore[misc]
                    lambda i, x=x, w=weights, n=num: F.linear(x, w[i % n]),  # type: ignore[misc]
                )
            )  # fmt: skip
            if packed:
                for form, layers in packed.items():
                    ops.append(
                        Op(
                            f"packed linear {form}", shape, layers[0].packed_B.numel(), flops,
                            lambda i, x=x, w=layers, n=num: w[i % n](x),  # type: ignore[misc]
                            lambda i, x=x, w=weights, n=num: F.linear(x, w[i % n]),  # type: ignore[misc]
                        )
                    )  # fmt: skip
            else:
                ops.append(
                    Op(
                        "head and argmax", shape, size, flops,
                        lambda i, x=x, w=weights, n=num: best_output(x, w[i % n]),  # type: ignore[misc]
                        lambda i, x=x, w=weights, n=num: greedy(F.linear(x, w[i % n])),  # type: ignore[misc]
                    )
                )  # fmt: skip
    return ops


def decode_step(num_sequences: int, length: int) -> StepInput:
    blocks_each = -(-length // BLOCK_SIZE)
    table = torch.randperm(num_sequences * blocks_each).view(num_sequences, blocks_each)
    lens, none = torch.full((num_sequences,), length), torch.zeros(num_sequences, dtype=torch.int64)
    return StepInput(
        none, none, none, tuple(range(num_sequences + 1)), (length,) * num_sequences, lens, table, num_sequences,
        BLOCK_SIZE, none,
    )  # fmt: skip


def decode_caches(step: StepInput, width: int, per_layer: int) -> list[list[Tensor]]:
    """Of as many layers as it takes to be far."""
    size = step.block_table_BN.numel() * BLOCK_SIZE
    layers = max(2, -(-FAR // (size * width * 2 * per_layer)))
    return [[torch.randn(size, width).bfloat16() for _ in range(per_layer)] for _ in range(min(layers, 64))]


def attention_ops(_: Sequence[int]) -> list[Op]:
    """Decodes: 16 query heads over 4 key heads of 64, over 8 of 128; and MLA of 16 heads, 512 + 64 wide."""
    ops, shape = [], MlaShape(16, 128, 64, 512, 128)
    w_uk, w_uv = (torch.randn(16, 128, 512).bfloat16() * 0.05 for _ in range(2))
    for num_sequences, length in CONTEXTS:
        step = decode_step(num_sequences, length)
        name, keys = f"B={num_sequences} L={length}", num_sequences * length
        for heads in (HeadCounts(16, 4, 64), HeadCounts(16, 8, 128)):
            num_kv, dim = heads.num_kv_heads, heads.head_dim
            kv = [[c.view(-1, num_kv, dim) for c in layer] for layer in decode_caches(step, num_kv * dim, 2)]
            q = torch.randn(num_sequences, 16, dim).bfloat16()
            plan = AttentionPlan(step, heads, torch.bfloat16)
            slow = in_torch(lambda step=step, heads=heads: AttentionPlan(step, heads, torch.bfloat16))
            ops.append(
                Op(
                    "attention", f"{name} H=16/{num_kv} D={dim}", keys * num_kv * dim * 2 * 2, keys * 16 * dim * 4,
                    lambda i, q=q, kv=kv, plan=plan: paged_attention(q, *kv[i % len(kv)], plan, 0.1),  # type: ignore[misc]
                    lambda i, q=q, kv=kv, plan=slow: paged_attention(q, *kv[i % len(kv)], plan, 0.1),  # type: ignore[misc]
                )
            )  # fmt: skip
        latents = [layer[0] for layer in decode_caches(step, 576, 1)]
        q_nope, q_pe = torch.randn(num_sequences, 16, 128).bfloat16(), torch.randn(num_sequences, 16, 64).bfloat16()
        backend = TorchMla(shape, 0.1, "auto", torch.bfloat16)
        ours, theirs = backend.prepare(step), in_torch(lambda backend=backend, step=step: backend.prepare(step))
        ops.append(
            Op(
                "mla", f"{name} H=16 C=512 P=64", keys * 576 * 2 + 4 * w_uk.numel(),
                keys * 16 * 2 * (576 + 512) + num_sequences * 4 * w_uk.numel(),
                lambda i, a=(q_nope, q_pe), c=latents, run=ours: run(*a, c[i % len(c)], w_uk, w_uv),  # type: ignore[misc]
                lambda i, a=(q_nope, q_pe), c=latents, run=theirs: run(*a, c[i % len(c)], w_uk, w_uv),  # type: ignore[misc]
            )
        )  # fmt: skip
    return [*ops, *verification_ops()]


def verification_ops() -> list[Op]:
    """MLA as above of a token and three drafts of each sequence; the other way: four times one row of each."""
    ops, shape = [], MlaShape(16, 128, 64, 512, 128)
    w_uk, w_uv = (torch.randn(16, 128, 512).bfloat16() * 0.05 for _ in range(2))
    backend = TorchMla(shape, 0.1, "auto", torch.bfloat16)
    for num_sequences, length in CONTEXTS:
        one, keys, rows = decode_step(num_sequences, length), num_sequences * length, 4 * num_sequences
        lens = (one.kv_lens_B[:, None] - torch.arange(3, -1, -1)).flatten()
        four = replace(
            one, query_starts=tuple(range(rows + 1)), kv_lens=tuple(lens.tolist()), kv_lens_B=lens, num_decodes=rows,
            block_table_BN=one.block_table_BN.repeat_interleave(4, 0),
        )  # fmt: skip
        latents = [layer[0] for layer in decode_caches(one, 576, 1)]
        q_nope, q_pe = torch.randn(rows, 16, 128).bfloat16(), torch.randn(rows, 16, 64).bfloat16()
        ours, alone = backend.prepare(four), backend.prepare(one)

        def each(i: int, a: tuple[Tensor, ...] = (q_nope, q_pe), c: list[Tensor] = latents, run: Any = alone) -> None:
            for r in range(4):
                run(*(part[r::4].contiguous() for part in a), c[i % len(c)], w_uk, w_uv)

        ops.append(
            Op(
                "mla of 3 drafts", f"B={num_sequences} L={length} H=16 C=512 P=64", keys * 576 * 2 + 4 * w_uk.numel(),
                4 * keys * 16 * 2 * (576 + 512) + rows * 4 * w_uk.numel(),
                lambda i, a=(q_nope, q_pe), c=latents, run=ours: run(*a, c[i % len(c)], w_uk, w_uv),  # type: ignore[misc]
                each,
            )
        )  # fmt: skip
    return ops


def row_ops(tokens: Sequence[int]) -> list[Op]:
    """One pass each instead of several operations; the data is near, so the limit is not memory's."""
    ops = []
    for num_tokens in tokens:
        x, residual, weight = torch.randn(num_tokens, 1024), torch.randn(num_tokens, 1024), torch.ones(1024).bfloat16()
        x, residual, logits = x.bfloat16(), residual.bfloat16(), torch.randn(num_tokens, 64).bfloat16()
        ops += [
            Op(
                "add and norm", f"T={num_tokens} D=1024", x.numel() * 8, x.numel() * 5,
                lambda _, a=(x, residual, weight): rows.add_rms_norm(*a, 1e-6),  # type: ignore[misc]
                lambda _, x=x, r=residual, w=weight: F.rms_norm(r.add_(x), (1024,), None, 1e-6).mul_(w),  # type: ignore[misc]
            ),
            Op(
                "top-k", f"T={num_tokens} E=64 K=8", logits.numel() * 2, logits.numel() * 8,
                lambda _, x=logits: routing.softmax_topk(x, 8, True),  # type: ignore[misc]
                lambda _, x=logits: x.topk(8)[0].softmax(-1, dtype=torch.float32),  # type: ignore[misc]
            ),
        ]  # fmt: skip
    return ops
