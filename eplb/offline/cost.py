"""Predicted time of one step of an expert-parallel deployment: a small model that can be read whole.

A layer is attention + shared expert + routed experts (compute) and dispatch + combine (links). Each part is the greater
of its arithmetic and its bytes, over what kernels reach of the peaks. Every rank waits for the slowest one in each MoE
layer, so the experts' time is that of the worst rank. With two micro-batches the links work while the other half
computes.

The dead zone: an expert's weights must be read whatever few tokens come, and rows are padded to tiles. Below that floor
a better balance gains nothing, and `StepCost.dead_zone` says how much imbalance costs nothing.

`ASSUMPTIONS` is printed with every result; eplb/offline/published.py checks the model against published figures.

Legend: L MoE layers, G ranks, S slots of a rank, K experts per token, D hidden, T tokens of a GPU and step.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import asdict

from eplb.offline.cluster import Cluster
from eplb.offline.shapes import WEIGHT_BYTES, ModelShape

Floats = npt.NDArray[np.float64]
Phase = Literal["prefill", "decode"]


class Constants(Struct, frozen=True):
    """What kernels reach of the peaks. The link numbers are fitted to DeepEP's 12 low-latency and 4 normal rows,
    attention to FlashMLA's and FlashAttention-3's published rates, the GEMM and gap numbers to the Hopper rows of
    eplb/offline/published.py that are marked as fitted."""

    hbm: float = 0.80  # of the peak bandwidth, for weights and cache
    attention_prefill: float = 0.55  # of the bfloat16 peak
    attention_decode: float = 0.62  # of the bfloat16 peak (MLA: FlashMLA 660 of 989 TFLOP/s at best)
    rdma_low_latency: float = 0.85
    rdma_normal: float = 0.88
    nvlink: float = 0.80
    low_latency_us: float = 20.0  # of one dispatch or combine
    normal_us: float = 60.0
    overlap_decode: float = 0.85  # part of the shorter of compute and links that two micro-batches hide
    overlap_prefill: float = 0.60  # less: its all-to-all kernels take SMs from the arithmetic
    # hidden vectors of 2 bytes that norms, gate, quantisation and residuals move per token
    passes_per_token: float = 24.0
    passes_per_row: float = 5.0  # and permute, activation, quantisation per routed row
    gap_us: float = 90.0  # launches and gaps of one layer and micro-batch
    decode_tile: int = 32  # rows to which an expert's batch is padded
    prefill_tile: int = 128
    step_ms: float = 3.0  # scheduling, sampling and the host's part of a step
    layer_move_ms: float = 15.0  # set-up and synchronisation of moving one layer's experts while serving waits


DEFAULT = Constants()


class Workload(Struct, frozen=True):
    """One step of every GPU. tokens_per_gpu: sequences (decode) or prompt tokens (prefill) of a GPU; context: cached
    tokens per sequence (decode) or the prompt's length (prefill); micro_batches: 2 overlaps links with compute, 1 does
    not; fp8_cache: cache and attention in FP8 instead of bfloat16."""

    phase: Phase
    tokens_per_gpu: int
    context: int
    micro_batches: int = 2
    fp8_cache: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("tokens per GPU", self.tokens_per_gpu, 1),
            ("context", self.context, 1),
            ("micro-batches", self.micro_batches, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be {least} or more")
        if self.micro_batches > 2:
            raise ValueError(f"micro-batches is {self.micro_batches}; the model knows 1 (no overlap) and 2")

    def describe(self) -> str:
        overlap = "overlapped by two micro-batches" if self.micro_batches == 2 else "not overlapped"
        what = "prompt tokens" if self.phase == "prefill" else "sequences"
        where = "prompt length" if self.phase == "prefill" else "cached tokens each"
        return f"{self.phase}: {self.tokens_per_gpu} {what} per GPU, {self.context} {where}, links {overlap}"


class StepCost(Struct, frozen=True):
    """Milliseconds of one step by part (links: dispatch and combine before overlap; hidden: what overlap takes off)."""

    total_ms: float
    attention_ms: float
    dense_ms: float
    experts_ms: float
    links_ms: float
    hidden_ms: float
    gaps_ms: float
    tokens_per_s_per_gpu: float
    dead_zone: float  # how far the busiest rank may lie above the mean (0.09: 9 %) before its experts take longer

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


ASSUMPTIONS = (
    "data-parallel attention on every GPU, experts over all of them; no tensor or pipeline parallelism, no speculation",
    "every GPU has the same number of tokens and the same context; differences between ranks' "
    "requests are not modelled",
    "each part is max(FLOP / reached TFLOP/s, bytes / reached GB/s); reached = peak of the data sheet x a constant",
    "projections and experts run in the experts' type, attention and cache in bfloat16",
    "an expert's rows are padded to tiles of 32 (decode) or 128 (prefill); weights of an expert with a token are "
    "read once per micro-batch",
    "decode sends every (token, expert) pair to its rank (FP8 out, bfloat16 back); prefill sends a token once per "
    "NVLink domain, then within it once per rank",
    "links slow down with the busiest receiver; with two micro-batches 85 % of the shorter of "
    "compute and links is hidden",
)


def expert_ms(
    slot_rows: Floats, cluster: Cluster, shape: ModelShape, phase: Phase, constants: Constants = DEFAULT
) -> Floats:
    """Milliseconds of a rank's grouped GEMMs over one micro-batch. slot_rows [..., S]: rows expected in each slot; 0:
    nothing arrives there. Returns [...]."""
    tile = constants.decode_tile if phase == "decode" else constants.prefill_tile
    gpu = cluster.gpu
    # Rows are a mean: with few, the expert may get none in this step, and then its weights are not read.
    active = -np.expm1(-slot_rows)
    padded = np.maximum(active * tile, slot_rows + active * tile / 2)
    math_s = padded.sum(-1) * 2 * shape.expert_params / (gpu.tflops(shape.expert_dtype) * 1e12 * gpu.reach)
    # Per row: the input in FP8, gate and up out and back in bfloat16, their product in FP8, the output in bfloat16.
    row_bytes = 3 * shape.hidden + 5 * shape.moe_intermediate_size
    moved = active.sum(-1) * shape.expert_bytes + slot_rows.sum(-1) * row_bytes
    passes = slot_rows.sum(-1) * constants.passes_per_row * 2 * shape.hidden
    bandwidth = gpu.hbm_gbps * 1e9 * constants.hbm
    result: Floats = (np.maximum(math_s, moved / bandwidth) + passes / bandwidth) * 1e3
    return result


def attention_ms(cluster: Cluster, shape: ModelShape, work: Workload, constants: Constants = DEFAULT) -> float:
    """Milliseconds of one layer's attention over the whole step: projections, then the core over the cache."""
    gpu, tokens = cluster.gpu, work.tokens_per_gpu
    peak = gpu.tflops("fp8" if work.fp8_cache else "bf16") * 1e9
    projections = _dense_ms(shape.attention_params, tokens, work.micro_batches, cluster, shape, constants)
    layer_kv = shape.kv_bytes_per_token / shape.num_layers / (2 if work.fp8_cache else 1)
    if work.phase == "prefill":
        width = (
            shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim if shape.is_mla else 2 * shape.head_dim
        )
        flops = tokens * work.context / 2 * shape.num_heads * width * 2
        return projections + flops / (peak * constants.attention_prefill)
    width = 2 * shape.kv_lora_rank + shape.qk_rope_head_dim if shape.is_mla else 2 * shape.head_dim
    flops = tokens * work.context * shape.num_heads * width * 2
    math_ms = flops / (peak * constants.attention_decode)
    return projections + max(math_ms, tokens * work.context * layer_kv / (gpu.hbm_gbps * 1e6 * constants.hbm))


