"""What a scheduler's sizes must be."""

from __future__ import annotations


def check_limits(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, chunked: bool, policy: str, async_depth: int
) -> None:
    """ValueError names the one that cannot be. chunked: prompts may be cut."""
    if max_num_seqs < 1 or max_num_batched_tokens < 1:
        raise ValueError(
            f"max_num_seqs ({max_num_seqs}) and max_num_batched_tokens ({max_num_batched_tokens}) must be at least 1"
        )
    if not chunked and max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_model_len ({max_model_len}) "
            "when chunked prefill is off"
        )
    if policy not in ("fcfs", "priority"):
        raise ValueError(f"scheduling policy {policy!r} is not one of fcfs, priority")
    if async_depth not in (0, 1):
        raise ValueError(f"async_depth ({async_depth}) must be 0 or 1")
