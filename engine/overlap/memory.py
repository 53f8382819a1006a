"""Where a plan's measurements of overlap are remembered, and what is. No torch: `moesaic explain` prints it."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from configs.engine import Plan
from configs.machine import measured_here
from dbo.memory import Remembered, file_of, recall
from dbo.threshold import NEVER


def with_memory(plan: Plan, folder: Path) -> Plan:
    """The plan with the file in `folder` for what its ranks measure, and with what is there now as the reason; a plan
    that measures nothing as it is."""
    dbo = plan.dbo
    if dbo is None or (dbo.decode_tokens is not None and dbo.prefill_tokens is not None):
        return plan
    file = file_of(folder, _key(plan))
    found = recall(file)
    source = "measured when no rank has work, and then remembered" if found is None else _source(found)
    given = {"decode": dbo.decode_tokens, "prompt": dbo.prefill_tokens}
    asked = [f"from {tokens} {kind} tokens as asked" for kind, tokens in given.items() if tokens is not None]
    reasons = {**plan.reasons, "dbo": "; ".join(["where it pays", *asked, source])}
    return replace(plan, dbo=replace(dbo, memory=str(file)), reasons=reasons)


def _key(plan: Plan) -> dict[str, str | int]:
    """Everything that the times depend on, as far as it can be known before the ranks run."""
    assert plan.dbo is not None
    return {
        **measured_here(),
        "model": plan.model_path,
        "dtype": plan.dtype,
        "experts": plan.expert_format,
        "slots": plan.slots_per_rank,
        "ranks": plan.data_parallel_size,
        "local_ranks": plan.data_parallel_size_local,
        "backend": plan.all2all_backend,
        "device": plan.device,
        "threads": plan.threads_per_rank,
        "kernels": plan.native_kernels,
        "parts": plan.dbo.num_ubatches,
        "decode": plan.dbo.decode_tokens or 0,
        "prefill": plan.dbo.prefill_tokens or 0,
        "tokens": plan.max_num_batched_tokens,
        "sequences": plan.max_num_seqs,
    }


def _source(found: Remembered) -> str:
    parts = []
    kinds = (("decodes", found.crossover.decode, found.decode), ("prompts", found.crossover.prefill, found.prefill))
    for name, tokens, samples in kinds:
        text = f"{name} {f'from {tokens} tokens' if tokens < NEVER else 'never'}"
        if samples:
            last = max(samples, key=lambda sample: sample.tokens)
            whole, waited, split = (f"{1e3 * value:.3g}" for value in (last.whole, last.exchange, last.split))
            text += f" (at {last.tokens} a layer takes {whole} ms, of which it waits {waited}, and split {split})"
        parts.append(text)
    return f"remembered: {', '.join(parts)}"