def _dense_ms(
    params: float, tokens: float, micro_batches: int, cluster: Cluster, shape: ModelShape, constants: Constants
) -> float:
    """A dense product of `tokens` rows in micro-batches; its weights are read once for each."""
    gpu = cluster.gpu
    dtype = "bf16" if shape.expert_dtype == "bf16" else "fp8"
    flop_ms = 2 * params * tokens / (gpu.tflops(dtype) * 1e9 * gpu.reach)
    read_ms = params * WEIGHT_BYTES[dtype] * micro_batches / (gpu.hbm_gbps * 1e6 * constants.hbm)
    return max(flop_ms, read_ms)


def links_ms(
    cluster: Cluster,
    shape: ModelShape,
    phase: Phase,
    tokens: float,
    hot_rank: float = 1.0,
    hot_domain: float = 1.0,
    constants: Constants = DEFAULT,
) -> tuple[float, float]:
    """Milliseconds of one dispatch and one combine of `tokens` tokens per GPU. hot_rank, hot_domain: what the busiest
    rank and the busiest NVLink domain receive, over the mean."""
    if cluster.num_gpus == 1:
        return 0.0, 0.0
    gpu, domains = cluster.gpu, cluster.num_domains
    bf16 = shape.hidden * 2.0
    # FP8 rows carry a float32 scale per 128 values.
    out_bytes = {"bf16": bf16, "fp8": shape.hidden * (1 + 4 / 128), "nvfp4": shape.hidden * 0.5625}[shape.expert_dtype]
    remote = 1 - cluster.link_domain / cluster.num_gpus
    nvlink = gpu.nvlink_gbps * 1e6 * constants.nvlink
    if phase == "decode":
        rdma = gpu.rdma_gbps * 1e6 * constants.rdma_low_latency
        rows = tokens * shape.experts_per_token * hot_rank
        times = [max(rows * remote * size / rdma, rows * (1 - remote) * size / nvlink) for size in (out_bytes, bf16)]
        return times[0] + constants.low_latency_us / 1e3, times[1] + constants.low_latency_us / 1e3
    rdma = gpu.rdma_gbps * 1e6 * constants.rdma_normal
    reach = _distinct(domains if shape.num_groups == 1 else min(domains, shape.groups_per_token), shape)
    ranks = _distinct(reach * cluster.link_domain, shape)
    remote_copies = tokens * reach * remote * hot_domain
    local_copies = tokens * ranks * hot_rank
    times = [max(remote_copies * size / rdma, local_copies * size / nvlink) for size in (out_bytes, bf16)]
    return times[0] + constants.normal_us / 1e3, times[1] + constants.normal_us / 1e3


