"""EngineConfig -> Plan: every choice made once, with its reason. Without torch.

`moesaic explain` prints the reasons; nothing is decided anywhere else.
"""

from __future__ import annotations

from cache.spec import CacheSpec, bytes_per_token, state_groups
from configs.cache import block_bytes, blocks_within, cache_bytes, fitting_sequences, kept_cache, state_bytes
from configs.checks import checked, fitting
from configs.dbo import plan_dbo
from configs.engine import MAX_RANKS, Dtype, EngineConfig, Frontend, Plan
from configs.eplb import plan_eplb
from configs.exchange import with_dispatch
from configs.formats import as_kept, expert_format, linear_format
from configs.gpu import GPU_MEMORY_PART, with_graphs
from configs.graph_memory import with_graph_memory
from configs.implied import fixed_order
from configs.machine import Machine, ModelNumbers
from configs.store import plan_store, with_bytes
from configs.threads import pin_ranks, spin_threads

MEBI = 1 << 20
THREADS_PER_CORE = 16  # more of a rank's threads than this only take turns
DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_NUM_SEQS = 256
DEFAULT_BLOCK_SIZE = 16
CPU_MEMORY_PART = 0.5  # a CPU's memory is also everybody else's
PART_BESIDE_WEIGHTS = 0.25  # of a CPU's memory, for the cache beside weights that take more than a third of it
WEIGHTS_PART = 2 / 3  # spare expert slots may not fill more of our memory than this together with all other weights
SMALL_MODEL_BYTES = 64 * MEBI
RANKS_PER_CORE = 4  # to which a server may grow: beyond, ranks only wait for each other


# Fields of a plan that are those of the config.
_AS_ASKED = [
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "scheduling_policy",
    "mla_prefill",
    "deterministic",
    "logprobs_mode",
    "max_logprobs",
    "logits_processors",
    "exchange_timeout",
    "wait_warning_seconds",
    "kv_cache_dtype",
    "attention_backend",
    "moe_backend",
]


def resolve(config: EngineConfig, model: ModelNumbers, machine: Machine, frontend: Frontend = Frontend.SERVER) -> Plan:
    """ValueError names field and limit when a wish cannot be met."""
    why, ranks = machine.reasons, config.data_parallel_size
    config = fixed_order(checked(config, model, machine), machine, why)
    dtype = _dtype(config, model, machine, why)
    experts = expert_format(config, model, machine, dtype, why)
    linears = linear_format(config.quantization, model, machine, dtype, why)
    model = as_kept(model, dtype, experts, linears)
    spec = kept_cache(model, dtype, config.kv_cache_dtype, why)
    block_size = _choose(why, "block_size", config.block_size, DEFAULT_BLOCK_SIZE, "small blocks share more prefixes")
    once, most = _weights(model, dtype, 1, 0, 1), _weights_room(config, machine)
    stores = plan_store(config, model, machine, frontend is Frontend.IN_PROCESS, once, most, why)
    slots = _slots(config, model, machine, dtype, stores, why)
    max_num_seqs = _num_seqs(config, spec, room := _room(config, model, machine, dtype, slots, stores), why)
    max_model_len, num_blocks = _cache(config, model, spec, block_size, max_num_seqs, room, why)
    threads = _threads(config, model, machine, frontend is not Frontend.SERVER and dtype == "bfloat16", why)
    dbo = config.enable_dbo, config.ubatch_size, config.dbo_decode_token_threshold, config.dbo_prefill_token_threshold
    eplb, why["eplb"] = plan_eplb(config.eplb, config.enable_eplb, model.num_experts, ranks, slots)
    pin, why["pin_ranks"] = pin_ranks(ranks, threads, machine.cores, _is_small(model, machine), machine.restricted)
    spin, why["spin_threads"] = spin_threads(ranks, threads, machine.cores)
    plan = Plan(
        model_path=model.path,
        tokenizer_path=model.tokenizer_path,
        hf_overrides=config.hf_overrides,
        served_model_names=config.served_model_name or (model.name,),
        architecture=model.architecture,
        device=machine.device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_batched_tokens(config, max_model_len, why),
        block_size=block_size,
        num_kv_blocks=num_blocks,
        prefill_cadence=_prefill_cadence(config, model, machine, threads, why),
        async_scheduling=_async_scheduling(config, model, machine, threads, why),
        data_parallel_size=ranks,
        all2all_backend=_backend(config, model, machine, why),
        num_experts=model.num_experts,
        slots_per_rank=slots,
        eplb=eplb,
        dbo=plan_dbo(*dbo, model.num_experts, ranks, why),
        threads_per_rank=threads,
        max_ranks=_max_ranks(config, machine, why),
        ranks_per_machine=0 if machine.gpu is None else machine.gpu.count,
        pin_ranks=pin,
        spin_threads=spin,
        native_kernels=machine.native_kernels,
        native_choice=machine.native_choice,
        expert_format=experts,
        linear_format=linears,
        **{name: getattr(config, name) for name in _AS_ASKED},
        reasons=why,
    )
    weights = _weights(model, dtype, ranks, slots, stores)
    plan = fitting(with_bytes(plan, stores, weights, sum(cache_bytes(plan, spec).values())), config, machine)
    return with_graph_memory(with_graphs(with_dispatch(plan, config), config, machine.exchange), config, model, machine)


