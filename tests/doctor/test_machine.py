"""Checks of one machine, on a file system that is written for the test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec import structs

from launch.doctor.checkpoint import complete
from launch.doctor.devices import devices
from launch.doctor.machine import Machine, cores, memory, pages
from launch.launchers.plan import LaunchPlan, shell
from models.tiny import CHECKPOINT
from moesaic.doctor import examined

pytestmark = pytest.mark.launchers


def written(root: Path, files: dict[str, str]) -> Machine:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    doctor, _ = examined([], True, 1.0)
    return Machine(3, doctor.machine.plan, root)


def test_the_least_limit_of_all_control_groups_counts(tmp_path: Path) -> None:
    meminfo = "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n"
    files = {"proc/meminfo": meminfo, "proc/self/cgroup": "0::/pod/container\n"}
    assert memory(written(tmp_path, files)).state == "ok"
    files |= {"sys/fs/cgroup/pod/memory.max": "max", "sys/fs/cgroup/pod/container/memory.max": str(8 << 30)}
    assert memory(written(tmp_path, files)).state == "ok"
    files["sys/fs/cgroup/pod/memory.max"] = str(100 << 20)
    found = memory(written(tmp_path, files))
    assert found.state == "broken" and "cgroup/pod has 100 MiB" in found.text and found.node == 3
    files |= {"sys/fs/cgroup/pod/memory.max": str(8 << 30), "sys/fs/cgroup/pod/memory.current": str(8 << 30)}
    assert memory(written(tmp_path, files)).state == "slow"


def test_a_quota_of_cores(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "10000 100000"}
    found = cores(written(tmp_path, files))
    assert found.state == "slow" and "a quota of 0.1" in found.text and found.fix == "--threads-per-rank 1"


def test_large_pages(tmp_path: Path) -> None:
    name = "sys/kernel/mm/transparent_hugepage/enabled"
    assert pages(written(tmp_path, {name: "always madvise [never]"})).state == "slow"
    assert pages(written(tmp_path, {name: "always [madvise] never"})).state == "ok"


@pytest.mark.parametrize(
    ("gid", "state"), [("fe80:0000:0000:0000:0000:0000:0000:0001", "ok"), (":".join(["0000"] * 8), "broken")]
)
def test_infiniband_ports_without_an_entry(tmp_path: Path, gid: str, state: str) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    machine = written(tmp_path, {f"{port}/state": "4: ACTIVE", f"{port}/rate": "400 Gb/sec", f"{port}/gids/0": gid})
    assert machine.plan is not None
    structs.force_setattr(machine.plan, "device", "cuda")
    found = {one.check: one.state for one in devices(machine)}
    assert found["rdma"] == state and found["gdr"] == "slow" and found["ibgda"] == "slow"


def test_a_shard_that_its_siblings_promise(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    header = b"{}      "
    (tmp_path / "model-00002-of-00003.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    found = complete(0, tmp_path)
    assert found.text == f"model-00001-of-00003.safetensors is missing in {tmp_path} (and 1 more)"


def test_a_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was downloaded is checked; what was not is not downloaded now."""
    folder = tmp_path / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(CHECKPOINT, folder / "snapshots" / ("0" * 40))
    words = ["--download-dir", str(tmp_path)]
    found = {one.check: one for one in examined(["org/name", *words], True, 1.0)[0].quick()}
    assert "plan" not in found and found["checkpoint"].state == "ok"
    found = {one.check: one for one in examined(["org/other", *words], True, 1.0)[0].alone()}
    assert "nor in the cache" in found["plan"].text and found["plan"].fix == "hf download org/other"
    assert not {"checkpoint", "disk"} & set(found)


def test_words_for_bash() -> None:
    plan = LaunchPlan(model="a b", nodes=1, ranks=(1,))
    assert shell(plan.command("serve")).startswith("moesaic serve 'a b' \\\n    --nnodes auto")