def _distinct(places: float, shape: ModelShape) -> float:
    """How many of `places` equal places a token's K experts fall on, on average."""
    return places * -math.expm1(shape.experts_per_token * math.log1p(-1 / places)) if places > 1 else 1.0


def step_cost(
    cluster: Cluster,
    shape: ModelShape,
    work: Workload,
    slot_part: Floats,
    constants: Constants = DEFAULT,
) -> StepCost:
    """Predicted step. slot_part [L, G, S]: the part of a layer's (token, expert) pairs that each slot receives; every
    layer sums to 1; L may be 1 for a case that stands for all layers. G must be the cluster's number of GPUs
    (ValueError)."""
    if slot_part.ndim != 3 or slot_part.shape[1] != cluster.num_gpus:
        raise ValueError(f"the loads are of {slot_part.shape[1]} ranks; the cluster has {cluster.num_gpus} GPUs")
    halves = work.micro_batches
    rows = slot_part * (work.tokens_per_gpu * cluster.num_gpus * shape.experts_per_token / halves)
    experts_LG = expert_ms(rows, cluster, shape, work.phase, constants)
    rank_LG = slot_part.sum(2) * cluster.num_gpus
    experts_L = experts_LG.max(1) * halves
    domain_L = _domain_peak(rank_LG, cluster.link_domain)
    links_L = np.array(
        [
            halves * sum(links_ms(cluster, shape, work.phase, work.tokens_per_gpu / halves, hot, node, constants))
            for hot, node in zip(rank_LG.max(1), domain_L, strict=True)
        ]
    )
    attention = attention_ms(cluster, shape, work, constants)
    shared = _dense_ms(
        shape.expert_params * shape.num_shared_experts, work.tokens_per_gpu, halves, cluster, shape, constants
    )
    bandwidth = cluster.gpu.hbm_gbps * 1e6 * constants.hbm
    gaps = halves * constants.gap_us / 1e3
    gaps += work.tokens_per_gpu * constants.passes_per_token * 2 * shape.hidden / bandwidth
    compute_L = attention + shared + gaps + experts_L
    overlap = constants.overlap_decode if work.phase == "decode" else constants.overlap_prefill
    overlap = overlap if halves == 2 else 0.0
    hidden_L = np.minimum(compute_L, links_L) * overlap
    dense = _dense_ms(3 * shape.hidden * shape.intermediate_size, work.tokens_per_gpu, 1, cluster, shape, constants)
    head = _head_ms(cluster, shape, work, constants)
    fixed = constants.step_ms + head + shape.num_dense_layers * (attention + dense + gaps)
    scale = shape.num_moe_layers
    total = fixed + float((compute_L + links_L - hidden_L).mean()) * scale
    return StepCost(
        total_ms=total,
        attention_ms=attention * shape.num_layers,
        dense_ms=shared * scale + dense * shape.num_dense_layers + head,
        experts_ms=float(experts_L.mean()) * scale,
        links_ms=float(links_L.mean()) * scale,
        hidden_ms=float(hidden_L.mean()) * scale,
        gaps_ms=gaps * shape.num_layers + constants.step_ms,
        tokens_per_s_per_gpu=work.tokens_per_gpu / total * 1e3,
        dead_zone=dead_zone(cluster, shape, work, slot_part.shape[2], constants),
    )


