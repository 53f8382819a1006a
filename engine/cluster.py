"""What a model would get on GPUs that are not here: the plan, what runs each part of it, and what fills a GPU's memory.

For `moesaic explain` only. Sizes are counted on a model of torch's "meta" device, which has shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from configs.cache import cache_bytes
from configs.chips import CHIPS, Chip
from configs.engine import Dtype, EngineConfig, Plan
from configs.env import read_env
from configs.gpu import GPU_MEMORY_PART, Gpu
from configs.implied import at_level
from configs.machine import ModelNumbers
from configs.presets import PRESETS, preset_of
from configs.resolve import resolve
from engine.build import DTYPES
from engine.plan import EMBEDDED_NAME, machine_for, model_numbers
from engine.speculation.plan import default_method, drafter_of, plan_speculation, speculating, with_speculation
from ep.explain import explain_experts
from ep.parallel import Parallel
from ep.requirements import DEVICE_NAMES, Situation, missing, not_captured, refusal, split_pair
from eplb.placement import linear_placement
from models.eagle3.directory import weight_bytes, with_section
from models.explain import explain_attention
from models.facts import ModelFacts
from models.fields import Fields
from models.quantization import is_fp8
from models.registry import build, overridden, parse_config, read_fields, text_part
from models.tiny import CHECKPOINT

LIBRARIES = ("deep_ep", "deep_gemm", "flashinfer", "flash_mla", "nvshmem", "pplx_kernels", "torch_nvshmem")
_OF_BACKEND = {"deepgemm": "deep_gemm", "flashinfer": "flashinfer", "flashmla": "flash_mla"}


class Choice(Struct, frozen=True):
    """One part of the engine: what runs it, and of each candidate "ok" or why not."""

    part: str
    chosen: str
    verdicts: dict[str, str]


class Parameters(Struct, frozen=True):
    """How many the model has, without layers that draft. routed: in routed experts. active: those that a token is
    multiplied by; of embeddings it only takes a row, so a table is among them where the head shares it."""

    total: int
    routed: int
    active: int


class ClusterPlan(Struct, frozen=True):
    """memory: bytes of one GPU, by what takes them."""

    plan: Plan
    gpu: Gpu
    choices: tuple[Choice, ...]
    memory: dict[str, int]
    parameters: Parameters


def plan_cluster(config: EngineConfig, chip: str, installed: Callable[[str], bool]) -> ClusterPlan:
    """chip: a name of configs/chips.py; installed: whether a library (LIBRARIES) is to be taken as there.

    config.model: a directory with a config.json (weights are not needed), or a name of configs/presets.py. Raises
    ValueError, one line, for what cannot be planned.
    """
    config = at_level(config)
    raw, source = _read(config.model, config.hf_overrides)
    facts = parse_config(raw, source)
    parameters = count(facts)
    drafter = drafter_of(config.speculative_config, config.download_dir)
    if drafter is not None:
        raw = with_section(raw, drafter)
        facts = parse_config(raw, source)
    found = CHIPS[chip]
    gpu = Gpu.of(found)
    machine = machine_for(replace(config, device="cuda"), facts, gpu, installed)
    speculation, why = plan_speculation(config.speculative_config, facts, default_method(config.model, facts))
    if config.speculative_config is not None:
        facts = speculating(facts, speculation)
    numbers = _numbers(config.model, drafter, raw, facts, count(facts))
    plan = resolve(config, numbers, machine)
    plan = with_speculation(plan, config, speculation, why, read_env().cache_root)
    unknown = dict.fromkeys(
        ("threads_per_rank", "pin_ranks", "spin_threads"), "by the cores that are here, not the cluster's"
    )
    plan = replace(plan, reasons={**plan.reasons, **unknown})
    choices = [*_exchanges(plan, facts, gpu, installed), *_kernels(plan, facts, found, installed), _graphs(plan)]
    memory = _memory(plan, numbers, gpu, config.gpu_memory_utilization)
    return ClusterPlan(plan, gpu, tuple(choices), memory, parameters)


def _read(model: str | None, overrides: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields of a config.json, and what errors call them."""
    known = preset_of(model)
    if known is not None and not Path(model or "").is_dir():
        return overridden(known, overrides), f"preset {model}"
    path = Path(model) if model else CHECKPOINT
    if not path.is_dir():
        raise ValueError(f"model {model!r} is neither a directory nor one of {', '.join(PRESETS)}")
    fields = read_fields(path, overrides)
    return fields.raw, fields.source


