"""A Slurm cluster of its own on hosts that are network namespaces: slurmctld on the first, one slurmd on each of the others,
munge for all of them. Nothing of it is the machine's own Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import Hosts
from served import until

INSTALL = "apt-get install slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "munged")
KILL_WAIT = 60  # seconds from scancel's SIGTERM to its SIGKILL


@dataclass
class Farm:
    hosts: Hosts  # 0: the controller; 1, 2, ...: nodes node0, node1, ...
    root: Path
    daemons: dict[str, subprocess.Popen[bytes]]

    def run(self, *command: str, text: str | None = None) -> str:
        """On the controller's host; its output."""
        done = subprocess.run(self.command(*command), input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr, self.logs())
        return done.stdout

    def command(self, *command: str) -> list[str]:
        name = f"moesaic-{os.getpid()}-0"
        variables = [f"SLURM_CONF={self.root}/slurm.conf"]
        return ["ip", "netns", "exec", name, "env", *variables, *command]

    def logs(self) -> str:
        return "\n".join(f"---- {path.name}\n{path.read_text()[-4000:]}" for path in self.root.glob("*.log"))


@contextlib.contextmanager
def slurm_farm(num_nodes: int) -> Iterator[Farm]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {missing[0]}: {INSTALL}")
    root = Path(tempfile.mkdtemp(prefix="farm-"))
    root.chmod(0o755)
    try:
        farm = None
        with Hosts(num_nodes + 1) as hosts, _names(hosts):
            farm = Farm(hosts, root, {})
            _start(farm)
            yield farm
    finally:
        for daemon in farm.daemons.values() if farm is not None else ():
            daemon.wait(10)  # killed with their hosts
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _names(hosts: Hosts) -> Iterator[None]:
    """`ip netns exec` shows the files of /etc/netns/NAME in the place of those of /etc."""
    places = [Path(f"/etc/netns/moesaic-{os.getpid()}-{host}") for host in range(len(hosts.addresses))]
    lines = [f"{hosts.addresses[0]} controller"]
    lines += [f"{address} node{index}" for index, address in enumerate(hosts.addresses[1:])]
    for place in places:
        place.mkdir(parents=True)
        (place / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
    try:
        yield
    finally:
        for place in places:
            shutil.rmtree(place)


def _start(farm: Farm) -> None:
    hosts, root = farm.hosts, farm.root
    nodes = len(hosts.addresses) - 1
    for name in ("state", "munge", *(f"spool-node{node}" for node in range(nodes))):
        (root / name).mkdir(mode=0o755)
    (root / "slurm.conf").write_text(_config(hosts, root, nodes))
    (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    key = root / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={root}/munge/socket"]
    munge += [f"--pid-file={root}/munge/pid", f"--log-file={root}/munge.log", f"--seed-file={root}/munge/seed"]
    start(farm, "munged", 0, munge)
    until(lambda: (root / "munge" / "socket").exists(), 20, "munged listens")
    start(farm, "slurmctld", 0, ["slurmctld", "-D", "-f", f"{root}/slurm.conf"])
    for node in range(nodes):
        start_node(farm, node)
    idle = "\n".join([f"node{node} idle" for node in range(nodes)])
    info = farm.command("sinfo", "-h", "-N", "-o", "%N %t")
    until(
        lambda: subprocess.run(info, capture_output=True, text=True).stdout.strip().replace("  ", " ") == idle,
        40.0,
        f"all nodes are idle: {farm.logs()}",
    )


def start(farm: Farm, name: str, host: int, command: list[str]) -> None:
    environment = {**os.environ, "SLURM_CONF": f"{farm.root}/slurm.conf"}
    named = [
        "unshare",
        "--uts",
        "sh",
        "-c",
        'hostname "$0" && exec "$@"',
        "controller" if host == 0 else f"node{host - 1}",
    ]
    with (farm.root / f"{name}.log").open("ab") as log:
        farm.daemons[name] = farm.hosts.start(host, [*named, *command], stdout=log, stderr=log, env=environment)


def start_node(farm: Farm, node: int) -> None:
    start(farm, f"slurmd{node}", node + 1, ["slurmd", "-D", "-N", f"node{node}", "-f", f"{farm.root}/slurm.conf"])


def _config(hosts: Hosts, root: Path, nodes: int) -> str:
    """No control groups: the daemons share the machine's."""
    each = "\n".join(
        f"NodeName=node{node} NodeAddr={hosts.addresses[node + 1]} NodeHostname=node{node} CPUs=2 RealMemory=8000 State=UNKNOWN"
        for node in range(nodes)
    )
    return f"""ClusterName=farm
SlurmctldHost=controller({hosts.addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldPort=6817
SlurmdPort=6818
SlurmdTimeout=60
KillWait={KILL_WAIT}
{each}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE
"""
