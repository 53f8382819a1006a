"""Memory that is left for captured graphs when the size of a GPU's cache is decided."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_gpu_plan import FAST, GIBI, GPU, MOE, plan

from configs.engine import Plan
from configs.gpu import Exchange
from engine.device import check_free

BIG = replace(MOE, hidden_size=4096, num_layers=48)
LONG = {"num_redundant_experts": 0, "max_num_seqs": 4096}  # so many that the cache takes all there is


def taken(decided: Plan) -> int:
    return decided.rank_bytes + decided.graph_bytes


def test_the_cache_leaves_room_for_graphs() -> None:
    limit = 0.9 * GPU.memory
    without = plan(BIG, cudagraph_mode="none", **LONG)
    decided = plan(BIG, **LONG)
    block = 8192 * 2 * decided.block_size
    assert without.graph_bytes == 0 and limit - block < taken(without) <= limit
    assert decided.graph_bytes > GIBI // 4 and limit - block < taken(decided) <= limit
    assert "fewer, for" in decided.reasons["num_kv_blocks"] and "estimate" in decided.reasons["graph_bytes"]
    assert plan(BIG, cudagraph_capture_sizes=(1, 2), **LONG).num_kv_blocks > decided.num_kv_blocks


def test_padded_rows_have_room_too() -> None:
    padded = plan(BIG, exchange=replace(FAST, padded_tokens=256), **LONG)
    assert padded.graph_bytes > plan(BIG, **LONG).graph_bytes
    counted = Exchange("counting", "as asked", "the host counts", padded_tokens=256)
    assert plan(BIG, exchange=counted, **LONG).graph_bytes < padded.graph_bytes


def test_what_was_asked_for_stays() -> None:
    asked = plan(BIG, num_kv_blocks=700, num_redundant_experts=0)
    assert asked.num_kv_blocks == 700 and asked.graph_bytes > 0
    small = replace(GPU, memory=18 * GIBI)
    with pytest.raises(ValueError, match=r"KV blocks are left beside \d+ MiB kept for graphs"):
        plan(BIG, gpu=small, num_redundant_experts=0, max_model_len=4096, gpu_memory_utilization=0.92)


def test_a_long_context_is_cut_to_what_is_left() -> None:
    beside = plan(BIG, num_redundant_experts=0).graph_bytes + (32 << 20)  # half of what a whole sequence takes
    small = replace(GPU, memory=16 * GIBI + beside)
    decided = plan(BIG, gpu=small, num_redundant_experts=0, gpu_memory_utilization=1.0)
    assert decided.max_model_len == decided.num_kv_blocks * decided.block_size == 2048
    assert taken(decided) <= small.memory


def test_a_gpu_that_others_use_is_an_error_of_one_line() -> None:
    check_free("cuda:0", 10 * GIBI, 80 * GIBI, 9 * GIBI, GIBI)
    with pytest.raises(ValueError, match=r"cuda:0: weights and cache take 9216 MiB and graphs 2048 MiB, and 10240 of"):
        check_free("cuda:0", 10 * GIBI, 80 * GIBI, 9 * GIBI, 2 * GIBI)
