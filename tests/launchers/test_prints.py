"""What `moesaic launch SYSTEM --print` writes: read by the systems' own parsers where they are here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from launch.launchers.place import find_place
from moesaic import serve
from moesaic.launch import RUNS, command

pytestmark = pytest.mark.launchers
HERE = Path(__file__).parent
SCRIPTS = ("slurm", "torchrun", "ssh", "netns", "ray")
MORE = {"ssh": ["--hosts", "a,b"], "systemd": ["--hosts", "a,b"]}


def printed(system: str, *words: str) -> str:
    done = CliRunner().invoke(command, [system, "--print", *MORE.get(system, []), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def serve_values(words: list[str]) -> dict[str, Any]:
    """As `moesaic serve` reads them."""
    return serve.command.make_context("serve", list(words)).params


@pytest.mark.parametrize("system", list(RUNS))
def test_every_system_starts_the_same_server(system: str) -> None:
    text = printed(system, "--nodes", "2", "--ranks-per-node", "2", "/models/one", "--", "--max-model-len", "4096")
    lines = [re.sub(r"^- |'", "", line.strip()).strip("\\ ") for line in text.splitlines()]
    joined = " ".join(lines)
    assert re.search(r"--data-parallel-size-local 2\b", joined) and "--max-model-len 4096" in joined
    assert re.search(r"(serve|node|--|alone) /models/one --", joined) and ("--nnodes" in joined) == (system != "ray")


@pytest.mark.parametrize("system", SCRIPTS)
def test_scripts_are_bash(system: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(printed(system, "--nodes", "2", "--", "--served-model-name", "it's"))
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", "-S", "warning", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_slurm_script() -> None:
    text = printed("slurm", "--nodes", "2", "--gpus-per-node", "8", "/models/v3")
    options = dict(re.findall(r"#SBATCH --([\w-]+)=?(.*)", text))
    assert options | {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "no-kill": ""} == options
    assert options["signal"] == "TERM@50"  # a drain and the end of the ranks
    words = shlex.split(text[text.index("srun") :].split("&\n")[0].replace("\\\n", " "))
    assert words[: words.index("node")][-4:] == ["--label", sys.executable, "-m", "moesaic"]
    values = serve_values(words[words.index("node") + 1 :])
    assert (values["nnodes"], values["data_parallel_size_local"], values["node_rank"]) == (-1, (8,), None)
    assert not re.search(r"\$\{?SLURM", text)  # nothing that the batch shell would expand for all tasks alike


def test_each_pod_of_a_stateful_set_is_a_node() -> None:
    documents = list(yaml.safe_load_all(printed("k8s", "--nodes", "3", "--ranks-per-node", "1,2,1")))
    sets = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "StatefulSet"}
    ranks: list[int] = []
    for _, spec in sorted(sets.items()):
        start = spec.get("ordinals", {}).get("start", 0)
        for pod in range(start, start + spec["replicas"]):
            [container] = spec["template"]["spec"]["containers"]
            named = {"NODE_RANK": str(pod)} if any(one["name"] == "NODE_RANK" for one in container["env"]) else {}
            words = [re.sub(r"\$\((\w+)\)", lambda found: named[found[1]], word) for word in container["command"]]  # noqa: B023
            values = serve_values(words[2:])
            place = find_place({}, values["nnodes"], values["node_rank"], values["data_parallel_address"])
            assert (place.nodes, place.head, values["data_parallel_size_local"]) == (
                3,
                "moesaic-head-0.moesaic",
                (1, 2, 1),
            )
            ranks.append(place.index)
    assert ranks == [0, 1, 2]
    services = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "Service"}
    assert services["moesaic"]["clusterIP"] == "None" and services["moesaic"]["publishNotReadyAddresses"]


@pytest.mark.parametrize("kind", ["statefulset", "lws"])
def test_a_pod_has_time_for_its_drain(kind: str) -> None:
    text = printed("k8s", "--kind", kind, "--shutdown-timeout", "33")
    [grace] = set(re.findall(r"terminationGracePeriodSeconds: (\d+)", text))
    assert int(grace) >= 5 + 33 + 10
    probes = set(re.findall(r"path: (/\w+)", text)) - {"/models"}
    assert probes == {"/health", "/ready", "/live"}


def test_one_dead_pod_does_not_restart_all() -> None:
    documents = list(
        yaml.safe_load_all(printed("k8s", "--kind", "lws", "--nodes", "4", "--gpus-per-node", "8", "/models/v3"))
    )
    [group] = [one for one in documents if one["kind"] == "LeaderWorkerSet"]
    template = group["spec"]["leaderWorkerTemplate"]
    assert (template["restartPolicy"], template["size"]) == ("None", 4)
    for role in ("leaderTemplate", "workerTemplate"):
        assert "restartPolicy" not in template[role]["spec"]  # Always: a container that ends comes back in its pod


@pytest.mark.parametrize("kind", ["statefulset", "lws"])
def test_manifests_follow_the_published_schemas(kind: str) -> None:
    """Kubernetes' own for its kinds, strictly; for a LeaderWorkerSet what lws.schema.json says of the fields we use."""
    reason = "pip install 'moesaic[manifests]'"
    validator = pytest.importorskip("kubernetes_validate", reason=reason)
    jsonschema = pytest.importorskip("jsonschema", reason=reason)
    schema = json.loads((HERE / "lws.schema.json").read_text())
    text = printed(
        "k8s", "--kind", kind, "--gpus-per-node", "8", "--memory-per-node", "64Gi", "--cpus-per-node", "8", "/m"
    )
    for document in yaml.safe_load_all(text):
        if document["kind"] == "LeaderWorkerSet":
            jsonschema.validate(document, schema)
            for role in ("leaderTemplate", "workerTemplate"):
                pod = {"apiVersion": "v1", "kind": "Pod", **document["spec"]["leaderWorkerTemplate"][role]}
                validator.validate(pod, "1.32", strict=True)
        else:
            validator.validate(document, "1.32", strict=True)


