"""What is decided about the way tokens travel to their experts, beside which backend carries them. Standard library
only."""

from __future__ import annotations

from dataclasses import replace

from configs.engine import EngineConfig, Plan

HOST_BACKENDS = ("local", "gloo", "shm", "shm_padded")  # of ep/table.py, those for ranks without GPUs


def check_host_backend(asked: str, num_ranks: int, num_experts: int) -> None:
    """asked: "auto", a name, or two as a+b: for steps with many tokens and for those with few. Raises ValueError."""
    if asked == "auto":
        return
    parts = asked.split("+")
    for part in parts:
        if part not in HOST_BACKENDS or len(parts) > 2:
            raise ValueError(
                f"all2all_backend {asked!r} is unknown; one of auto, {', '.join(HOST_BACKENDS)}, or two as a+b"
            )
    if "local" in parts and num_ranks > 1 and num_experts:
        raise ValueError(f"all2all_backend 'local' serves one rank, but data_parallel_size is {num_ranks}")
    if len({part.removesuffix("_padded") for part in parts}) > 1:
        raise ValueError(f"all2all_backend {asked!r}: the two join their ranks in different ways")


def with_dispatch(plan: Plan, config: EngineConfig) -> Plan:
    """The same plan with the form in which rows travel to their experts."""
    rows, why = plan.dispatch_rows, "rows travel as they are"
    if plan.all2all_backend == "local":
        why = "no row travels"
    elif config.dispatch_dtype == "fp8":
        rows, why = "fp8", "as asked"
    elif config.dispatch_dtype == "bf16":
        why = "as asked: as they are"
    elif plan.device == "cuda" and plan.expert_format == "fp8":
        rows, why = "fp8", "the experts' kernels would round them to FP8 anyway; so half the bytes travel"
    return replace(plan, dispatch_rows=rows, reasons={**plan.reasons, "dispatch_rows": why})
