"""The cost model: its shape, its inputs, and its errors against published figures, which must not grow."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.offline.cluster import GPUS, load_cluster, make_cluster
from eplb.offline.cost import Workload, balanced_part, dead_zone, expert_ms, links_ms, pause_s, step_cost, transfer_s
from eplb.offline.published import FIGURES, check, summary
from eplb.offline.shapes import MODELS, load_shape

V3 = MODELS["deepseek-v3"]
DECODE = Workload("decode", 128, 4096)


# ---- against published figures -----------------------------------------------------------------------------------


def test_errors_against_published_figures_do_not_grow() -> None:
    """What `moesaic eplb cost --check` prints. The limits lie a little above the errors when this was written."""
    total = summary(check())
    assert total["mean_abs_error_percent"] < 10
    assert total["held_out_mean_abs_error_percent"] < 11
    assert total["held_out_max_abs_error_percent"] < 34
    assert total["links_mean_abs_error_percent"] < 5


def test_enough_figures_from_several_sources_each_named() -> None:
    rows = check()
    loaded = [row for row in rows if row["kind"] == "step" and row["loaded"]]
    held_out = [row for row in loaded if not row["fitted"]]
    assert len(held_out) >= 12
    assert len({row["source"] for row in held_out}) >= 6
    assert {figure.gpu for figure in FIGURES} >= {"h20", "h800", "h100", "h200", "gb200"}
    assert all(row["source"] and row["unit"] and row["published"] > 0 and row["predicted"] > 0 for row in rows)


def test_a_days_average_is_shown_but_not_counted() -> None:
    rows = [row for row in check() if not row["loaded"]]
    assert len(rows) == 1
    assert (
        rows[0]["error_percent"] > 30
    )  # a fleet at night is not a saturated run, and the model says what one would do


@pytest.mark.parametrize(
    "row", [row for row in check() if row["kind"] in ("ratio", "pause")], ids=lambda row: row["name"]
)
def test_what_balance_overlap_and_pauses_are_worth(row: dict[str, float]) -> None:
    assert abs(row["error_percent"]) < 12


# ---- the shape of the model ----------------------------------------------------------------------------------------


def test_an_uneven_rank_costs_time_and_never_gains() -> None:
    cluster = make_cluster("h800", 32)
    total = [step_cost(cluster, V3, DECODE, balanced_part(32, 9, b)).total_ms for b in (1.0, 0.9, 0.7, 0.5, 0.3)]
    assert total == sorted(total)
    assert total[-1] > total[0] * 1.1


def test_few_tokens_have_a_dead_zone_and_many_have_none() -> None:
    cluster = make_cluster("h20", 16)
    assert dead_zone(cluster, V3, Workload("decode", 16, 4096, 1), 18) > 0.3
    assert dead_zone(cluster, V3, Workload("prefill", 16384, 4096), 18) < 0.03


def test_inside_the_dead_zone_the_experts_take_no_longer() -> None:
    cluster, work = make_cluster("h20", 16), Workload("decode", 16, 4096, 1)
    zone = dead_zone(cluster, V3, work, 18)
    rows = 16 * 8 / 18
    even = expert_ms(np.full(18, rows), cluster, V3, "decode")
    assert expert_ms(np.full(18, rows * (1 + zone)), cluster, V3, "decode") <= even * 1.0101


def test_no_rows_take_no_time_and_each_expert_reads_its_weights() -> None:
    cluster = make_cluster("h800", 32)
    assert expert_ms(np.zeros(9), cluster, V3, "decode") == 0
    one = float(expert_ms(np.array([64.0] + [0.0] * 8), cluster, V3, "decode"))
    assert one >= V3.expert_bytes / (3350e9) * 1e3
    assert expert_ms(np.full(9, 64.0), cluster, V3, "decode") > one * 5


def test_links_are_free_for_one_gpu_and_grow_with_the_part_that_leaves_the_node() -> None:
    assert links_ms(make_cluster("h800", 1), V3, "decode", 128) == (0.0, 0.0)
    for phase in ("decode", "prefill"):
        times = [sum(links_ms(make_cluster("h800", ranks), V3, phase, 128)) for ranks in (8, 32, 128, 320)]
        assert times == sorted(times)
    assert links_ms(make_cluster("gb200", 64), V3, "decode", 128) < links_ms(
        make_cluster("h800", 64), V3, "decode", 128
    )


@settings(max_examples=40, deadline=None)
@given(
    gpu=st.sampled_from(sorted(GPUS)),
    ranks=st.integers(1, 320),
    tokens=st.integers(1, 20000),
    context=st.integers(1, 100_000),
    micro_batches=st.integers(1, 2),
    prefill=st.booleans(),
    dtype=st.sampled_from(["bf16", "fp8", "nvfp4"]),
    share=st.floats(0, 1),
)
def test_every_step_is_finite_and_hides_no_more_than_there_is(
    gpu: str, ranks: int, tokens: int, context: int, micro_batches: int, prefill: bool, dtype: str, share: float
) -> None:
    slots = -(-256 // ranks) + 1
    balance = 1 / ranks + share * (1 - 1 / ranks)
    work = Workload("prefill" if prefill else "decode", tokens, context, micro_batches)
    part = balanced_part(ranks, slots, min(1.0, balance))
    assert part.sum() == pytest.approx(1)
    assert 1 / ranks / part.sum(2).max() == pytest.approx(balance, rel=1e-6)
    cost = step_cost(make_cluster(gpu, ranks), V3.with_dtype(dtype), work, part)
    values = cost.as_dict()
    assert all(np.isfinite(value) and value >= 0 for value in values.values())
    assert cost.hidden_ms <= cost.links_ms + 1e-9
    parts = cost.attention_ms + cost.dense_ms + cost.experts_ms + cost.links_ms + cost.gaps_ms
    assert cost.total_ms == pytest.approx(parts - cost.hidden_ms, rel=1e-6)


def test_layers_differ_and_only_the_mean_of_their_times_counts() -> None:
    cluster = make_cluster("h800", 32)
    even, uneven = balanced_part(32, 9, 1.0), balanced_part(32, 9, 0.4)
    both = step_cost(cluster, V3, DECODE, np.concatenate([even, uneven])).total_ms
    alone = [step_cost(cluster, V3, DECODE, part).total_ms for part in (even, uneven)]
    assert both == pytest.approx(np.mean(alone))


def test_moving_takes_links_and_waiting_takes_longer() -> None:
    cluster = make_cluster("h800", 32)
    assert transfer_s(make_cluster("h800", 1), V3, 9) == 0
    assert 0 < transfer_s(cluster, V3, 9) < pause_s(cluster, V3, 9, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_cluster("h900", 8), "--gpu is 'h900'"),
        (lambda: make_cluster("h800", 0), "--gpus is 0"),
        (lambda: make_cluster("h800", 8, 0), "--gpus-per-node is 0"),
        (lambda: make_cluster("h800", 8, rdma_gbps=0.0), "--rdma-gbps is 0"),
        (lambda: make_cluster("h800", 8, nvlink_gbps=float("nan")), "--nvlink-gbps is nan"),
        (lambda: Workload("decode", 0, 1), "tokens per GPU is 0"),
        (lambda: Workload("decode", 1, 0), "context is 0"),
        (lambda: Workload("decode", 1, 1, 3), "micro-batches is 3"),
        (lambda: balanced_part(4, 2, 0.2), "balance is 0.2"),
        (lambda: step_cost(make_cluster("h800", 8), V3, DECODE, balanced_part(4, 2)), "of 4 ranks; the cluster has 8"),
        (lambda: V3.with_dtype("fp3"), "expert dtype is 'fp3'"),
    ],
)
def test_wrong_input_is_one_clear_line(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# ---- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "billions"), [("deepseek-v3", 671), ("qwen3-235b", 235), ("qwen3-30b-a3b", 30.5)])
def test_the_named_shapes_add_up_to_their_parameters(name: str, billions: float) -> None:
    shape = MODELS[name]
    experts = shape.expert_params * (shape.num_experts + shape.num_shared_experts) * shape.num_moe_layers
    dense = (
        shape.attention_params * shape.num_layers + 3 * shape.hidden * shape.intermediate_size * shape.num_dense_layers
    )
    assert (experts + dense + 2 * shape.vocab_size * shape.hidden) / 1e9 == pytest.approx(billions, rel=0.01)


def test_deepseek_v3_as_published() -> None:
    assert V3.expert_bytes == pytest.approx(44.04e6, rel=1e-3)
    assert V3.kv_bytes_per_token == 2 * 576 * 61  # 70 KB
    assert V3.num_moe_layers == 58


CONFIG = {
    "num_hidden_layers": 61, "first_k_dense_replace": 3, "hidden_size": 7168, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "intermediate_size": 18432, "num_attention_heads": 128,
    "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "topk_group": 4, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def test_a_config_file_gives_the_same_costs_as_the_named_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for path in (tmp_path, tmp_path / "config.json"):
        shape = load_shape(str(path))
        assert shape.expert_dtype == "fp8"
        cluster, part = make_cluster("h800", 32), balanced_part(32, 9)
        assert step_cost(cluster, shape, DECODE, part) == step_cost(cluster, V3, DECODE, part)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON file"),
        ("[1]", "must be a JSON object"),
        ("{}", "has no key num_attention_heads"),
        (json.dumps({**CONFIG, "hidden_size": -1}), "hidden_size is -1"),
        (json.dumps({**CONFIG, "hidden_size": "x"}), "hidden_size is 'x'"),
        (
            json.dumps({k: v for k, v in CONFIG.items() if k != "n_routed_experts"}),
            "no key n_routed_experts or num_experts",
        ),
        (json.dumps({**CONFIG, "first_k_dense_replace": 61}), "leave no MoE layer"),
        (json.dumps({**CONFIG, "num_experts_per_tok": 999}), "999 experts per token"),
    ],
)
def test_a_wrong_config_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_shape(str(path))


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="deepseek-v3, qwen3-235b"):
        load_shape("nonesuch")


# ---- described clusters ------------------------------------------------------------------------------------------


def test_a_cluster_file_may_change_a_known_gpu_or_describe_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"gpu": "h800", "gpus": 32, "rdma_gbps": 100}')
    cluster = load_cluster(path)
    assert (cluster.num_gpus, cluster.gpus_per_node, cluster.gpu.rdma_gbps, cluster.gpu.hbm_gbps) == (32, 8, 100, 3350)
    whole = {"gpu": "mine", "gpus": 4, "gpus_per_node": 2, "bf16_tflops": 100, "fp8_tflops": 0, "nvfp4_tflops": 0,
             "hbm_gbps": 1000, "hbm_gb": 48, "nvlink_gbps": 50, "rdma_gbps": 10, "reach": 0.6}  # fmt: skip
    path.write_text(json.dumps(whole))
    cluster = load_cluster(path)
    assert (cluster.link_domain, cluster.num_domains, cluster.gpu.tflops("nvfp4")) == (2, 2, 100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "not a JSON file"),
        ("[]", "must be a JSON object"),
        ('{"gpu": "h800"}', "has no key 'gpus'"),
        ('{"gpu": "h800", "gpus": 0}', "gpus is 0"),
        ('{"gpu": "h800", "gpus": 2.5}', "gpus is 2.5"),
        ('{"gpu": "h800", "gpus": true}', "gpus is True"),
        ('{"gpu": "h800", "gpus": 8, "speed": 3}', "unknown key 'speed'"),
        ('{"gpu": "h800", "gpus": 8, "hbm_gbps": 0}', "hbm_gbps is 0"),
        ('{"gpu": "mine", "gpus": 8}', "GPU 'mine' is not in the table, so 'bf16_tflops' must be given"),
    ],
)
def test_a_wrong_cluster_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)


def test_a_rack_is_one_link_domain() -> None:
    assert make_cluster("gb200", 48, 4).link_domain == 48
    assert make_cluster("gb200", 144, 4).num_domains == 2
    assert make_cluster("h800", 20).num_domains == 3