def test_the_check_of_manifests_finds_mistakes() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install 'moesaic[manifests]'")
    jsonschema = pytest.importorskip("jsonschema", reason="pip install 'moesaic[manifests]'")
    service = next(yaml.safe_load_all(printed("k8s")))
    service["spec"]["publishNotReadyAdresses"] = True
    with pytest.raises(validator.ValidationError):
        validator.validate(service, "1.32", strict=True)
    group = next(one for one in yaml.safe_load_all(printed("k8s", "--kind", "lws")) if one["kind"] == "LeaderWorkerSet")
    group["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(group, json.loads((HERE / "lws.schema.json").read_text()))


def test_compose_services_find_the_head_by_name() -> None:
    services = yaml.safe_load(printed("compose", "--nodes", "3"))["services"]
    assert list(services) == ["node0", "node1", "node2"]
    for index, service in enumerate(services.values()):
        values = serve_values(service["command"][2:])
        assert (values["node_rank"], values["data_parallel_address"]) == (index, "node0")
        assert service["restart"] == "on-failure" and ("ports" in service) == (index == 0)
    check = services["node0"]["healthcheck"]["test"]
    compile(check[3], "check", "exec")
    assert "/ready" in check[3]


def test_the_systemd_unit(tmp_path: Path) -> None:
    text = printed("systemd", "/models/100% mine")
    unit = tmp_path / "moesaic@.service"
    unit.write_text(text)
    assert '"/models/100%% mine"' in text.replace("'", '"') and "--node-rank %i" in text
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze: apt-get install systemd")
    (tmp_path / "moesaic@0.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "moesaic@0.service")], capture_output=True, text=True
    )
    assert "moesaic@" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "--nodes", "0"], "--nodes must be 1 to 62, not 0"),
        (["slurm", "--ranks-per-node", "1,2,3"], "--ranks-per-node must be 1 or more"),
        (["slurm", "--gpus-per-node", "2", "--ranks-per-node", "4"], "--ranks-per-node 4 exceeds --gpus-per-node 2"),
        (["ssh"], "ssh needs --hosts"),
        (["systemd"], "systemd needs --hosts"),
        (["ssh", "--hosts", "a,b,c"], "--hosts has 3 names for 2 nodes"),
        (["slurm", "--", "--port", "1"], "--port is decided by launch"),
        (["slurm", "--", "--uds", "a.sock"], "--uds is decided by launch"),
        (["slurm", "--", "-dpl", "1"], "--data-parallel-size-local is decided by launch"),
        (["slurm", "/m", "--", "stray"], "unexpected word 'stray'"),
        (["slurm", "--kind", "lws"], "--kind lws is for k8s, not for slurm"),
    ],
)
def test_what_is_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(command, [words[0], "--print", *words[1:]])
    assert isinstance(done.exception, ValueError) and said in str(done.exception)


def test_an_unknown_option_of_serve_is_found_before_a_job_waits() -> None:
    done = CliRunner().invoke(command, ["slurm", "--print", "--", "--max-model-length", "1"])
    assert done.exit_code == 2 and "--max-model-length" in done.output


def test_systemd_is_only_printed() -> None:
    done = CliRunner().invoke(command, ["systemd", "--hosts", "a,b"])
    assert isinstance(done.exception, ValueError) and "systemd needs --print" in str(done.exception)
