"""The doctor of two hosts (network namespaces): nothing is wrong with a healthy pair, and each planted fault is found on
the right node, with what to type, within 20 s."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from host_servers import need_hosts
from hosts import Hosts

from models.tiny import CHECKPOINT

pytestmark = [pytest.mark.launchers, pytest.mark.slow]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MOST_SECONDS = 20.0
DOCTOR = (sys.executable, "-m", "moesaic", "doctor", "--json", "--wait", "12")
PORT = 29550


@dataclass
class Pair:
    """Commands of both nodes; whatever a fault plants in them."""

    hosts: Hosts
    tmp_path: Path

    def words(self, node: int, *more: str) -> list[str]:
        place = ["--nnodes", "2", "--node-rank", str(node), "--data-parallel-address", self.hosts.addresses[0]]
        return [*place, "--dtype", "float32", *more]

    def examine(
        self,
        more: Sequence[str] = (),
        before: Sequence[str] = (),
        variables: dict[str, str] | None = None,
        model: Path | None = None,
        instead: Sequence[str] = DOCTOR,
        node: int = 1,
    ) -> list[dict[str, Any]]:
        """What the head finds. The rest is of the node with the fault: more words, words before the command, variables,
        another model, another command."""
        began = time.monotonic()
        processes = []
        for number in (0, 1):
            odd = number == node
            words = self.words(number, *(more if odd else ()))
            path = [str(model or CHECKPOINT)] if odd else [str(CHECKPOINT)]
            command = [*(before if odd else ()), *(instead if odd else DOCTOR), *path, *words]
            environment = {**os.environ, **((variables or {}) if odd else {})}
            processes.append(
                self.hosts.start(
                    number,
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                    cwd=ROOT,
                )
            )
        texts = [process.communicate(timeout=60) for process in processes]
        assert time.monotonic() - began < 3 * MOST_SECONDS  # two processes start, on a core that others use too
        found = json.loads(texts[0][0])
        assert found["seconds"] < MOST_SECONDS, texts
        codes = [process.returncode for process in processes]
        broken = any(finding["state"] == "broken" for finding in found["findings"])
        assert codes[0] == broken, texts
        assert all(finding["fix"] for finding in found["findings"] if finding["state"] != "ok"), texts
        return list(found["findings"])

    def wrong(self, **given: Any) -> set[tuple[str, int, str]]:
        """Check, node and state of each finding that is not ok."""
        found = self.examine(**given)
        return {(one["check"], one["node"], one["state"]) for one in found if one["state"] != "ok"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(2) as made:
        yield made


@pytest.fixture
def pair(hosts: Hosts, tmp_path: Path) -> Pair:
    return Pair(hosts, tmp_path)


@contextlib.contextmanager
def closed(pair: Pair, node: int, port: int, how: str) -> Iterator[None]:
    rule = ["INPUT", "-p", "tcp", "--dport", str(port), "-j", how]
    try:
        pair.hosts.run(node, ["iptables", "-A", *rule])
    except RuntimeError as error:
        pytest.skip(f"ports cannot be closed here: {error}")
    try:
        yield
    finally:
        pair.hosts.run(node, ["iptables", "-D", *rule])


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


def test_nothing_is_wrong_with_a_healthy_pair(pair: Pair) -> None:
    found = pair.examine()
    assert [one for one in found if one["state"] != "ok"] == []
    for check in ("versions", "flags", "model", "clock", "ports", "link", "interface", "shm", "ulimit", "memory"):
        assert [one for one in found if one["check"] == check], check


@pytest.mark.parametrize("how", ["REJECT", "DROP"])
def test_a_closed_port(pair: Pair, how: str) -> None:
    with closed(pair, 0, PORT + 3, how):
        found = pair.examine()
    [wrong] = [one for one in found if one["state"] != "ok"]
    assert (wrong["check"], wrong["node"], wrong["state"]) == ("ports", 1, "broken")
    assert f"port {PORT + 3} (" in wrong["text"] and "on node 0" in wrong["fix"]


def test_a_port_that_another_program_has(pair: Pair) -> None:
    script = f"import socket, time; one = socket.create_server(('{pair.hosts.addresses[1]}', {PORT + 5})); print(1, flush=True); time.sleep(60)"
    other = pair.hosts.start(1, [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    try:
        assert other.stdout.readline()
        assert ("ports", 1, "broken") in pair.wrong()
    finally:
        other.kill()
        other.communicate()


def test_a_wrong_interface(pair: Pair) -> None:
    assert pair.wrong(variables={"NCCL_SOCKET_IFNAME": "ib0"}) == {("interface", 1, "broken")}
    found = pair.examine(variables={"GLOO_SOCKET_IFNAME": "lo"}, node=0)
    [wrong] = [one for one in found if one["state"] != "ok"]
    assert (wrong["check"], wrong["node"]) == ("interface", 0) and wrong["fix"] == "export GLOO_SOCKET_IFNAME=eth0"


def test_an_address_that_is_not_the_heads(pair: Pair) -> None:
    wrong = pair.wrong(more=["--data-parallel-address", "10.77.0.9"], node=0)
    assert ("address", 0, "broken") in wrong
    assert ("meeting", 1, "broken") in pair.wrong(more=["--data-parallel-address", "127.0.0.1"], node=0)


def test_a_model_file_that_differs(pair: Pair, tmp_path: Path) -> None:
    model = copied(tmp_path)
    [weights] = model.glob("*.safetensors")
    with weights.open("r+b") as data:
        data.seek(-8, os.SEEK_END)
        data.write(b"\x01" * 8)
    assert pair.wrong(model=model) == {("model", 1, "broken")}


def test_a_checkpoint_that_is_not_whole(pair: Pair, tmp_path: Path) -> None:
    model = copied(tmp_path)
    [weights] = model.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size - 100)
    assert ("checkpoint", 1, "broken") in pair.wrong(model=model)
    (model / "tokenizer.json").unlink()
    [one] = [one for one in pair.examine(model=model) if one["check"] == "checkpoint" and one["state"] == "broken"]
    assert one["text"].startswith("tokenizer.json is missing in")


def test_a_full_shared_memory(pair: Pair) -> None:
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    assert pair.wrong(before=["unshare", "-m", "sh", "-c", script, "sh"]) == {("shm", 1, "broken")}


def test_too_few_open_files(pair: Pair) -> None:
    assert pair.wrong(before=["prlimit", "--nofile=128"]) == {("ulimit", 1, "broken")}


def test_a_clock_that_is_wrong(pair: Pair) -> None:
    odd = [sys.executable, str(HERE / "odd_doctor.py")]
    assert pair.wrong(instead=[*odd, "90", "-"]) == {("clock", 1, "broken")}
    assert pair.wrong(instead=[*odd, "-2", "-"]) == {("clock", 1, "slow")}


def test_versions_that_differ(pair: Pair) -> None:
    found = pair.examine(instead=[sys.executable, str(HERE / "odd_doctor.py"), "0", "0.0.1"])
    [wrong] = [one for one in found if one["state"] != "ok"]
    assert (wrong["check"], wrong["node"]) == ("versions", 1) and "moesaic is 0.0.1 here and" in wrong["text"]


def test_options_that_differ(pair: Pair) -> None:
    found = pair.examine(more=["--block-size", "8"])
    [wrong] = [one for one in found if one["state"] != "ok"]
    assert (wrong["check"], wrong["node"], wrong["text"]) == ("flags", 1, "block_size is 8 here and 16 on the head")


def test_cpus_that_differ(pair: Pair) -> None:
    wrong = pair.wrong(variables={"MOESAIC_ISA": "avx2"})
    assert ("cpu", 1, "slow") in wrong and {check for check, _, _ in wrong} == {"cpu"}


def test_too_little_memory_in_the_control_group() -> None:
    """Outside of the namespaces, where control groups cannot be seen."""
    group = Path("/sys/fs/cgroup/memory") / f"moesaic-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(500 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        script = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        command = [
            "sh",
            "-c",
            script,
            "sh",
            *DOCTOR,
            "--alone",
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "-dpa",
            "127.0.0.1",
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
        wrong = [one for one in json.loads(done.stdout)["findings"] if one["state"] != "ok"]
        assert done.returncode == 1 and [(one["check"], one["node"]) for one in wrong] == [("memory", 1)]
        assert "control group /sys/fs/cgroup/memory/moesaic-test-" in wrong[0]["text"]
    finally:
        group.rmdir()


def test_a_slow_link(pair: Pair) -> None:
    pair.hosts.limit(2)
    try:
        found = pair.examine()
    finally:
        pair.hosts.limit(None)
    wrong = [one for one in found if one["state"] != "ok"]
    assert {one["check"] for one in wrong} == {"link"} and {one["state"] for one in wrong} == {"slow"}
    assert sorted(one["node"] for one in wrong) == [0, 1] and "to node 0: " in wrong[1]["text"]


def test_a_node_that_does_not_come(pair: Pair) -> None:
    found = pair.examine(instead=["true"])
    [wrong] = [one for one in found if one["state"] != "ok"]
    assert (wrong["check"], wrong["node"], wrong["state"]) == ("meeting", 1, "broken")


def test_serve_refuses_early(pair: Pair) -> None:
    serve = [sys.executable, "-m", "moesaic", "serve", str(CHECKPOINT), *pair.words(0)]
    done = subprocess.run(["prlimit", "--nofile=128", *serve], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "moesaic: error: ulimit: 128 open files are allowed" in done.stderr and "ulimit -n" in done.stderr
