"""`moesaic explain` for GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from configs.presets import PRESETS
from moesaic.explain import command


def explain(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(command, ["--json", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def choices(found: dict[str, Any]) -> dict[str, str]:
    return {choice["part"]: choice["chosen"] for choice in found["choices"]}


def test_deepseek_v3_on_sixteen_gpus() -> None:
    found = explain("--gpu", "h200", "--world", "16", "deepseek-v3")
    plan = found["plan"]
    assert plan["device"] == "cuda" and plan["data_parallel_size"] == 16 and plan["expert_format"] == "fp8"
    chosen = choices(found)
    assert chosen["all-to-all, many tokens"] == "deepep_high_throughput"
    assert chosen["all-to-all, few tokens"] == "deepep_low_latency"
    assert chosen["experts (fp8)"] == "deepgemm" and chosen["attention"] == "triton"
    assert plan["cudagraph_mode"] == "full_and_piecewise"
    # What 671e9 parameters take: experts in 8 bits, the rest in 16 on every GPU.
    experts = 58 * 256 * 3 * 7168 * 2048
    assert experts == pytest.approx(653.9e9, rel=1e-3)
    memory = list(found["memory"].values())
    assert memory[0] == pytest.approx(2 * 17.1e9, rel=0.02)
    assert memory[1] == pytest.approx(experts * 18 / 256, rel=0.05)
    assert sum(memory) == pytest.approx(141e9, rel=0.01)


def test_drafts_are_priced() -> None:
    """The layer that drafts has a cache, experts and attention of its own."""
    asked = '{"method": "mtp", "num_speculative_tokens": 3}'
    plain = explain("--gpu", "h200", "--world", "16", "deepseek-v3")
    found = explain("--gpu", "h200", "--world", "16", "--speculative-config", asked, "deepseek-v3")
    assert plain["plan"]["speculation"] is None and found["plan"]["speculation"]["method"] == "mtp"
    (without,), (with_layer,) = ([name for name in each["memory"] if "KV cache" in name] for each in (plain, found))
    assert "61 layers" in without and "62 layers" in with_layer
    assert list(found["memory"].values())[1] == pytest.approx(59 / 58 * list(plain["memory"].values())[1], rel=0.01)


def test_every_reject_has_a_reason() -> None:
    found = explain("--gpu", "h200", "--world", "16", "--installed", "", "deepseek-v3")
    verdicts = {name: why for choice in found["choices"] for name, why in choice["verdicts"].items()}
    assert "not installed" in verdicts["deepep_v2"] and "not installed" in verdicts["deepgemm"]
    assert "NVLink" in verdicts["nvshmem"] and verdicts["nccl"] == "ok"
    assert choices(found)["all-to-all, many tokens"] == "nccl" and choices(found)["experts (fp8)"] == "triton"
    assert found["plan"]["cudagraph_mode"] == "piecewise"
    assert "a CUDA graph cannot hold it" in found["reasons"]["cudagraph_mode"]


def test_split_steps_in_graphs() -> None:
    """The option may come without a value and before MODEL."""
    found = explain("--gpu", "h200", "--world", "16", "--enable-dbo", "qwen3-30b-a3b")
    assert found["plan"]["dbo"]["decode_tokens"] == 32 and found["plan"]["num_experts"] == 128
    assert "split in 2, those of decodes alone, as one graph" in found["reasons"]["cudagraph_mode"]
    three = explain("--gpu", "h200", "--world", "16", "--ubatch-size", "3", "qwen3-30b-a3b")
    assert choices(three)["all-to-all, few tokens"] == "deepep_v2"  # DeepEP's older kernels have place for two parts
    assert "split in 3, those of decodes alone" in three["reasons"]["cudagraph_mode"]
    counted = explain("--gpu", "h200", "--world", "16", "--installed", "", "qwen3-30b-a3b")
    assert "split in 2, none is captured" in counted["reasons"]["cudagraph_mode"]


def test_one_gpu_and_a_dense_part() -> None:
    found = explain("--gpu", "b200", "qwen3-30b-a3b")
    assert found["plan"]["all2all_backend"] == "local" and found["plan"]["expert_format"] == "plain"
    assert found["gpu"]["arch"] == "sm_100"


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_directory_with_only_a_config(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[name]))
    here, there = explain("--gpu", "h200", "-dp", "8", str(tmp_path)), explain("--gpu", "h200", "-dp", "8", name)
    assert here["memory"] == there["memory"] and here["choices"] == there["choices"]


def test_the_table() -> None:
    done = CliRunner().invoke(command, ["--gpu", "h100", "--world", "2"], catch_exceptions=False)
    assert done.exit_code == 0 and "On each GPU" in done.output and "KV cache" in done.output


def test_what_to_type_is_whole() -> None:
    """Brackets are no markup of the table's."""
    arguments = ["--gpu", "h200", "--world", "8", "--installed", "", "qwen3-30b-a3b"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False, env={"COLUMNS": "300"})
    assert "moesaic[deepep]" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h200", "nowhere"], "neither a directory nor one of"),
        (["--gpu", "h200", "--installed", "cublas"], "'cublas' is none of"),
        (["--gpu", "h100", "deepseek-v3"], "no room for a KV block"),
        (["--gpu", "h200", "--world", "2", "--all2all-backend", "shm", "qwen3-30b-a3b"], "does not connect GPUs"),
        (["--gpu", "h200", "--world", "3", "--all2all-backend", "deepep_high_throughput", "qwen3-30b-a3b"], "serves 2, 4, 8 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(command, arguments, catch_exceptions=False)
