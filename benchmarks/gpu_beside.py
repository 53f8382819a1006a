"""What torch itself offers for the same work, beside our Triton kernels (part `torch` of gpu_check.py).

A row has both times, and their ratio: above 1 ours takes longer, and torch's form is worth taking. Results are compared where both
compute the same. What this torch does not have, or refuses on this chip, is said in the row's note and is no failure.

Legend: T tokens, D hidden size, F width of an expert, S slots, R rows, B sequences, L cached tokens, H heads, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from gpu_cases import BLOCK_SIZE, Shape, make_step, randn
from gpu_rows import Options, relative, row
from gpu_work import DEEPSEEK, QWEN, SMALL
from torch import Tensor
from torch.nn.attention import SDPBackend

from layers.attention import HeadCounts
from layers.triton import attention as triton_attention
from layers.triton import norm as triton_norm
from layers.triton import sampling as triton_sampling
from layers.triton import silu_mul as triton_silu_mul
from layers.triton.attention import TritonAttentionPlan
from mla.triton.prefill import PrefillPlan
from moe_kernels.layout import ExpertBatch, Layout
from moe_kernels.quant import BLOCK, num_blocks
from moe_kernels.triton import fp8_experts as fp8
from moe_kernels.triton import grouped_gemm as gemm
from moe_kernels.triton import quant as triton_quant
from moe_kernels.triton import topk as triton_topk

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
_SCALED_GROUPED: Any = vars(torch).get("_scaled_grouped_mm")

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Pair:
    """The same work twice. most: by how much results may differ, relatively; None: they are not the same numbers (other scales,
    other layouts), only as much work."""

    name: str
    ours: Run
    theirs: dict[str, Run] = field(default_factory=dict)
    most: float | None = 0.02


def torch_beside(options: Options) -> None:
    for pair in pairs(options):
        if not options.left(2):
            row("the rest left out", None, note="no time was left")
            return
        measure(pair, options.clock())


def measure(pair: Pair, clock: Callable[[Run], float]) -> None:
    try:
        ours = 1e3 * clock(pair.ours)
        expected = None if pair.most is None else pair.ours()
    except Exception as error:  # ours has to run
        row(pair.name, False, note=_said(error))
        return
    for name, run in pair.theirs.items():
        try:
            distance = None if expected is None else relative(run(), expected)
            theirs = 1e3 * clock(run)
        except Exception as error:  # of any library
            row(f"{pair.name}: {name}", None, ours_ms=ours, note=f"torch does not: {_said(error)}")
            continue
        ok = None if distance is None or pair.most is None else distance < pair.most
        found = {} if distance is None else {"error": distance}
        row(f"{pair.name}: {name}", ok, ours_ms=ours, torch_ms=theirs, ratio=ours / theirs, **found)


def _said(error: Exception) -> str:
    traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def pairs(options: Options) -> Iterator[Pair]:
    device, tiny = options.device, options.tiny
    for shape, tokens in ((SMALL, (8,)),) if tiny else ((QWEN, (64, 2048)), (DEEPSEEK, (64, 2048))):
        yield from experts(shape, tokens, device)
    yield from attention(SMALL if tiny else QWEN, device, *((2, 20, 10) if tiny else (32, 4096, 2048)))
    yield from latent_prompt(device, *((2, 16, 32, 16, 8) if tiny else (128, 2048, 512, 128, 64)))
    yield from dense(device, *((16, 256, 256) if tiny else (64, 7168, 18432)))
    yield from sampling(SMALL if tiny else QWEN, 2 if tiny else 64, device)
    # Compiling takes torch seconds each.
    yield from rows_of(SMALL if tiny else DEEPSEEK, (8,) if tiny else (64, 2048), options)


# ---- products ----


def experts(shape: Shape, tokens: tuple[int, ...], device: torch.device) -> Iterator[Pair]:
    """Rows that lie by slot: torch.nn.functional.grouped_mm, and torch's grouped product in FP8 (a scale per row, not per block)."""
    s, d, f = shape.slots, shape.hidden, shape.width
    gate_up, down = randn(s, 2 * f, d, device=device, scale=d**-0.5), randn(s, d, f, device=device, scale=f**-0.5)
    for num_tokens in tokens:
        average = max(1, num_tokens * shape.top_k * s // shape.experts // s)
        counts = torch.full((s,), average, dtype=torch.int32, device=device)
        ends = counts.cumsum(0, dtype=torch.int32)
        x, mid = (randn(average * s, width, device=device) for width in (d, f))
        first, second = (ExpertBatch(Layout.RAGGED, rows, counts) for rows in (x, mid))
        label = f"{shape.name} T={num_tokens} R={average * s} S={s}"

        def gate_up_of_torch(x: Tensor = x, ends: Tensor = ends) -> Tensor:
            gate, up = F.grouped_mm(x, gate_up.mT, offs=ends).chunk(2, dim=-1)
            return F.silu(gate) * up

        yield Pair(
            f"experts gate_up bf16 {label}", functools.partial(gemm.multiply_gate_up, first, gate_up),
            {"grouped_mm, silu, mul": gate_up_of_torch},
        )  # fmt: skip
        yield Pair(
            f"experts down bf16 {label}", functools.partial(gemm.multiply_down, second, down, None),
            {"grouped_mm": functools.partial(F.grouped_mm, mid, down.mT, offs=ends)},
        )  # fmt: skip
        value, scale = triton_quant.quantize_rows(mid)
        eights = torch.empty(s, d, f, dtype=F8, device=device)
        for slot in range(s):
            eights[slot].copy_(down[slot])
        by_block = torch.ones(s, num_blocks(d), num_blocks(f), device=device)
        quantised = ExpertBatch(Layout.RAGGED, value, counts, scale)

        def rowwise(value: Tensor = value, ends: Tensor = ends, eights: Tensor = eights) -> Tensor:
            ones = torch.ones(value.shape[0], device=device), torch.ones(s, d, device=device)
            product: Tensor = _SCALED_GROUPED(value, eights.mT, *ones, offs=ends, out_dtype=BF16)
            return product

        yield Pair(
            f"experts down fp8 {label}", functools.partial(fp8.multiply_down_fp8, quantised, eights, by_block, None),
            {"_scaled_grouped_mm, a scale per row": rowwise}, None,
        )  # fmt: skip


def dense(device: torch.device, tokens: int, inputs: int, outputs: int) -> Iterator[Pair]:
    """What matrices outside the experts would gain in FP8: ours is the product in bfloat16, as the engine computes it."""
    x, weight = randn(tokens, inputs, device=device), randn(outputs, inputs, device=device, scale=inputs**-0.5)
    x8, weight8 = x.to(F8), weight.to(F8)
    one = torch.ones((), device=device)
    kinds: Any = importlib.import_module("torch.nn.functional").ScalingType
    by_token = torch.ones(num_blocks(inputs), tokens, device=device).T  # column by column
    by_block = torch.ones(outputs // BLOCK, num_blocks(inputs), device=device)

    def blocks() -> Tensor:
        recipes = kinds.BlockWise1x128, kinds.BlockWise128x128
        return F.scaled_mm(x8, weight8.T, by_token, recipes[0], by_block, recipes[1], output_dtype=BF16)

    yield Pair(
        f"dense product T={tokens} {inputs}x{outputs}, ours in bf16", functools.partial(F.linear, x, weight),
        {
            "fp8, one scale": lambda: torch._scaled_mm(x8, weight8.T, scale_a=one, scale_b=one, out_dtype=BF16),
            "fp8, scales of 1x128 and 128x128": blocks,
        },
        None,
    )  # fmt: skip


# ---- attention ----


def attention(shape: Shape, device: torch.device, sequences: int, length: int, queries: int) -> Iterator[Pair]:
    """torch reads keys and values that lie in one piece; ours finds them by blocks."""
    heads = HeadCounts(shape.heads, shape.kv_heads, shape.head_dim)
    for b, count, total, what in ((1, queries, queries, "prompt"), (sequences, 1, length, "decode")):
        step = make_step(b, count, total, device)
        cache = [
            randn(step.block_table_BN.numel() * BLOCK_SIZE, shape.kv_heads, shape.head_dim, device=device)
            for _ in range(2)
        ]
        q = randn(b * count, shape.heads, shape.head_dim, device=device)
        plan = TritonAttentionPlan(step, heads, BF16, None, None)
        keys, values = (
            x.view(-1, BLOCK_SIZE, shape.kv_heads, shape.head_dim)[step.block_table_BN].flatten(1, 2)[:, :total].transpose(1, 2).contiguous()
            for x in cache
        )  # fmt: skip
        q_BHQD = q.view(b, count, shape.heads, shape.head_dim).transpose(1, 2)

        def ours(q: Tensor = q, cache: Any = cache, plan: Any = plan) -> Tensor:
            return triton_attention.paged_attention(q, *cache, plan, 0.1)

        def theirs(backend: Any, args: Any = (q_BHQD, keys, values), causal: bool = count > 1) -> Tensor:
            with torch.nn.attention.sdpa_kernel(backend):
                found = F.scaled_dot_product_attention(*args, is_causal=causal, scale=0.1, enable_gqa=True)
            return found.transpose(1, 2).reshape(-1, shape.heads, shape.head_dim)

        yield Pair(f"attention {what} B={b} Q={count} L={total}", ours, _by_backend(theirs))


def latent_prompt(
    device: torch.device, num_heads: int, queries: int, latent: int, width: int, rope: int
) -> Iterator[Pair]:
    """Ours builds keys and values from latents first, which is in its time; torch is given them."""
    step = make_step(1, queries, queries, device)
    cache = randn(step.block_table_BN.numel() * BLOCK_SIZE, latent + rope, device=device)
    q = randn(queries, num_heads, width, device=device, scale=0.2), randn(queries, num_heads, rope, device=device)
    w = [randn(num_heads, width, latent, device=device, scale=latent**-0.5) for _ in range(2)]
    out = torch.empty(queries, num_heads, width, dtype=BF16, device=device)
    plan = PrefillPlan(step, range(1), num_heads, 8192, BF16, None)
    query, key = (randn(1, num_heads, queries, width + rope, device=device) for _ in range(2))
    value = randn(1, num_heads, queries, width, device=device)

    def ours() -> Tensor:
        plan.run(*q, cache, *w, 0.1, out)
        return out

    def theirs(backend: Any) -> Tensor:
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.1)

    yield Pair(f"mla prompt Q=L={queries} H={num_heads}", ours, _by_backend(theirs), None)


def _by_backend(run: Callable[[Any], Tensor]) -> dict[str, Run]:
    kinds = {
        "sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    }  # fmt: skip
    return {name: functools.partial(run, kind) for name, kind in kinds.items()}


# ---- rows ----


def rows_of(shape: Shape, tokens: tuple[int, ...], options: Options) -> Iterator[Pair]:
    """What torch.compile makes of them (on a CPU they run as they are written)."""
    device, d = options.device, shape.hidden
    made: Callable[..., Any] = functools.partial(torch.compile, dynamic=False) if options.on_gpu else lambda run: run
    weight = randn(d, device=device)

    def add_norm(x: Tensor, residual: Tensor) -> Tensor:
        total = x + residual
        return F.rms_norm(total, (d,), None, 1e-6) * weight

    def silu_mul(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def to_fp8(x: Tensor) -> Tensor:
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        scale = (blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
        return (blocks / scale).flatten(-2).to(F8)

    def routed(logits: Tensor) -> Tensor:
        weights, _ = logits.topk(shape.top_k, sorted=True)
        return weights.softmax(-1)

    for t in tokens:
        x, residual, wide = (
            randn(t, d, device=device),
            randn(t, d, device=device),
            randn(t, 2 * shape.width, device=device),
        )
        logits = randn(t, shape.experts, device=device, dtype=torch.float32)
        for name, ours, theirs, args, most in (
            ("add and norm", lambda x, r: triton_norm.add_rms_norm(x, r, weight, 1e-6), add_norm, (x, residual), None),
            ("silu-mul", triton_silu_mul.silu_mul, silu_mul, (wide,), 0.02),
            (
                "rows to fp8",
                lambda x: triton_quant.quantize_rows(x)[0].float(),
                lambda x: to_fp8(x).float(),
                (x,),
                0.05,
            ),
            ("softmax routing", lambda x: triton_topk.softmax_topk(x, shape.top_k, True)[1], routed, (logits,), None),
        ):
            yield Pair(
                f"{name} T={t} {shape.name}", functools.partial(ours, *args),
                {"torch.compile": functools.partial(made(theirs), *args)}, most,
            )  # fmt: skip


def sampling(shape: Shape, num_rows: int, device: torch.device) -> Iterator[Pair]:
    """top_k 50 and top_p 0.9; torch sorts. Other random numbers."""
    logits = randn(num_rows, shape.vocab, device=device, scale=3.0)
    integers, ones = torch.arange(num_rows, device=device), torch.ones(num_rows, device=device)
    columns = ones, torch.full_like(integers, 50), ones * 0.9, ones * 0, integers, integers

    def sort() -> Tensor:
        value, place = logits.float().sort(-1, descending=True)
        value = value[:, :50].softmax(-1)
        value = value.masked_fill(value.cumsum(-1) - value > 0.9, 0.0)
        return place.gather(1, value.multinomial(1)).flatten()

    yield Pair(
        f"sampling R={num_rows} V={shape.vocab}", functools.partial(triton_sampling.sample, logits, *columns),
        {"sort, softmax, multinomial": sort}, None,
    )  # fmt: skip
