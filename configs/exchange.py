"""What is decided about the way tokens travel to their experts, beside which backend carries them.
Without torch."""

from __future__ import annotations

from msgspec.structs import replace

from configs.engine import EngineConfig, Plan
from configs.formats import weight_item

SHARED_HEAD_BYTES = 32 << 20  # of smaller ones two ranks save a fraction of a millisecond (docs/all2all.md)
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


def with_vocab_parallel(plan: Plan, asked: str, num_weights: int) -> Plan:
    """The same plan with whether ranks share their head. num_weights: of it. Raises ValueError."""
    num_bytes = int(num_weights * weight_item(plan.linear_format, plan.dtype))
    cannot = ""
    if not plan.num_experts:
        cannot = "ranks of a dense model work each alone"
    elif plan.device != "cpu":
        cannot = "ranks with a GPU have the whole head each"
    elif not {part.removesuffix("_padded") for part in plan.all2all_backend.split("+")} <= {"local", "shm"}:
        cannot = f"ranks that exchange by {plan.all2all_backend!r} do not share the memory for it"
    if cannot and asked == "on":
        raise ValueError(f"vocab_parallel 'on': {cannot}")
    shared, why = asked == "on", "as asked"
    if asked == "auto":
        shared = not cannot and num_bytes >= SHARED_HEAD_BYTES
        why = cannot or (
            f"the head has {num_bytes >> 20} MiB: ranks, where there are several, read a part of it each from "
            f"{SHARED_HEAD_BYTES >> 20} MiB on"
        )
        if shared and plan.speculation is not None and plan.speculation.model_drafts:
            shared, why = False, "the best tokens come with the passes of the layer that drafts"
    return replace(plan, vocab_parallel=shared, reasons={**plan.reasons, "vocab_parallel": why})
