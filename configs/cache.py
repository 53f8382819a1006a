"""What is decided about the cache: how it is kept, and how much of every group a rank has. Without torch."""

from __future__ import annotations

from msgspec.structs import replace

from cache.spec import CacheSizes, CacheSpec, bytes_per_token, cache_sizes, fixed_bytes, state_groups
from configs.engine import Dtype, KvCacheDtype, Plan
from configs.machine import ModelNumbers

UNBOUNDED = 1 << 40  # blocks
RESUMED_BYTES = 512 << 20  # that a rank computes with: at 25 GB/s they are read in 0.02 s
CHECKPOINTS_PER_SEQUENCE = 2  # states that are kept for the prefix cache, by --max-num-seqs


def kept_cache(model: ModelNumbers, dtype: Dtype, asked: KvCacheDtype, why: dict[str, str]) -> CacheSpec:
    """The cache groups of the model. Raises ValueError where the cache cannot be what was asked for."""
    try:
        spec = model.cache_spec(dtype, asked == "fp8")
    except ValueError as error:
        raise ValueError(f"kv_cache_dtype {asked}: {error}") from error
    why["kv_cache_dtype"] = "the dtype of the model" if asked == "auto" else "as asked; rotated keys stay in bfloat16"
    return spec


def with_resumed_steps(plan: Plan, asked: str, spec: CacheSpec) -> Plan:
    """The same plan with whether steps that a loss breaks off go on at the layer where they were. Raises ValueError."""
    num_bytes, cannot = plan.store_bytes or plan.rank_bytes, ""
    if plan.device != "cpu":
        cannot = "the cache of a rank with a GPU ends with the rank"
    elif state_groups(spec):
        cannot = "a step writes the states of linear attention as it goes"
    if cannot and asked == "on":
        raise ValueError(f"resume_steps 'on': {cannot}")
    kept, why = asked == "on", "as asked"
    if asked == "auto":
        kept = not cannot and num_bytes >= RESUMED_BYTES
        why = cannot or f"a rank computes with {num_bytes >> 20} MiB; steps count as long from {RESUMED_BYTES >> 20} on"
    return replace(plan, resume_steps=kept, reasons={**plan.reasons, "resume_steps": why})


def num_checkpoints(plan: Plan) -> int:
    return CHECKPOINTS_PER_SEQUENCE * plan.max_num_seqs if plan.enable_prefix_caching else 0


def planned_sizes(plan: Plan, spec: CacheSpec) -> CacheSizes:
    """How much of every group a rank of this plan has."""
    in_flight = 2 if plan.async_scheduling else 1
    limits = plan.max_num_seqs, plan.max_num_batched_tokens, in_flight, num_checkpoints(plan)
    return cache_sizes(spec, plan.block_size, plan.num_kv_blocks, *limits)


def blocks_within(
    num_bytes: int, spec: CacheSpec, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """How many blocks of the paged groups so much memory has room for, beside what windows and states take. Where that
    is less than windows take at most, windows have as many blocks as the paged groups."""
    limits = max_num_seqs, max_num_batched_tokens, 2, CHECKPOINTS_PER_SEQUENCE * max_num_seqs
    most = cache_sizes(spec, block_size, UNBOUNDED, *limits)
    windows = sum(block_size * group.row_bytes for group in spec if group.kind == "window")
    left = num_bytes - fixed_bytes(spec, most) + most.num_window_blocks * windows
    paged = bytes_per_token(spec) * block_size
    blocks = max(0, left) // max(1, paged + windows)
    if not blocks or blocks < most.num_window_blocks:
        return blocks
    return (left - most.num_window_blocks * windows) // paged if paged else UNBOUNDED


def state_bytes(spec: CacheSpec, max_num_seqs: int) -> int:
    """What the states of so many sequences take, those for the prefix cache included."""
    states = tuple(state_groups(spec))
    return fixed_bytes(states, cache_sizes(states, 1, 0, max_num_seqs, 1, 2, CHECKPOINTS_PER_SEQUENCE * max_num_seqs))


def fitting_sequences(spec: CacheSpec, most: int, room: int, why: dict[str, str]) -> int:
    """`most`, halved until the states of so many sequences take no more than half of `room` bytes."""
    fitting = most
    while fitting > 1 and 2 * state_bytes(spec, fitting) > room:
        why["max_num_seqs"] = f"states of {fitting} sequences would take more than half of the cache's memory"
        fitting //= 2
    return fitting


def cache_bytes(plan: Plan, spec: CacheSpec) -> dict[str, int]:
    """Bytes of a rank by what they are for, as `explain` prints them."""
    sizes = planned_sizes(plan, spec)
    found: dict[str, int] = {}
    for group in spec:
        fields = ", ".join(field.name for field in group.fields)
        if group.kind == "state":
            name = f"{fields} of {len(group.layers)} layers, {sizes.num_records} records"
        else:
            window = f", window {group.window}" if group.window else ""
            name = (
                f"{fields} of {len(group.layers)} layers, {sizes.blocks_of(group)} blocks of "
                f"{sizes.block_size} tokens{window}"
            )
        found[name] = found.get(name, 0) + sizes.bytes_of(group)
    return found


def block_bytes(spec: CacheSpec, block_size: int) -> int:
    """What a block of the paged groups costs; at least 1, so that it can be divided by."""
    return max(1, bytes_per_token(spec) * block_size)
