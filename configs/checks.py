"""What a configuration may not ask for: refused before a process is started, with the field and its limit. Standard
library only."""

from __future__ import annotations

from configs.engine import MAX_RANKS, EngineConfig, Plan
from configs.eplb import EplbConfig, check_eplb
from configs.exchange import check_host_backend
from configs.machine import Machine, ModelNumbers
from configs.store import STANDBY_BYTES

ATTENTION_BACKENDS = ("torch", "triton", "flashinfer", "flashmla")  # of mla/requirements.py
MOE_BACKENDS = ("native", "torch", "triton", "deepgemm", "flashinfer")  # of moe_kernels/backends.py
MOST = {"max_num_seqs": 1 << 20, "max_num_batched_tokens": 1 << 20, "block_size": 1 << 16, "threads_per_rank": 1024}
LONGEST_EXCHANGE = 86400.0


def checked(config: EngineConfig, model: ModelNumbers, machine: Machine) -> EngineConfig:
    """The same. ValueError names the field and its limit."""
    positive = {
        "data_parallel_size": config.data_parallel_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
        "num_kv_blocks": config.num_kv_blocks,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "threads_per_rank": config.threads_per_rank,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
        if value is not None and value > MOST.get(name, value):
            raise ValueError(f"{name} must be at most {MOST[name]}, not {value}")
    if config.dtype == "float16" and machine.gpu is not None:
        raise ValueError("dtype float16: the GPU kernels compute in bfloat16 or float32")
    if not all(config.served_model_name):
        raise ValueError("served_model_name must not be empty")
    if not 0 < config.exchange_timeout <= LONGEST_EXCHANGE:
        raise ValueError(
            f"exchange_timeout must be above 0 and at most {LONGEST_EXCHANGE:g} seconds, not {config.exchange_timeout}"
        )
    if not 0 <= config.wait_warning_seconds <= LONGEST_EXCHANGE:
        raise ValueError(
            f"wait_warning_seconds must be 0 to {LONGEST_EXCHANGE:g}, not {config.wait_warning_seconds} (0: never)"
        )
    if config.num_redundant_experts is not None and config.num_redundant_experts < 0:
        raise ValueError(f"num_redundant_experts must be at least 0, not {config.num_redundant_experts}")
    check_eplb(config.eplb)
    if config.eplb != EplbConfig() and not config.enable_eplb:
        raise ValueError("eplb_config is given, but experts are not balanced: add --enable-eplb (enable_eplb=True)")
    if config.max_logprobs < -1:
        raise ValueError(f"max_logprobs must be at least -1, not {config.max_logprobs}")
    part = config.gpu_memory_utilization
    if part is not None and not 0 < part <= 1:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], not {part}")
    _check_backend("attention_backend", config.attention_backend, ATTENTION_BACKENDS, ("torch",), machine)
    _check_backend("moe_backend", config.moe_backend, MOE_BACKENDS, ("native", "torch"), machine)
    if config.moe_backend == "native" and machine.gpu is None and machine.native_kernels == "none":
        raise ValueError(f"moe_backend 'native': {machine.native_reason}")
    if machine.gpu is None:
        if config.data_parallel_size > MAX_RANKS:
            raise ValueError(f"data_parallel_size must be at most {MAX_RANKS}, not {config.data_parallel_size}")
        check_host_backend(config.all2all_backend, config.data_parallel_size, model.num_experts)
    limit = model.context_limit or model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the model's limit of {limit} tokens: {model.context_reason}"
        )
    return config


def _check_backend(field: str, asked: str, names: tuple[str, ...], on_cpu: tuple[str, ...], machine: Machine) -> None:
    if asked == "auto":
        return
    if asked not in names:
        raise ValueError(f"{field} {asked!r:.100} is unknown; one of auto, {', '.join(names)}")
    if machine.gpu is None and asked not in on_cpu:
        raise ValueError(f"{field} {asked!r} needs a GPU (--device cuda); on a CPU: auto, {', '.join(on_cpu)}")


def fitting(plan: Plan, config: EngineConfig, machine: Machine) -> Plan:
    """The same. ValueError where the ranks' caches, as they were asked for, and their processes have no room on a
    CPU's machine."""
    ranks = plan.data_parallel_size
    needed = ranks * (plan.rank_bytes + STANDBY_BYTES) + machine.machines * plan.store_bytes
    if machine.gpu is not None or needed <= machine.free_memory:
        return plan
    asked = f"data_parallel_size {ranks}"
    for field in ("num_kv_blocks", "kv_cache_memory_bytes"):
        if getattr(config, field) is not None:
            asked = f"{field} {getattr(config, field)} in each of {ranks} rank(s)"
            break
    mebi = 1 << 20
    raise ValueError(
        f"{asked}: caches, weights and processes would take {needed // mebi} MiB, more than the "
        f"{machine.free_memory // mebi} MiB of memory that are free"
    )
