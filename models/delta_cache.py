"""What a layer with the gated delta rule keeps of a sequence (layers/gated_delta.py). Free of torch."""

from __future__ import annotations

from cache.spec import CacheGroup, Field


def delta_group(
    layers: tuple[int, ...],
    taps: int,
    channels: int,
    state: tuple[int, int, int],
    decay_size: int,
    dtype: str,
    kept_drafts: int,
) -> CacheGroup:
    """The last inputs of the convolution, the states, and what is projected of drafts. state: heads, widths of a key
    and of a value; decay_size: of a token's decays; kept_drafts: the most that a step may have of a sequence."""
    fields = [Field("tail", (taps - 1, channels), dtype), Field("state", state, "float32")]
    if kept_drafts:
        sizes = {"draft_qkv": channels, "draft_beta": state[0], "draft_decay": decay_size}
        fields += [Field(name, (kept_drafts, size), dtype) for name, size in sizes.items()]
    return CacheGroup("state", layers, tuple(fields))