def _domain_peak(rank_LG: Floats, link_domain: int) -> Floats:
    """[L]: what the busiest NVLink domain receives per rank, over the mean."""
    starts = np.arange(0, rank_LG.shape[1], link_domain)
    sizes = np.diff(np.append(starts, rank_LG.shape[1]))
    peak: Floats = (np.add.reduceat(rank_LG, starts, axis=1) / sizes).max(1)
    return peak


def _head_ms(cluster: Cluster, shape: ModelShape, work: Workload, constants: Constants) -> float:
    """Logits of the rows that are sampled, bfloat16."""
    sampled = work.tokens_per_gpu if work.phase == "decode" else max(1, work.tokens_per_gpu // work.context)
    params = shape.hidden * shape.vocab_size
    flop_ms = 2 * params * sampled / (cluster.gpu.bf16_tflops * 1e9 * cluster.gpu.reach)
    return max(flop_ms, params * 2 / (cluster.gpu.hbm_gbps * 1e6 * constants.hbm))


def balanced_part(num_ranks: int, num_slots: int, balance: float = 1.0) -> Floats:
    """[1, G, S]: one rank 1 / balance above the mean, the others sharing the rest; a rank's slots equal.

    balance: mean / max of the ranks' loads, 1 / num_ranks to 1 (ValueError otherwise)."""
    if not 1 / num_ranks <= balance <= 1:
        raise ValueError(f"balance is {balance}; it must be {1 / num_ranks:.4g} to 1 (mean / max of {num_ranks} ranks)")
    rank = np.full(num_ranks, 1 / num_ranks)
    if num_ranks > 1:
        rank[0] /= balance
        rank[1:] = (1 - rank[0]) / (num_ranks - 1)
    part: Floats = np.broadcast_to(rank[None, :, None] / num_slots, (1, num_ranks, num_slots)).copy()
    return part


def dead_zone(
    cluster: Cluster, shape: ModelShape, work: Workload, num_slots: int, constants: Constants = DEFAULT
) -> float:
    """How far a rank's load may rise above the mean before its expert GEMMs take 1 % longer, as a part of the mean."""
    rows = work.tokens_per_gpu * shape.experts_per_token / work.micro_batches / num_slots
    above = np.concatenate([np.linspace(0, 1, 201), np.geomspace(1.01, 64, 200)])
    ms = expert_ms(rows * (1 + above)[:, None].repeat(num_slots, 1), cluster, shape, work.phase, constants)
    slower = np.flatnonzero(ms > ms[0] * 1.01)
    return float(above[slower[0] - 1]) if slower.size else float(above[-1])


def pause_s(
    cluster: Cluster, shape: ModelShape, experts_per_rank: float, num_layers: int, constants: Constants = DEFAULT
) -> float:
    """Seconds that serving stops for when `num_layers` layers are moved at once and the busiest rank receives
    `experts_per_rank` experts of one layer, all layers together. Moving in the background between steps, as Moesaic
    does, stops for none of it; `transfer_s` is then how long the links are busy."""
    return num_layers * constants.layer_move_ms / 1e3 + transfer_s(cluster, shape, experts_per_rank, constants)


def transfer_s(cluster: Cluster, shape: ModelShape, experts_per_rank: float, constants: Constants = DEFAULT) -> float:
    """Seconds of the links for a rank to receive so many experts: from any other rank alike, so mostly over the
    network."""
    if cluster.num_gpus == 1:
        return 0.0
    remote = (cluster.num_gpus - cluster.link_domain) / (cluster.num_gpus - 1)
    size = experts_per_rank * shape.expert_bytes
    network = size * remote / (cluster.gpu.rdma_gbps * 1e9 * constants.rdma_normal)
    return max(network, size * (1 - remote) / (cluster.gpu.nvlink_gbps * 1e9 * constants.nvlink))