def _numbers(
    model: str | None, drafter: Path | None, raw: dict[str, Any], facts: ModelFacts, parameters: Parameters
) -> ModelNumbers:
    """Of the checkpoints' files where the model has any, else of the shapes."""
    path = CHECKPOINT if model is None else Path(model)
    if any(path.glob("*.safetensors")):
        numbers = model_numbers(path, model or EMBEDDED_NAME, facts)
        more = 0 if drafter is None else weight_bytes(drafter)
        return replace(numbers, weight_bytes=numbers.weight_bytes + more)
    fields = Fields(text_part(raw, str(model)), str(model))
    dtype: Dtype = "float32" if fields.raw.get("torch_dtype", fields.raw.get("dtype")) == "float32" else "bfloat16"
    size = 4 if dtype == "float32" else 2
    return ModelNumbers(
        path=str(model),
        name=str(model),
        architecture=facts.architecture,
        max_position_embeddings=facts.max_position_embeddings,
        num_experts=facts.num_experts,
        num_moe_layers=facts.num_moe_layers,
        cache_spec=facts.cache_spec,
        weight_bytes=parameters.total * size,
        expert_bytes=parameters.routed * size,
        dtype=dtype,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        context_limit=facts.context_limit,
        context_reason=facts.context_reason,
        fp8_experts=is_fp8(fields),
    )


def count(facts: ModelFacts) -> Parameters:
    """By the shapes of the model."""
    placement = linear_placement(facts.num_moe_layers, facts.num_experts, 1) if facts.num_experts else None
    meta = torch.device("meta")
    model: Any = build(facts, Parallel(0, 1, placement, lambda *_: ()), torch.bfloat16, meta)
    others = sum(parameter.numel() for parameter in model.parameters())
    looked_up = model.embed.weight.numel() if model.head.tied is None else 0
    each = 3 * facts.hidden_size * facts.moe_intermediate_size * facts.num_moe_layers
    router = getattr(facts, "router", None)
    chosen = 0 if router is None else each * router.experts_per_token
    return Parameters(others + each * facts.num_experts, each * facts.num_experts, others - looked_up + chosen)


# ---- who runs what ----


def _exchanges(plan: Plan, facts: ModelFacts, gpu: Gpu, installed: Callable[[str], bool]) -> list[Choice]:
    if not facts.num_experts:
        return []
    situation = Situation(
        plan.data_parallel_size,
        "cuda",
        gpu.count,
        dtype=plan.dtype,
        hidden_size=facts.hidden_size,
        num_ubatches=1 if plan.dbo is None else plan.dbo.num_ubatches,
        installed=installed,
    )
    verdicts = {name: refusal(name, situation) or missing(name, situation) or "ok" for name in DEVICE_NAMES}
    large, small = split_pair(plan.all2all_backend)
    return [
        Choice("all-to-all, many tokens", large, verdicts),
        Choice("all-to-all, few tokens", small, {}),
    ]


def _kernels(plan: Plan, facts: ModelFacts, chip: Chip, installed: Callable[[str], bool]) -> list[Choice]:
    there = frozenset(name for name, module in _OF_BACKEND.items() if installed(module))
    dtype = DTYPES[plan.dtype]
    choices = []
    if facts.num_experts:
        sizes = facts.hidden_size, facts.moe_intermediate_size
        found = explain_experts(*sizes, dtype, plan.expert_format, chip.capability, there, plan.moe_backend)
        choices.append(Choice(f"experts ({plan.expert_format})", *found))
    cache = plan.block_size, plan.attention_backend, plan.kv_cache_dtype == "fp8"
    attention = explain_attention(facts, dtype, chip.capability, there, *cache)
    return [*choices, Choice("attention", *attention)]


def _graphs(plan: Plan) -> Choice:
    verdicts = {
        name: not_captured(name) or "ok"
        for name in dict.fromkeys(split_pair(plan.all2all_backend))
        if plan.cudagraph_mode != "none"
    }
    return Choice("graphs", plan.cudagraph_mode, {f"{name} in a full graph": why for name, why in verdicts.items()})


def _memory(plan: Plan, numbers: ModelNumbers, gpu: Gpu, part: float | None) -> dict[str, int]:
    size = 4 if plan.dtype == "float32" else 2
    cache = cache_bytes(plan, numbers.cache_spec(plan.dtype, plan.kv_cache_dtype == "fp8"))
    weights = plan.rank_bytes - sum(cache.values())
    others = (numbers.weight_bytes - numbers.expert_bytes) * size // (4 if numbers.dtype == "float32" else 2)
    usable = int(gpu.memory * (part or GPU_MEMORY_PART))
    return {
        "attention, embeddings and other weights": min(others, weights),
        f"experts ({plan.slots_per_rank} slots in each of {numbers.num_moe_layers} layers)": max(0, weights - others),
        **{f"KV cache, {name}": num_bytes for name, num_bytes in cache.items()},
        "graphs (an estimate that is kept free)": plan.graph_bytes,
        "free below the limit": usable - plan.rank_bytes - plan.graph_bytes,
        f"activations, libraries ({1 - (part or GPU_MEMORY_PART):.0%})": gpu.memory - usable,
    }
