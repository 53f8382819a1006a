"""What gpu_ops.py times and tune_triton.py tunes: the Triton kernels on shapes of published models.

A case says what must be read and multiplied, so that a time can be set against the machine's limits. `run` takes a configuration,
or None for the one that the engine would take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layers.attention import HeadCounts
from layers.step import StepInput
from layers.triton import attention as triton_attention
from layers.triton import heads as triton_heads
from layers.triton import norm as triton_norm
from layers.triton import sampling as triton_sampling
from layers.triton import silu_mul as triton_silu_mul
from layers.triton.attention import TritonAttentionPlan
from layers.triton.configs import AttentionConfig
from layers.triton.device import chip_of
from mla import latent_fp8
from mla.triton import cache as triton_cache
from mla.triton.configs import DecodeConfig, PrefillConfig
from mla.triton.decode import decode
from mla.triton.prefill import PrefillPlan
from moe_kernels.layout import ExpertBatch, Layout
from moe_kernels.quant import num_blocks
from moe_kernels.triton import fp8_experts as fp8
from moe_kernels.triton import grouped_gemm as gemm
from moe_kernels.triton import permute as triton_permute
from moe_kernels.triton import quant as triton_quant
from moe_kernels.triton import topk as triton_topk
from moe_kernels.triton.configs import GemmConfig, choose

BLOCK_SIZE = 64
BF16, F8, F32, I64 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64


@dataclass(frozen=True)
class Shape:
    """A model's: experts of one rank (slots) of all (experts); kv_heads 0: latent attention."""

    name: str
    hidden: int
    width: int
    slots: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


MODELS = {
    "deepseek-v3": Shape("deepseek-v3", 7168, 2048, 32, 256, 8, 128, 0, 128, 129280),
    "qwen3-30b-a3b": Shape("qwen3-30b-a3b", 2048, 768, 128, 128, 8, 32, 4, 128, 151936),
}
TOKENS = (1, 16, 64, 512, 4096)  # that meet the experts of a rank
DECODES = ((1, 4096), (32, 4096), (128, 4096), (8, 32768))  # sequences, tokens of each
PROMPTS = ((1, 2048, 2048), (1, 2048, 16384))  # sequences, queries and tokens of each


@dataclass(frozen=True)
class Case:
    """kernel: the table that a configuration belongs to, "" if there is none; sizes: where in the table. kind: of products."""

    op: str
    shape: str
    bytes: float
    flops: float
    run: Callable[[Any], object]
    kind: str = "bf16"
    kernel: str = ""
    sizes: tuple[int, ...] = ()
    candidates: tuple[Any, ...] = ()


def randn(*shape: int, device: torch.device, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=device, dtype=F32 if dtype == F8 else dtype).mul_(scale).to(dtype)