def _max_ranks(config: EngineConfig, machine: Machine, why: dict[str, str]) -> int:
    why.setdefault("rank_bytes", "its weights and its cache")
    why["graph_bytes"] = "nothing is captured"
    if machine.gpu is not None:
        why["max_ranks"] = why["ranks_per_machine"] = (
            f"each rank has a GPU of its own; a machine has {machine.gpu.count}"
        )
        return max(config.data_parallel_size, machine.gpu.count)
    by_cores = RANKS_PER_CORE * machine.cores
    why["max_ranks"] = f"{RANKS_PER_CORE} ranks per core on {machine.cores} core(s), and no more than {MAX_RANKS}"
    return max(config.data_parallel_size, min(by_cores, MAX_RANKS))


def _item_size(dtype: Dtype) -> int:
    return 4 if dtype == "float32" else 2


def _prefill_cadence(
    config: EngineConfig, model: ModelNumbers, machine: Machine, threads: int, why: dict[str, str]
) -> bool:
    if config.prefill_cadence != "auto":
        why["prefill_cadence"] = "as asked"
        return config.prefill_cadence == "on"
    ranks = config.data_parallel_size
    own = machine.gpu is not None or ranks * threads <= machine.cores
    several = ranks > 1 and model.num_experts > 0
    reason = "a step takes as long as its slowest rank: prompts come to all ranks in the same steps"
    if not several:
        reason = "no rank waits for the prompts of others"
    elif not own:
        reason = (
            f"{ranks} ranks of {threads} thread(s) share {machine.cores} core(s): prompts at once take turns anyway"
        )
    why["prefill_cadence"] = reason
    return several and own


def _choose(why: dict[str, str], name: str, asked: int | None, default: int, reason: str) -> int:
    why[name] = reason if asked is None else "as asked"
    return default if asked is None else asked


def _dtype(config: EngineConfig, model: ModelNumbers, machine: Machine, why: dict[str, str]) -> Dtype:
    if config.dtype == "float16":
        why["dtype"] = "float16 as asked: no kernel computes in it here, and float32 holds all its values"
        return "float32"
    if config.dtype != "auto":
        why["dtype"] = "as asked"
        return config.dtype
    if model.dtype == "float32":
        why["dtype"] = "the checkpoint's"
        return "float32"
    if _is_small(model, machine):
        why["dtype"] = (
            f"the weights take less than {SMALL_MODEL_BYTES // MEBI} MiB: on a CPU a step in float32 takes less than a "
            "millisecond more, and is exact"
        )
        return "float32"
    if not machine.fast_bfloat16:
        why["dtype"] = "this CPU has no bfloat16 arithmetic, and there are no native kernels for it"
        return "float32"
    why["dtype"] = "the checkpoint's"
    return "bfloat16"


