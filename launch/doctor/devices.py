"""Interfaces, GPUs and InfiniBand of one machine."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import socket
import struct
import subprocess

from configs.gpu import find_rdma
from launch.doctor.findings import Finding
from launch.doctor.machine import Machine

SIOCGIFADDR = 0x8915  # linux/sockios.h
LOOK_SECONDS = 3.0


def interface_of(address: str) -> str:
    """The name of the interface that has this address; "": none has."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    with contextlib.suppress(OSError):
        for line in open("/proc/net/if_inet6").read().splitlines():  # noqa: SIM115
            words = line.split()
            if socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])) == address:
                return words[5]
    return ""


def interfaces(machine: Machine, address: str) -> Finding:
    """Do the variables of libraries name the interface of this machine's address?"""
    route = interface_of(address)
    names = {name for _, name in socket.if_nameindex()}
    for variable, text in machine.variables.items():
        wanted = text.removeprefix("=").split(",")
        exact, negated = text.startswith("="), text.startswith("^")
        if negated:
            continue
        matching = {name for name in names for want in wanted if (name == want if exact else name.startswith(want))}
        if not matching:
            said = f"{variable}={text}: there is no such interface ({', '.join(sorted(names))})"
            return machine.found("interface", "broken", said, f"export {variable}={route}" if route else "")
        if route and route not in matching:
            said = f"{variable}={text}, but the other machines are reached from {address} ({route})"
            return machine.found("interface", "broken", said, f"export {variable}={route}")
    mtu = machine.read(f"sys/class/net/{route}/mtu")
    return machine.found("interface", "ok", f"{address} ({route or 'no interface'}{', mtu ' + mtu if mtu else ''})")


def devices(machine: Machine) -> list[Finding]:
    """Where the plan has GPUs."""
    if machine.plan is None or machine.plan.device != "cuda":
        return []
    found = [_gpus(machine)]
    no_rdma, no_ibgda = find_rdma(machine.root)
    if no_rdma:
        found.append(machine.found("rdma", "slow", no_rdma, "ibstat; modprobe mlx5_ib"))
        return found
    found += _gids(machine)
    if no_ibgda:
        fix = "NVreg_EnableStreamMemOPs=1 and PeerMappingOverride=1 in /etc/modprobe.d, or gdrdrv"
        found.append(machine.found("ibgda", "slow", no_ibgda, fix))
    if not any((machine.root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")):
        found.append(machine.found("gdr", "slow", "no module nvidia_peermem", "modprobe nvidia-peermem"))
    return found


def _gpus(machine: Machine) -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return machine.found("gpu", "broken", "there is no nvidia-smi", "install the driver")
    fields = "driver_version,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    query = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return machine.found("gpu", "broken", f"nvidia-smi failed ({type(error).__name__})", "nvidia-smi")
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 4]
    if len(rows) < machine.ranks:
        return machine.found("gpu", "broken", f"{len(rows)} GPU(s) for {machine.ranks} ranks", "nvidia-smi")
    for index, (_, _, total, used, errors) in enumerate(rows):
        if errors.isdecimal() and int(errors):
            return machine.found("gpu", "broken", f"GPU {index}: {errors} memory errors", "nvidia-smi -q -d ECC")
        if used.isdecimal() and total.isdecimal() and int(used) > int(total) // 10:
            return machine.found("gpu", "slow", f"GPU {index}: {used} of {total} MiB are in use", "nvidia-smi")
    return machine.found("gpu", "ok", f"{len(rows)} {rows[0][1]}, driver {rows[0][0]}")


def _gids(machine: Machine) -> list[Finding]:
    """Every active port must have an entry: one with zeros alone kills a rank when it connects."""
    found = []
    for port in sorted(machine.root.glob("sys/class/infiniband/*/ports/*")):
        name = "/".join(port.parts[-3::2])
        place = port.relative_to(machine.root)
        state = machine.read(f"{place}/state")
        if "ACTIVE" not in state:
            found.append(machine.found("rdma", "slow", f"port {name} is {state or 'unknown'}", "ibstat"))
            continue
        gids = [machine.read(f"{place}/gids/{gid.name}") for gid in sorted((port / "gids").glob("*"))]
        if not any(re.search(r"[1-9a-f]", gid) for gid in gids):
            found.append(machine.found("rdma", "broken", f"port {name} has no GID", "show_gids; ip addr"))
        else:
            found.append(machine.found("rdma", "ok", f"port {name}, {machine.read(f'{place}/rate')}"))
    return found
