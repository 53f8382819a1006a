"""Plans for GPUs, made without one."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from made_up_caches import numbers_per_token
from msgspec.structs import replace

from configs.chips import CHIPS
from configs.engine import EngineConfig, Plan
from configs.env import child_environment
from configs.gpu import MEBI, Exchange, Gpu, capture_sizes, chosen_device, find_gpus, find_rdma, graph_mode
from configs.machine import Machine, ModelNumbers
from configs.resolve import resolve

GIBI = 1 << 30
GPU = Gpu("NVIDIA H200", "sm_90", 100 * GIBI, 8)
FAST = Exchange("fast", "a test")
MOE = ModelNumbers(
    path="m", name="m", architecture="Qwen3MoeForCausalLM", max_position_embeddings=4096, num_experts=64,
    num_moe_layers=4, cache_spec=numbers_per_token(8192), weight_bytes=40 * GIBI, expert_bytes=32 * GIBI, dtype="bfloat16",
)  # fmt: skip

CPU = Machine("cpu", 2, 256 * GIBI, True, True, "avx512_bf16", "a test")


def plan(
    model: ModelNumbers = MOE, ranks: int = 4, exchange: Exchange | None = FAST, gpu: Gpu = GPU, **wishes: object
) -> Plan:
    machine = Machine(
        "cuda",
        16,
        ranks * gpu.memory,
        True,
        True,
        native_reason="on a GPU",
        gpu=gpu,
        exchange=exchange,
        device_reason="a test",
    )
    return resolve(EngineConfig(data_parallel_size=ranks, **wishes), model, machine)  # type: ignore[arg-type]


def test_memory_is_that_of_one_gpu() -> None:
    decided = plan(num_redundant_experts=0)
    assert decided.device == "cuda" and decided.slots_per_rank == 16
    block_bytes = 8192 * 2 * decided.block_size
    most = (0.9 * GPU.memory - 8 * GIBI - 8 * GIBI) / block_bytes
    full = -(-4096 // decided.block_size) * decided.max_num_seqs
    assert decided.num_kv_blocks == min(int(most), full)
    half = plan(num_redundant_experts=0, gpu_memory_utilization=0.2)
    assert half.num_kv_blocks == int((int(4 * GPU.memory * 0.2) - 64 * GIBI) // 4 // block_bytes)


def test_async_scheduling_and_bfloat16_are_on() -> None:
    decided = plan()
    assert decided.async_scheduling and decided.dtype == "bfloat16" and decided.native_kernels == "none"


def test_experts_stay_in_fp8_where_the_checkpoint_has_them() -> None:
    assert plan().expert_format == "plain"
    assert plan(replace(MOE, fp8_experts=True)).expert_format == "fp8"
    assert plan(quantization="fp8").expert_format == "fp8"
    with pytest.raises(ValueError, match="FP8 only"):
        plan(quantization="int8")
    dense = replace(MOE, num_experts=0, num_moe_layers=0, expert_bytes=0)
    for kind in ("fp8", "int8"):
        with pytest.raises(ValueError, match=f"quantization {kind}: on a GPU only experts .* this model has none"):
            plan(dense, quantization=kind)


def test_what_is_captured_follows_from_the_backend() -> None:
    assert plan(ranks=1).cudagraph_mode == "full_and_piecewise"
    assert plan(exchange=Exchange("fast", "as asked")).cudagraph_mode == "full_and_piecewise"
    counting = Exchange("counting", "as asked", "the host counts")
    counted = plan(exchange=counting)
    assert counted.all2all_backend == "counting"
    assert counted.cudagraph_mode == "piecewise" and "counting: the host counts" in counted.reasons["cudagraph_mode"]
    balanced = plan(enable_eplb=True)
    assert balanced.cudagraph_mode == "piecewise" and "balanced" in balanced.reasons["cudagraph_mode"]
    assert plan(cudagraph_mode="none").cudagraph_capture_sizes == ()
    with pytest.raises(ValueError, match="the host counts"):
        plan(exchange=counting, cudagraph_mode="full_decode_only")


def test_it_says_which_split_steps_are_captured() -> None:
    assert plan().dbo is not None
    assert "split in 2, those of decodes alone, as one graph" in plan().reasons["cudagraph_mode"]
    counted = plan(exchange=Exchange("counting", "as asked", "the host counts"), ubatch_size=3)
    assert "split in 3, none is captured" in counted.reasons["cudagraph_mode"]
    for whole in (plan(enable_dbo="off"), plan(cudagraph_mode="none")):
        assert "split" not in whole.reasons["cudagraph_mode"]


def test_a_cpu_records_decode_steps_where_it_has_native_kernels() -> None:
    assert resolve(EngineConfig(), MOE, CPU).cudagraph_mode == "full_decode_only"
    assert resolve(EngineConfig(cudagraph_mode="none"), MOE, CPU).reasons["cudagraph_mode"] == "as asked"
    without = resolve(EngineConfig(), MOE, replace(CPU, native_kernels="none"))
    assert without.cudagraph_mode == "none" and "no native kernels" in without.reasons["cudagraph_mode"]


def test_graphs_want_a_gpu() -> None:
    for wishes in ({"cudagraph_mode": "full_and_piecewise"}, {"cudagraph_capture_sizes": (1, 2)}):
        with pytest.raises(ValueError, match="needs a GPU"):
            resolve(EngineConfig(**wishes), MOE, CPU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown"):
        graph_mode("some", None, False)
    assert graph_mode("auto", None, False, planned_attention=True)[0] == "piecewise"
    with pytest.raises(ValueError, match="FlashInfer plans its attention on the host"):
        graph_mode("full_decode_only", None, False, planned_attention=True)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100, 256, 512, 5000])
def test_sizes_ascend_and_pad_little(most: int) -> None:
    sizes = capture_sizes("full_decode_only", (), most, 8192)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == min(most, 512)
    assert all(after <= max(8, 1.5 * before) for before, after in itertools.pairwise(sizes))
    assert capture_sizes("full_decode_only", (3, 900, 1), most, 8192) == tuple(
        sorted({min(3, most), min(900, most), 1})
    )
    with pytest.raises(ValueError, match="at least 1"):
        capture_sizes("full_decode_only", (0,), most, 8192)


def test_a_gpu_that_is_not_there() -> None:
    assert chosen_device("auto", None, "no") == ("cpu", "no")
    assert chosen_device("auto", GPU, "")[0] == "cuda"
    assert chosen_device("cpu", GPU, "")[0] == "cpu"
    with pytest.raises(ValueError, match="device cuda"):
        chosen_device("cuda", None, "no")


LISTED = "0, GPU-aa11, NVIDIA H200, 9.0, 143771\\n1, GPU-bb22, NVIDIA H200, 9.0, 143000\\n"


@pytest.fixture
def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake nvidia-smi that lists two GPUs, and a torch that could use them."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{LISTED}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("configs.gpu.torch_version", lambda: "2.11.0+cu130")
    return tool


def test_gpus_are_read_from_nvidia_smi(fake_smi: Path) -> None:
    gpu, _ = find_gpus(None)
    assert gpu == Gpu("NVIDIA H200", "sm_90", 143000 * MEBI, 2)
    assert CHIPS["h200"].capability == (9, 0)
    for visible, count in (("0", 1), ("GPU-bb", 1), ("0,1", 2), ("1,0", 2)):
        found, _ = find_gpus(visible)
        assert found is not None and found.count == count
    assert find_gpus("")[0] is None and find_gpus("7")[0] is None


def test_a_broken_nvidia_smi_is_no_gpu(fake_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi.write_text("#!/bin/sh\nexit 9\n")
    assert find_gpus(None) == (None, "nvidia-smi failed (CalledProcessError)")
    monkeypatch.setattr("configs.gpu.torch_version", lambda: "2.13.0+cpu")
    assert "without CUDA" in find_gpus(None)[1]


def test_infiniband_is_read_from_the_system(tmp_path: Path) -> None:
    """A port that is there and active, and a driver that lets a GPU write to its queues: by gdrdrv, or by two of its options."""

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert find_rdma(tmp_path) == ("there is no port under /sys/class/infiniband",) * 2
    write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    assert find_rdma(tmp_path)[0] == "none of 1 ports is active under /sys/class/infiniband"
    write("sys/class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE\n")
    no_rdma, no_ibgda = find_rdma(tmp_path)
    assert no_rdma == "" and "neither gdrdrv" in no_ibgda
    write("proc/driver/nvidia/params", 'EnableStreamMemOPs: 1\nRegistryDwords: ""\n')
    assert "neither gdrdrv" in find_rdma(tmp_path)[1]
    write("proc/driver/nvidia/params", 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n')
    assert find_rdma(tmp_path) == ("", "")
    write("proc/driver/nvidia/params", "")
    write("sys/module/gdrdrv/version", "2.4")
    assert find_rdma(tmp_path) == ("", "")


def test_the_environment_of_ranks_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DeepEP and NCCL read there; an operator's own choice stays."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setenv("EP_DISABLE_GIN", "0")
    found = child_environment(2, gpus=True)
    assert (found["EP_DISABLE_GIN"], found["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("0", "0")
    monkeypatch.delenv("EP_DISABLE_GIN")
    assert child_environment(2, gpus=True)["EP_DISABLE_GIN"] == "1" and "EP_DISABLE_GIN" not in child_environment(2)