def _room(
    config: EngineConfig, model: ModelNumbers, machine: Machine, dtype: Dtype, slots: int, stores: int
) -> tuple[int, str]:
    """Bytes that a rank's cache may take, and what says so."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, f"{config.kv_cache_memory_bytes} bytes as asked"
    part = config.gpu_memory_utilization or _memory_part(machine)
    weights = _weights(model, dtype, config.data_parallel_size, slots, stores)
    free, ranks = machine.free_memory, config.data_parallel_size
    room, left = max(0, int(free * part) - weights), max(0, int((free - weights) * PART_BESIDE_WEIGHTS))
    if room < left and config.gpu_memory_utilization is None and machine.gpu is None:
        source = f"{PART_BESIDE_WEIGHTS:.0%} of what {weights // MEBI} MiB of weights leave of {free // MEBI} MiB free"
        return left // ranks, f"{source}, over {ranks} rank(s)"
    source = f"{part:.0%} of {free // MEBI} MiB free, less {weights // MEBI} MiB of weights, over {ranks} rank(s)"
    return room // ranks, source


def _num_seqs(config: EngineConfig, spec: CacheSpec, room: tuple[int, str], why: dict[str, str]) -> int:
    """The default, or fewer where states of so many sequences would fill the memory of the cache."""
    most = _choose(why, "max_num_seqs", config.max_num_seqs, DEFAULT_NUM_SEQS, "the default")
    if config.max_num_seqs is not None or config.num_kv_blocks is not None or not state_groups(spec):
        return most
    return fitting_sequences(spec, most, room[0], why)


def _cache(
    config: EngineConfig,
    model: ModelNumbers,
    spec: CacheSpec,
    block_size: int,
    num_seqs: int,
    room: tuple[int, str],
    why: dict[str, str],
) -> tuple[int, int]:
    """max_model_len and the number of KV blocks of a rank, which depend on each other. room: `_room`."""
    bytes_per_block = block_bytes(spec, block_size)
    limits = spec, block_size, num_seqs, config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    wanted_len = config.max_model_len or model.usual_len
    full_blocks = -(-wanted_len // block_size)
    free, source = room
    if config.num_kv_blocks is not None:
        blocks, source = config.num_kv_blocks, "as asked"
    else:
        blocks = blocks_within(free, *limits)
        if config.kv_cache_memory_bytes is None:
            blocks = min(blocks, full_blocks * num_seqs)
            source += f", and no more than {num_seqs} full sequences"
    if not bytes_per_token(spec):  # windows alone: nothing grows with the number of blocks
        blocks = min(blocks, full_blocks * num_seqs)
    if blocks < 1:
        beside = state_bytes(spec, num_seqs)
        others = f", less {beside} for the states of {num_seqs} sequences (max_num_seqs)" if beside else ""
        raise ValueError(
            f"no room for a KV block of {bytes_per_block} bytes: {source}{others}; set kv_cache_memory_bytes or "
            "num_kv_blocks"
        )
    if blocks < full_blocks:
        if config.max_model_len is not None:
            raise ValueError(
                f"max_model_len {wanted_len} needs {full_blocks} KV blocks of {block_size} tokens, "
                f"but there are {blocks} ({source})"
            )
        wanted_len = blocks * block_size
        why["max_model_len"] = f"all that {blocks} KV blocks hold; the model allows {model.usual_len}"
    else:
        why["max_model_len"] = "as asked" if config.max_model_len else model.usual_reason
    why["num_kv_blocks"] = f"{source}; {blocks * bytes_per_block / MEBI:.0f} MiB per rank"
    return wanted_len, blocks


def _memory_part(machine: Machine) -> float:
    return CPU_MEMORY_PART if machine.gpu is None else GPU_MEMORY_PART


def _batched_tokens(config: EngineConfig, max_model_len: int, why: dict[str, str]) -> int:
    if config.enable_chunked_prefill:
        return _choose(
            why, "max_num_batched_tokens", config.max_num_batched_tokens, DEFAULT_BATCHED_TOKENS, "the default"
        )
    asked = config.max_num_batched_tokens
    if asked is not None and asked < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens {asked} is below max_model_len {max_model_len}: a prompt must fit into one step "
            "when chunked prefill is off"
        )
    default = max(DEFAULT_BATCHED_TOKENS, max_model_len)
    return _choose(why, "max_num_batched_tokens", asked, default, "a whole prompt per step, as chunked prefill is off")


def _is_small(model: ModelNumbers, machine: Machine) -> bool:
    """So small that an operation takes microseconds: handing it to a second thread costs more than it saves."""
    return machine.device == "cpu" and model.weight_bytes < SMALL_MODEL_BYTES


def _threads(config: EngineConfig, model: ModelNumbers, machine: Machine, share: bool, why: dict[str, str]) -> int:
    """share: also a small model's operations, as far as they are long: its head is (native kernels decide by size)."""
    ranks = config.data_parallel_size
    default, reason = max(1, machine.cores // ranks), f"{machine.cores} core(s) over {ranks} rank(s)"
    if _is_small(model, machine) and not share:
        default, reason = 1, "the model is small: what a second thread would save is less than the front needs"
    most = THREADS_PER_CORE * machine.cores
    if config.threads_per_rank is not None and config.threads_per_rank > most:
        raise ValueError(
            f"threads_per_rank must be at most {most}, {THREADS_PER_CORE} for each of {machine.cores} core(s), "
            f"not {config.threads_per_rank}"
        )
    return _choose(why, "threads_per_rank", config.threads_per_rank, default, reason)


def _backend(config: EngineConfig, model: ModelNumbers, machine: Machine, why: dict[str, str]) -> str:
    if not model.num_experts or config.data_parallel_size == 1:
        why["all2all_backend"] = "no expert lives on another rank"
        return "local"
    if machine.exchange is not None:
        why["all2all_backend"] = machine.exchange.why
        return machine.exchange.name
    if config.all2all_backend != "auto":
        why["all2all_backend"] = "as asked"
        return config.all2all_backend
    if machine.shared_memory:
        why["all2all_backend"] = "ranks of one machine without a GPU"
        return "shm"
    why["all2all_backend"] = "ranks without a GPU; shared memory is tried on Linux on x86-64 only, unless asked for"
    return "gloo"


def _weights(model: ModelNumbers, dtype: Dtype, ranks: int, slots: int, stores: int) -> int:
    """Bytes of the weights of all ranks together. stores: on so many machines; 0: each rank has its own."""
    scale = _item_size(dtype) / _item_size(model.dtype)
    if stores:
        return stores * int(model.weight_bytes * scale)
    copies = ranks * slots / model.num_experts if model.num_experts else 1.0
    return int(((model.weight_bytes - model.expert_bytes) * ranks + model.expert_bytes * copies) * scale)


def _weights_room(config: EngineConfig, machine: Machine) -> int:
    """Bytes that weights may take where there is a choice, so that the cache has room."""
    return int(machine.free_memory * (config.gpu_memory_utilization or _memory_part(machine)) * WEIGHTS_PART)


def _slots(
    config: EngineConfig, model: ModelNumbers, machine: Machine, dtype: Dtype, stores: int, why: dict[str, str]
) -> int:
    """Enough that the ranks which are left can hold every expert when one is lost, unless told otherwise."""
    if not model.num_experts:
        why["slots_per_rank"] = "a dense model"
        return 0
    ranks, experts = config.data_parallel_size, model.num_experts
    fewest = -(-experts // ranks)
    if stores:
        why["slots_per_rank"] = "a slot is a mapping of the store: every rank has every expert at hand"
        return experts
    if config.num_redundant_experts is not None:
        why["slots_per_rank"] = f"{experts} experts + {config.num_redundant_experts} redundant over {ranks} rank(s)"
        return -(-(experts + config.num_redundant_experts) // ranks)
    if ranks == 1:
        why["slots_per_rank"] = "one rank holds every expert"
        return fewest
    spare = -(-experts // (ranks - 1))
    needed = _weights(model, dtype, ranks, spare, stores)
    room = _weights_room(config, machine)
    if needed > room:
        why["slots_per_rank"] = (
            f"{experts} experts over {ranks} ranks; that one rank may be lost would take {spare} slots and "
            f"{needed // MEBI} MiB of weights, more than the {room // MEBI} MiB that leave room for the cache"
        )
        if config.enable_eplb and _weights(model, dtype, ranks, fewest + 1, stores) <= room:
            why["slots_per_rank"] += "; one spare slot per rank, so that the load of hot experts can be shared"
            return fewest + 1
        return fewest
    why["slots_per_rank"] = f"one rank may be lost: {ranks - 1} can hold all {experts} experts"
    return spare


def _async_scheduling(
    config: EngineConfig, model: ModelNumbers, machine: Machine, threads: int, why: dict[str, str]
) -> bool:
    """benchmarks/bench_overhead.py runs both: on a small model there is nothing to gain."""
    if config.async_scheduling is not None:
        why["async_scheduling"] = "as asked"
        return config.async_scheduling
    if _is_small(model, machine):
        why["async_scheduling"] = "the model is small: a step is as short as its schedule"
        return False
    spare = machine.device != "cpu" or machine.cores > config.data_parallel_size * threads
    why["async_scheduling"] = (
        "scheduling runs beside the step" if spare else "every core computes: a second thread would only take turns"
    )
    return spare