def _weights(slots: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Filled slot by slot: FP8 has no random numbers of its own."""
    made = torch.empty(slots, outputs, inputs, dtype=dtype, device=device)
    one = randn(outputs, inputs, device=device, dtype=dtype, scale=inputs**-0.5)
    for slot in range(slots):
        made[slot].copy_(one)
    return made


def gemm_candidates(is_fp8: bool, two_products: bool, rows_per_slot: int) -> tuple[GemmConfig, ...]:
    found = []
    heights = [16, 32, 64] if rows_per_slot <= 32 else [64, 128]
    for m in heights:
        for n in (128,) if is_fp8 else (64, 128, 256):
            for k in (128,) if is_fp8 else (64, 128):
                for warps in (4, 8):
                    for stages in (3, 4):
                        shared = stages * k * (m + n * (2 if two_products else 1)) * (1 if is_fp8 else 2)
                        accumulators = m * n * (2 if two_products else 1) // (warps * 32)
                        if shared <= 220 * 1024 and accumulators <= 160:
                            found += [GemmConfig(m, n, k, warps, stages, tma=tma) for tma in (0, 1)]
    return tuple(found)


def expert_cases(
    shape: Shape, device: torch.device, tokens: Sequence[int] = TOKENS, forms: Sequence[bool] = (False, True)
) -> Iterator[Case]:
    """The two products of the experts, in 16 bits and (forms: True) in 8: rows in equal parts to random slots."""
    s, d, f = shape.slots, shape.hidden, shape.width
    for is_fp8 in forms:
        dtype, itemsize, name = (F8, 1, "fp8") if is_fp8 else (BF16, 2, "bf16")
        gate_up, down = _weights(s, 2 * f, d, dtype, device), _weights(s, d, f, dtype, device)
        up_scale = torch.ones(s, 2 * num_blocks(f), num_blocks(d), device=device)
        down_scale = torch.ones(s, num_blocks(d), num_blocks(f), device=device)
        for num_tokens in tokens:
            rows = max(1, num_tokens * shape.top_k * s // shape.experts)
            slot_R = torch.randint(s, (rows,), generator=torch.Generator().manual_seed(rows))
            rows_S = torch.bincount(slot_R, minlength=s).to(torch.int32)
            active, counts = int((rows_S > 0).sum()), rows_S.to(device)
            per_slot = -(-rows // s)
            x, mid = (ExpertBatch(Layout.RAGGED, randn(rows, w, device=device), counts) for w in (d, f))
            if is_fp8:
                x, mid = (
                    ExpertBatch(b.layout, v, counts, q)
                    for b, (v, q) in ((b, triton_quant.quantize_rows(b.x)) for b in (x, mid))
                )
            label = f"{shape.name} T={num_tokens} R={rows} S={s}"
            in_out = rows * (d + f) * itemsize

            def first(config: Any, x: ExpertBatch = x, is_fp8: bool = is_fp8, w: Any = (gate_up, up_scale)) -> object:
                return fp8.multiply_gate_up_fp8(x, *w, config) if is_fp8 else gemm.multiply_gate_up(x, w[0], config)

            def second(config: Any, x: ExpertBatch = mid, is_fp8: bool = is_fp8, w: Any = (down, down_scale)) -> object:
                return (
                    fp8.multiply_down_fp8(x, *w, None, config) if is_fp8 else gemm.multiply_down(x, w[0], None, config)
                )

            kernel = "_fp8" if is_fp8 else ""
            yield Case(
                f"experts gate_up {name}", label, active * 2 * f * d * itemsize + in_out, rows * 4 * f * d, first, name,
                f"gate_up{kernel}", (d, f, per_slot), gemm_candidates(is_fp8, True, per_slot),
            )  # fmt: skip
            yield Case(
                f"experts down {name}", label, active * f * d * itemsize + in_out, rows * 2 * f * d, second, name,
                f"down{kernel}", (f, d, per_slot), gemm_candidates(is_fp8, False, per_slot),
            )  # fmt: skip
        del gate_up, down


def padded_cases(
    shape: Shape,
    device: torch.device,
    slots: int,
    places: int,
    rows: Sequence[int],
    forms: Sequence[bool] = (True, False),
) -> Iterator[Case]:
    """The same products where every slot has many places and few rows (low-latency exchanges): as they are cut, by the places, and
    as they would be by the rows. slots: of one rank; rows: of each slot on average, of so many places."""
    d, f = shape.hidden, shape.width
    chip = chip_of(device)
    for is_fp8 in forms:
        dtype, itemsize, name = (F8, 1, "fp8") if is_fp8 else (BF16, 2, "bf16")
        gate_up, down = _weights(slots, 2 * f, d, dtype, device), _weights(slots, d, f, dtype, device)
        up_scale = torch.ones(slots, 2 * num_blocks(f), num_blocks(d), device=device)
        down_scale = torch.ones(slots, num_blocks(d), num_blocks(f), device=device)
        for average in rows:
            least, most = average // 2, 2 * average - average // 2 + 1
            rows_S = torch.randint(
                least, most, (slots,), dtype=torch.int32, generator=torch.Generator().manual_seed(average)
            )
            counts, total, label = (
                rows_S.to(device),
                int(rows_S.sum()),
                f"{shape.name} S={slots} C={places} R={int(rows_S.sum())}",
            )
            x, mid = (
                ExpertBatch(
                    Layout.PADDED, torch.ones(slots, places, width, device=device, dtype=BF16).to(dtype), counts,
                    torch.ones(slots, places, num_blocks(width), device=device) if is_fp8 else None,
                )
                for width in (d, f)
            )  # fmt: skip
            kernel = "_fp8" if is_fp8 else ""

            def first(config: Any, x: ExpertBatch = x, is_fp8: bool = is_fp8, w: Any = (gate_up, up_scale)) -> object:
                return fp8.multiply_gate_up_fp8(x, *w, config) if is_fp8 else gemm.multiply_gate_up(x, w[0], config)

            def second(config: Any, x: ExpertBatch = mid, is_fp8: bool = is_fp8, w: Any = (down, down_scale)) -> object:
                return (
                    fp8.multiply_down_fp8(x, *w, None, config) if is_fp8 else gemm.multiply_down(x, w[0], None, config)
                )

            for run, op, inputs, outputs, matrices in ((first, "gate_up", d, f, 2), (second, "down", f, d, 1)):
                moved = slots * matrices * f * d * itemsize + total * (d + f) * itemsize
                by_rows = choose(f"{op}{kernel}", chip, inputs, outputs, average)
                for how, config in (("", None), (", cut for its rows", by_rows)):
                    yield Case(
                        f"padded {op} {name}{how}", label, moved, total * 2 * matrices * f * d,
                        functools.partial(_configured, run, config), name,
                    )  # fmt: skip
            if is_fp8:
                halves = torch.ones(slots, places, 2 * f, device=device, dtype=BF16)
                yield Case(
                    "padded silu-mul to fp8", label, total * f * 5, 0,
                    lambda _, a=(halves, counts): triton_quant.silu_mul_quantize(*a),  # type: ignore[misc]
                )  # fmt: skip


def _configured(run: Callable[[Any], object], config: Any, _: Any) -> object:
    return run(config)


def make_step(sequences: int, queries: int, length: int, device: torch.device) -> StepInput:
    blocks = -(-length // BLOCK_SIZE)
    table = torch.randperm(sequences * blocks).view(sequences, blocks).to(device)
    tokens = sequences * queries
    positions = torch.arange(length - queries, length).repeat(sequences).to(device)
    none = torch.zeros(tokens, dtype=I64, device=device)
    return StepInput(
        none, positions, torch.arange(tokens, device=device), tuple(range(0, tokens + 1, queries)),
        (length,) * sequences, torch.full((sequences,), length, device=device), table,
        sequences if queries == 1 else 0, BLOCK_SIZE, none,
    )  # fmt: skip


def decode_candidates(heads: int) -> tuple[DecodeConfig, ...]:
    sizes = [size for size in (16, 32, 64) if size <= max(16, heads)]
    return tuple(DecodeConfig(h, s, w, st) for h in sizes for s in (16, 32, 64) for w in (4, 8) for st in (2, 3))


def mla_cases(
    shape: Shape, device: torch.device, decodes: Sequence[tuple[int, int]] = DECODES,
    prompts: Sequence[tuple[int, int, int]] = PROMPTS, latent: int = 512, rope: int = 64, width: int = 128,
) -> Iterator[Case]:  # fmt: skip
    """Decode over latents in 16 and 8 bits, and the attention of prompts (keys and values built)."""
    h = shape.heads
    for b, length in decodes:
        step = make_step(b, 1, length, device)
        plain = randn(step.block_table_BN.numel() * BLOCK_SIZE, latent + rope, device=device)
        q, q_pe = randn(b, h, latent, device=device, scale=0.2), randn(b, h, rope, device=device)
        for name, cache in (("bf16", plain), ("fp8", latent_fp8.pack(plain, latent))):

            def run(config: Any, cache: Tensor = cache, q: Any = (q, q_pe), step: StepInput = step) -> object:
                return decode(
                    *q, cache, step.block_table_BN, step.kv_lens_B, BLOCK_SIZE, max(step.kv_lens), 0.1, config
                )

            yield Case(
                f"mla decode {name}", f"B={b} L={length} H={h}", b * length * cache.shape[1] * cache.element_size(),
                b * length * h * 2 * (2 * latent + rope), run, "bf16", "mla_decode" + ("_fp8" if name == "fp8" else ""),
                (h,), decode_candidates(h),
            )  # fmt: skip

    @functools.cache  # a plan is made once for all layers, and comes from the host
    def plan_of(step: StepInput, b: int, config: Any) -> PrefillPlan:
        return PrefillPlan(step, range(b), h, 8192, BF16, config)

    candidates = [PrefillConfig(m, s, w, st) for m in (64, 128) for s in (32, 64, 128) for w in (4, 8) for st in (2, 3)]
    for b, queries, length in prompts:
        step = make_step(b, queries, length, device)
        cache = randn(step.block_table_BN.numel() * BLOCK_SIZE, latent + rope, device=device)
        q = randn(b * queries, h, width, device=device, scale=0.2), randn(b * queries, h, rope, device=device)
        w = [randn(h, width, latent, device=device, scale=latent**-0.5) for _ in range(2)]
        out = torch.empty(b * queries, h, width, dtype=BF16, device=device)

        def prompt(
            config: Any, step: StepInput = step, b: int = b, args: Any = (*q, cache, *w), out: Tensor = out
        ) -> object:
            plan_of(step, b, config).run(*args, 0.1, out)
            return out

        pairs = b * (queries * (length - queries) + queries * (queries + 1) // 2)
        built = b * length * latent * h * width * 2 * 2
        yield Case(
            "mla prompt", f"B={b} Q={queries} L={length} H={h}", b * length * h * width * 2 * 2,
            pairs * h * 2 * (2 * width + rope) + built, prompt, "bf16", "mla_prefill", (h,), tuple(candidates),
        )  # fmt: skip


def attention_cases(
    shape: Shape, device: torch.device, decodes: Sequence[tuple[int, int]] = DECODES,
    prompts: Sequence[tuple[int, int, int]] = PROMPTS,
) -> Iterator[Case]:  # fmt: skip
    """Grouped-query attention over the paged cache."""
    heads = HeadCounts(shape.heads, shape.kv_heads, shape.head_dim)
    entry, work = shape.kv_heads * shape.head_dim * 2 * 2, shape.heads * shape.head_dim * 4
    small = [AttentionConfig(16, s, w, st) for s in (32, 64, 128) for w in (2, 4, 8) for st in (2, 3, 4)]
    large = [AttentionConfig(m, s, w, st) for m in (64, 128) for s in (32, 64, 128) for w in (4, 8) for st in (2, 3)]

    @functools.cache
    def plan_of(step: StepInput, is_decode: bool, config: Any) -> TritonAttentionPlan:
        return TritonAttentionPlan(step, heads, BF16, *((config, None) if is_decode else (None, config)))

    for b, queries, length in [*((b, 1, length) for b, length in decodes), *prompts]:
        step = make_step(b, queries, length, device)
        cache = [
            randn(step.block_table_BN.numel() * BLOCK_SIZE, shape.kv_heads, shape.head_dim, device=device)
            for _ in range(2)
        ]
        q = randn(b * queries, shape.heads, shape.head_dim, device=device)
        is_decode = queries == 1

        def run(
            config: Any, step: StepInput = step, q: Tensor = q, kv: Any = cache, is_decode: bool = is_decode
        ) -> object:
            return triton_attention.paged_attention(q, *kv, plan_of(step, is_decode, config), 0.1)

        pairs = b * (queries * (length - queries) + queries * (queries + 1) // 2)
        yield Case(
            f"attention {'decode' if is_decode else 'prompt'}", f"B={b} Q={queries} L={length} H={shape.heads}/{shape.kv_heads}",
            b * length * entry, pairs * work, run, "bf16", "attention_decode" if is_decode else "attention_prefill",
            (shape.head_dim, heads.group), tuple(small if is_decode else large),
        )  # fmt: skip


def row_cases(shape: Shape, device: torch.device, tokens: Sequence[int] = TOKENS) -> Iterator[Case]:
    """What is read once and written once: the limit is memory's."""
    d, e, k = shape.hidden, shape.experts, shape.top_k
    for t in tokens:
        x, residual, weight = randn(t, d, device=device), randn(t, d, device=device), randn(d, device=device)
        logits, bias = randn(t, e, device=device, dtype=F32), torch.zeros(e, device=device)
        slot = torch.stack([torch.randperm(e)[:k] for _ in range(t)]).to(device)
        routing = torch.rand(t, k, device=device)
        wide = randn(t, 2 * shape.width, device=device)
        y = randn(t * k, d, device=device)
        row_N = torch.randperm(t * k).to(device=device, dtype=torch.int32)
        out = torch.empty_like(x)
        size, label = t * d * 2, f"{shape.name} T={t}"
        yield Case(
            "add and norm", label, 4 * size, 0, lambda _, a=(x, residual, weight): triton_norm.add_rms_norm(*a, 1e-6)
        )  # type: ignore[misc]
        yield Case("silu-mul", label, t * shape.width * 6, 0, lambda _, x=wide: triton_silu_mul.silu_mul(x))  # type: ignore[misc]
        yield Case("rows to fp8", label, 1.5 * size, 0, lambda _, x=x: triton_quant.quantize_rows(x))  # type: ignore[misc]
        yield Case(
            "silu-mul to fp8", label, t * shape.width * 5, 0, lambda _, x=wide: triton_quant.silu_mul_quantize(x)
        )  # type: ignore[misc]
        yield Case(
            "routing", label, t * e * 4, 0,
            lambda _, a=(logits, bias): triton_topk.grouped_sigmoid_topk(*a, k, 8 if e % 8 == 0 else 1, 4, True, 2.5)  # type: ignore[misc]
            if e >= 64 else triton_topk.softmax_topk(a[0], k, True),
        )  # fmt: skip
        yield Case(
            "tokens to rows", label, (1 + k) * size, 0, lambda _, a=(x, slot): triton_permute.take_rows(*a, 0, e)
        )  # type: ignore[misc]
        yield Case(
            "rows to tokens", label, (1 + k) * size, 0,
            lambda _, a=(y, row_N, routing), o=out: triton_permute.sum_pairs(*a, o),  # type: ignore[misc]
        )  # fmt: skip


def cache_cases(shape: Shape, device: torch.device, tokens: Sequence[int] = TOKENS) -> Iterator[Case]:
    """Norm, rotation and the write to the cache."""
    for t in tokens:
        slots = torch.randperm(2 * t)[:t].to(device)
        cos, sin = (randn(t, 1, 128, device=device) for _ in range(2))
        if shape.kv_heads:
            h = shape.heads + 2 * shape.kv_heads
            qkv, norm = randn(t, h, 128, device=device), randn(h - shape.kv_heads, 128, device=device)
            cache = tuple(randn(2 * t, shape.kv_heads, 128, device=device) for _ in range(2))
            args = (qkv, shape.heads, norm, 1e-6, (cos, sin), cache, slots)
            yield Case(
                "heads to cache",
                f"{shape.name} T={t}",
                4.0 * qkv.numel(),
                0,
                lambda _, a=args: triton_heads.qk_norm_rope_cache(*a),
            )  # type: ignore[misc]
            continue
        entry, weight, plain = (randn(*s, device=device) for s in ((t, 576), (512,), (2 * t, 576)))
        turns = cos[..., :64].contiguous(), sin[..., :64].contiguous()
        for name, cache_RX in (("bf16", plain), ("fp8", latent_fp8.pack(plain, 512))):
            moved = t * (1152 + cache_RX.shape[1] * cache_RX.element_size())
            write = (entry, weight, 1e-6, *turns, slots, cache_RX)
            yield Case(f"latent to cache {name}", f"T={t}", moved, 0, lambda _, a=write: triton_cache.write_entry(*a))  # type: ignore[misc]


def sampling_cases(shape: Shape, device: torch.device, rows: Sequence[int] = (1, 32, 256)) -> Iterator[Case]:
    for r in rows:
        logits, ones = randn(r, shape.vocab, device=device, scale=3.0), torch.ones(r, device=device)
        integers = torch.arange(r, device=device)
        for name, top_k, top_p in (("plain", 0, 1.0), ("top_k 50", 50, 1.0), ("top_p 0.9", 0, 0.9), ("both", 50, 0.9)):
            columns = torch.full_like(integers, top_k), ones * top_p, ones * 0
            yield Case(
                f"sampling {name}", f"R={r} V={shape.vocab}", logits.numel() * 2, 0,
                lambda _, a=(logits, ones, *columns, integers, integers): triton_sampling.sample(*a),  # type: ignore[misc]
            )  # fmt: skip


def all_cases(device: torch.device, models: Sequence[str]) -> Iterator[Case]:
    for name in models:
        shape = MODELS[name]
        yield from expert_cases(shape, device)
        yield from attention_cases(shape, device) if shape.kv_heads else mla_cases(shape, device)
        yield from row_cases(shape, device)
        yield from cache_cases(shape, device)
        yield from sampling_cases(shape, device)
