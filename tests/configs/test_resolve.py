"""Every choice of `resolve`: what it decides on a given machine, why, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from made_up_caches import numbers_per_token
from msgspec import structs

import mla.requirements
import moe_kernels.backends
from cache.spec import CacheGroup, Field
from configs.cache import planned_sizes
from configs.checks import ATTENTION_BACKENDS, MOE_BACKENDS
from configs.engine import EngineConfig, Frontend
from configs.exchange import HOST_BACKENDS
from configs.machine import Machine, ModelNumbers
from configs.resolve import MEBI, resolve
from configs.store import with_cache
from ep.table import NAMES

MACHINE = Machine(device="cpu", cores=4, free_memory=8192 * MEBI, fast_bfloat16=True, shared_memory=True)
MODEL = ModelNumbers(
    path="/m",
    name="m",
    architecture="DeepseekV3ForCausalLM",
    max_position_embeddings=4096,
    num_experts=64,
    num_moe_layers=10,
    cache_spec=numbers_per_token(8192),
    weight_bytes=1000 * MEBI,
    expert_bytes=800 * MEBI,
    dtype="bfloat16",
)


def test_defaults() -> None:
    plan = resolve(EngineConfig(data_parallel_size=2), MODEL, MACHINE)
    assert (plan.dtype, plan.threads_per_rank, plan.all2all_backend, plan.slots_per_rank) == ("bfloat16", 2, "shm", 64)
    assert plan.num_experts == 64
    assert plan.max_model_len == 4096
    # half of the memory, less the weights, which the ranks share, over two ranks, in 256 KiB blocks
    assert plan.num_kv_blocks == (4096 * MEBI - 1000 * MEBI) // 2 // (8192 * 2 * 16)
    assert (plan.weight_store, plan.store_bytes) == (True, 1000 * MEBI)
    assert plan.rank_bytes == plan.num_kv_blocks * 8192 * 2 * 16
    for field in (
        "dtype",
        "max_model_len",
        "num_kv_blocks",
        "threads_per_rank",
        "all2all_backend",
        "slots_per_rank",
        "async_scheduling",
    ):
        assert plan.reasons[field]


def test_weights_that_take_half_of_the_memory() -> None:
    """The cache has a quarter of what they leave; an asked part of the memory is what was asked."""
    model = structs.replace(MODEL, weight_bytes=4200 * MEBI, expert_bytes=4000 * MEBI)
    plan = resolve(EngineConfig(data_parallel_size=2), model, MACHINE)
    assert plan.num_kv_blocks == (8192 - 4200) * MEBI // 4 // 2 // (8192 * 2 * 16)
    assert "25% of what 4200 MiB of weights leave of 8192 MiB free" in plan.reasons["num_kv_blocks"]
    with pytest.raises(ValueError, match=r"no room for a KV block.*50% of 8192 MiB free, less 4200 MiB of weights"):
        resolve(EngineConfig(data_parallel_size=2, gpu_memory_utilization=0.5), model, MACHINE)


def test_weights_stay_in_bfloat16_beneath_float32() -> None:
    """On a CPU with native kernels, where nothing else was asked for."""
    model = structs.replace(MODEL, in_bfloat16=True, linear_bytes=150 * MEBI)
    machine = structs.replace(MACHINE, native_kernels="avx2")

    def formats(model: ModelNumbers = model, machine: Machine = machine, **asked: Any) -> tuple[str, str]:
        plan = resolve(EngineConfig(**{"dtype": "float32", "data_parallel_size": 2, **asked}), model, machine)
        return plan.expert_format, plan.linear_format

    assert formats() == ("bf16", "bf16")
    assert formats(moe_backend="torch") == ("plain", "bf16")
    assert formats(dtype="bfloat16") == formats(MODEL) == formats(machine=MACHINE) == ("plain", "plain")
    assert formats(quantization="int8") == ("int8", "int8")
    plan = resolve(EngineConfig(dtype="float32", data_parallel_size=2), model, machine)
    assert plan.store_bytes == (800 + 150 + 2 * 50) * MEBI  # embeddings and norms are in float32


def test_a_store_on_each_machine_where_there_is_room() -> None:
    """For all weights as often, and for the cache; if not, ranks have their own."""
    two = structs.replace(MACHINE, shared_memory=False, machines=2)
    plan = resolve(EngineConfig(data_parallel_size=4), MODEL, two)
    assert (plan.weight_store, plan.store_bytes, plan.slots_per_rank) == (True, 1000 * MEBI, 64)
    assert plan.num_kv_blocks == (4096 * MEBI - 2000 * MEBI) // 4 // (8192 * 2 * 16)
    small = structs.replace(two, free_memory=5000 * MEBI)
    plan = resolve(EngineConfig(data_parallel_size=4), MODEL, small)
    assert (plan.weight_store, plan.store_bytes) == (False, 0) and plan.slots_per_rank < 64
    assert plan.reasons["weight_store"] == (
        "2 machines with all weights each would take 2000 MiB, more than the 1666 MiB that leave room for the cache"
    )


def test_states_take_half_of_the_memory_at_most() -> None:
    """Where the number of sequences is not asked for."""
    state = CacheGroup("state", (0,), (Field("state", (2 * MEBI,), "float32"),))
    model = structs.replace(MODEL, cache_spec=lambda dtype, fp8=False: (state, *numbers_per_token(8192)(dtype)))
    plan = resolve(EngineConfig(), model, MACHINE)
    assert plan.max_num_seqs == 32  # 5 records of 8 MiB for each, of 4096 - 1000 MiB
    assert "states of 64 sequences" in plan.reasons["max_num_seqs"]
    assert planned_sizes(plan, model.cache_spec("bfloat16")).num_records <= 1 + 5 * 32
    assert resolve(EngineConfig(max_num_seqs=64), model, MACHINE).max_num_seqs == 64
    with pytest.raises(ValueError, match=r"less \d+ for the states of 256 sequences \(max_num_seqs\)"):
        resolve(EngineConfig(max_num_seqs=256), model, MACHINE)


@pytest.mark.parametrize(
    ("model", "machine", "dtype"),
    [
        ({"dtype": "float32"}, {}, "float32"),
        ({}, {"fast_bfloat16": False}, "float32"),
        ({"weight_bytes": 10 * MEBI, "expert_bytes": 8 * MEBI}, {}, "float32"),
        ({}, {}, "bfloat16"),
    ],
)
def test_dtype(model: dict[str, Any], machine: dict[str, Any], dtype: str) -> None:
    plan = resolve(EngineConfig(), structs.replace(MODEL, **model), structs.replace(MACHINE, **machine))
    assert plan.dtype == dtype


@pytest.mark.parametrize(
    ("ranks", "threads", "change", "pinned", "spinning"),
    [
        (1, None, {}, False, True),
        (2, None, {}, True, True),
        (4, None, {}, True, False),
        (2, 1, {}, False, False),
        (3, 2, {}, False, False),
        (2, None, {"cores": 5}, True, True),
        (2, None, {"restricted": True}, False, True),
    ],
)
def test_cores_and_waiting(
    ranks: int, threads: int | None, change: dict[str, Any], pinned: bool, spinning: bool
) -> None:
    config = EngineConfig(data_parallel_size=ranks, threads_per_rank=threads)
    plan = resolve(config, MODEL, structs.replace(MACHINE, **change))
    assert (plan.pin_ranks, plan.spin_threads) == (pinned, spinning)
    assert plan.reasons["pin_ranks"] and plan.reasons["spin_threads"]


def test_ranks_of_a_small_model_are_not_pinned() -> None:
    small = structs.replace(MODEL, weight_bytes=10 * MEBI, expert_bytes=8 * MEBI)
    assert not resolve(EngineConfig(data_parallel_size=4), small, MACHINE).pin_ranks


def test_a_short_cache_shortens_the_context_and_says_so() -> None:
    plan = resolve(EngineConfig(num_kv_blocks=100), MODEL, MACHINE)
    assert plan.max_model_len == 1600
    assert "100 KV blocks" in plan.reasons["max_model_len"]


def test_no_more_blocks_than_the_sequences_can_use() -> None:
    plan = resolve(EngineConfig(max_num_seqs=1, max_model_len=160), MODEL, MACHINE)
    assert plan.num_kv_blocks == 10


def test_redundant_experts_round_up() -> None:
    plan = resolve(EngineConfig(data_parallel_size=3, num_redundant_experts=5), MODEL, MACHINE)
    assert plan.slots_per_rank == 23


@pytest.mark.parametrize(
    ("options", "free", "slots", "reason"),
    [
        ({"data_parallel_size": 1}, 8192, 64, "one rank holds every expert"),
        ({"data_parallel_size": 3}, 8192, 32, "one rank may be lost: 2 can hold all 64 experts"),
        ({"data_parallel_size": 4}, 8192, 22, "one rank may be lost: 3 can hold all 64 experts"),
        ({"data_parallel_size": 2}, 5000, 32, "64 slots and 2000 MiB"),  # the memory does not permit it
        ({"data_parallel_size": 2, "num_redundant_experts": 0}, 8192, 32, "0 redundant"),
    ],
)
def test_slots_for_a_lost_rank(options: dict[str, Any], free: int, slots: int, reason: str) -> None:
    machine = structs.replace(MACHINE, free_memory=free * MEBI, shared_memory=False)
    plan = resolve(EngineConfig(**options), MODEL, machine)
    assert plan.slots_per_rank == slots and not plan.weight_store
    assert reason in plan.reasons["slots_per_rank"]


def test_dense_models_exchange_nothing() -> None:
    plan = resolve(EngineConfig(data_parallel_size=2), structs.replace(MODEL, num_experts=0, expert_bytes=0), MACHINE)
    assert (plan.slots_per_rank, plan.all2all_backend) == (0, "local")


def test_whole_prompts_need_a_budget_as_long_as_the_context() -> None:
    assert resolve(EngineConfig(enable_chunked_prefill=False), MODEL, MACHINE).max_num_batched_tokens == 4096
    with pytest.raises(ValueError, match="max_num_batched_tokens 100 is below max_model_len 4096"):
        resolve(EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=100), MODEL, MACHINE)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data_parallel_size", 0, "data_parallel_size must be at least 1"),
        ("max_model_len", 5000, "limit of 4096 tokens: max_position_embeddings"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1"),
        ("all2all_backend", "pigeon", "one of auto, local, gloo, shm"),
        ("max_num_seqs", 10**13, "max_num_seqs must be at most 1048576, not 10000000000000"),
        ("threads_per_rank", 9999, "threads_per_rank must be at most 1024"),
        ("served_model_name", ("",), "served_model_name must not be empty"),
        ("data_parallel_size", "2", "data_parallel_size must be an integer, not '2'"),
        ("max_num_seqs", 1.5, "max_num_seqs must be an integer or None, not 1.5"),
        ("enable_prefix_caching", 1, "enable_prefix_caching must be True or False, not 1"),
        ("served_model_name", "mine", "served_model_name must be a tuple, each a text, not 'mine'"),
        ("device", "tpu", "device must be one of auto, cpu, cuda, not 'tpu'"),
        ("quantization", "q4", "quantization must be one of fp8, int8, int4, mxfp4 or None, not 'q4'"),
        ("eplb", {}, "eplb must be of type EplbConfig"),
        ("exchange_timeout", 0.0, "exchange_timeout must be above 0"),
        ("exchange_timeout", math.nan, "exchange_timeout must be above 0 and at most 86400 seconds, not nan"),
        ("gpu_memory_utilization", 1.5, "must be in"),
        ("num_redundant_experts", -1, "num_redundant_experts"),
        ("max_logprobs", -2, "max_logprobs"),
        ("kv_cache_memory_bytes", 1000, "no room for a KV block"),
    ],
)
def test_refusals_name_the_field_and_the_limit(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(EngineConfig(**{field: value}), MODEL, MACHINE)  # type: ignore[arg-type]


def test_a_context_other_than_the_usual_one() -> None:
    stretched = structs.replace(MODEL, context_limit=16384, context_reason="its yarn")
    assert resolve(EngineConfig(), stretched, MACHINE).max_model_len == 4096
    assert (
        "up to 16384 may be asked for (its yarn)"
        in resolve(EngineConfig(), stretched, MACHINE).reasons["max_model_len"]
    )
    assert resolve(EngineConfig(max_model_len=16384), stretched, MACHINE).max_model_len == 16384
    with pytest.raises(ValueError, match="max_model_len 16385 exceeds the model's limit of 16384 tokens: its yarn"):
        resolve(EngineConfig(max_model_len=16385), stretched, MACHINE)
    windowed = structs.replace(MODEL, context_limit=1024, context_reason="its window")
    plan = resolve(EngineConfig(), windowed, MACHINE)
    assert plan.max_model_len == 1024 and plan.reasons["max_model_len"] == "the model's its window"


def test_a_context_that_does_not_fit_is_refused_when_asked_for() -> None:
    with pytest.raises(ValueError, match="max_model_len 4096 needs 256 KV blocks"):
        resolve(EngineConfig(max_model_len=4096, num_kv_blocks=10), MODEL, MACHINE)


def test_every_backend_exists() -> None:
    assert set(HOST_BACKENDS) <= set(NAMES)


def test_gloo_where_shared_memory_is_not_sure() -> None:
    machine = structs.replace(MACHINE, shared_memory=False)
    assert resolve(EngineConfig(data_parallel_size=2), MODEL, machine).all2all_backend == "gloo"


@pytest.mark.store
@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_with_a_store_every_rank_has_every_expert(ranks: int) -> None:
    plan = resolve(EngineConfig(data_parallel_size=ranks), MODEL, MACHINE)
    assert (plan.weight_store, plan.slots_per_rank, plan.store_bytes) == (True, MODEL.num_experts, 1000 * MEBI)


@pytest.mark.store
@pytest.mark.parametrize(
    ("options", "machine", "alone", "reason"),
    [
        ({"num_redundant_experts": 4}, {}, False, "each rank's own"),
        ({}, {"shared_memory": False}, False, "one machine"),
        ({"weight_cache": "off"}, {}, True, "one process"),
    ],
)
def test_when_there_is_no_store(options: dict[str, Any], machine: dict[str, Any], alone: bool, reason: str) -> None:
    config = EngineConfig(data_parallel_size=1 if alone else 2, **options)
    plan = resolve(
        config, MODEL, structs.replace(MACHINE, **machine), Frontend.IN_PROCESS if alone else Frontend.SERVER
    )
    assert not plan.weight_store and reason in plan.reasons["weight_store"]


@pytest.mark.store
def test_the_weight_cache_is_a_directory(tmp_path: Path) -> None:
    plan = resolve(EngineConfig(data_parallel_size=2), MODEL, MACHINE)
    (tmp_path / "file").touch()
    for asked in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"weight_cache .*file is not a directory"):
            with_cache(plan, str(asked), tmp_path)
    assert with_cache(plan, str(tmp_path / "to" / "be" / "made"), tmp_path).weight_cache.endswith("made")


def test_local_exchange_is_for_one_rank() -> None:
    with pytest.raises(ValueError, match="serves one rank"):
        resolve(EngineConfig(data_parallel_size=2, all2all_backend="local"), MODEL, MACHINE)


def test_small_models_get_one_thread_and_plain_scheduling() -> None:
    plan = resolve(EngineConfig(), structs.replace(MODEL, weight_bytes=MEBI, expert_bytes=0), MACHINE)
    assert (plan.threads_per_rank, plan.async_scheduling) == (1, False)


@pytest.mark.parametrize("frontend", [Frontend.CALLER, Frontend.IN_PROCESS])
def test_a_small_model_without_a_server_shares_its_long_operations(frontend: Frontend) -> None:
    small = structs.replace(MODEL, weight_bytes=MEBI, expert_bytes=0)
    plan = resolve(EngineConfig(dtype="bfloat16"), small, MACHINE, frontend)
    assert (plan.threads_per_rank, plan.async_scheduling) == (MACHINE.cores, False)
    assert resolve(EngineConfig(dtype="float32"), small, MACHINE, frontend).threads_per_rank == 1


def test_scheduling_runs_beside_the_step_where_a_core_is_left() -> None:
    assert not resolve(EngineConfig(), MODEL, MACHINE).async_scheduling
    assert resolve(EngineConfig(threads_per_rank=3), MODEL, MACHINE).async_scheduling
    assert resolve(EngineConfig(async_scheduling=True), MODEL, MACHINE).async_scheduling


def test_a_cache_in_fp8() -> None:
    """Latents of 512 numbers: 656 bytes a token and layer instead of 1,152; more blocks in the same memory."""
    model = structs.replace(MODEL, cache_spec=numbers_per_token(576, 656))
    wish = EngineConfig(kv_cache_dtype="fp8", kv_cache_memory_bytes=656 * 16 * 1000)
    plan = resolve(wish, model, MACHINE)
    assert (plan.kv_cache_dtype, plan.num_kv_blocks) == ("fp8", 1000)
    assert "as asked" in plan.reasons["kv_cache_dtype"]
    plain = resolve(structs.replace(wish, kv_cache_dtype="auto"), model, MACHINE)
    assert plain.num_kv_blocks == 656 * 1000 // 1152
    with pytest.raises(ValueError, match="kv_cache_dtype fp8: only latents"):
        resolve(wish, MODEL, MACHINE)


def test_backends_are_those_of_the_rooms_that_have_them() -> None:
    assert ATTENTION_BACKENDS == mla.requirements.NAMES
    assert MOE_BACKENDS == moe_kernels.backends.NAMES


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"attention_backend": "abacus"}, "attention_backend 'abacus' is unknown; one of auto, torch, triton"),
        ({"attention_backend": "triton"}, r"'triton' needs a GPU .* on a CPU: auto, torch"),
        ({"moe_backend": "deepgemm"}, r"'deepgemm' needs a GPU .* on a CPU: auto, native, torch"),
        ({"moe_backend": "native"}, "moe_backend 'native': native kernels have not been looked for"),
        ({"data_parallel_size": 63}, "data_parallel_size must be at most 62, not 63"),
        ({"data_parallel_size": 62}, "data_parallel_size 62: caches, weights and processes would take"),
        ({"kv_cache_memory_bytes": 9 << 30}, r"kv_cache_memory_bytes \d+ in each of 1 rank\(s\): .* take 10"),
        ({"num_kv_blocks": 1 << 20}, "num_kv_blocks 1048576 in each of 1"),
    ],
)
def test_plans_that_cannot_be(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(EngineConfig(**wishes), MODEL, MACHINE)
