"""What is decided about the cache: how it is kept, and how much of every group a rank has. Standard library only."""

from __future__ import annotations

from cache.spec import CacheSizes, CacheSpec, bytes_per_token, cache_sizes, fixed_bytes
from configs.engine import Dtype, KvCacheDtype, Plan
from configs.machine import ModelNumbers

CHECKPOINTS_PER_SEQUENCE = 2  # states that are kept for the prefix cache, by --max-num-seqs


def kept_cache(model: ModelNumbers, dtype: Dtype, asked: KvCacheDtype, why: dict[str, str]) -> CacheSpec:
    """The cache groups of the model. Raises ValueError where the cache cannot be what was asked for."""
    try:
        spec = model.cache_spec(dtype, asked == "fp8")
    except ValueError as error:
        raise ValueError(f"kv_cache_dtype {asked}: {error}") from error
    why["kv_cache_dtype"] = "the dtype of the model" if asked == "auto" else "as asked; rotated keys stay in bfloat16"
    return spec


def num_checkpoints(plan: Plan) -> int:
    return CHECKPOINTS_PER_SEQUENCE * plan.max_num_seqs if plan.enable_prefix_caching else 0


def planned_sizes(plan: Plan, spec: CacheSpec) -> CacheSizes:
    """How much of every group a rank of this plan has."""
    in_flight = 2 if plan.async_scheduling else 1
    limits = plan.max_num_seqs, plan.max_num_batched_tokens, in_flight, num_checkpoints(plan)
    return cache_sizes(spec, plan.block_size, plan.num_kv_blocks, *limits)


def bytes_beside_blocks(spec: CacheSpec, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """At most: what windows and states take, which does not grow with the length of sequences."""
    limits = max_num_seqs, max_num_batched_tokens, 2, CHECKPOINTS_PER_SEQUENCE * max_num_seqs
    return fixed_bytes(spec, cache_sizes(spec, block_size, 1 << 40, *limits))


def fitting_sequences(
    spec: CacheSpec, block_size: int, most: int, max_num_batched_tokens: int, room: int, why: dict[str, str]
) -> int:
    """`most`, halved until what so many sequences keep beside blocks takes no more than half of `room` bytes."""
    fitting = most
    while fitting > 1 and 2 * bytes_beside_blocks(spec, block_size, fitting, max_num_batched_tokens) > room:
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
