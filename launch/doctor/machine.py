"""Checks of one machine: its limits, memory, cores and CPU, as the plan needs them. Nothing here takes long."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from configs.engine import Plan
from launch.doctor.findings import Finding, State

MEBI = 1 << 20
FILES, FILES_PER_RANK = 192, 48  # descriptors of a process: libraries and sockets, and what each rank adds
SHM_BYTES = 16 * MEBI  # of libraries that keep small files there; ours are anonymous
SHM_BYTES_PER_GPU = 64 * MEBI  # NCCL's
PROCESS_BYTES = 450 * MEBI  # of the front, and of a process that waits to become a rank
AMX_FLAG = "amx_bf16"


class Machine(Struct, frozen=True):
    """root: of the file system; variables: those by which libraries are told to take an interface."""

    node: int
    plan: Plan | None  # None: none could be made
    root: Path = Path("/")
    variables: Mapping[str, str] = {}

    @property
    def ranks(self) -> int:
        if self.plan is None:
            return 1
        return self.plan.data_parallel_size_local or self.plan.data_parallel_size

    def read(self, path: str) -> str:
        """ "": there is no such file."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return ""

    def found(self, check: str, state: State, text: str, fix: str = "") -> Finding:
        return Finding(check, self.node, state, text, fix)


def quick_checks(machine: Machine) -> list[Finding]:
    checks: tuple[Callable[[Machine], Finding], ...] = (limits, shm, memory, cores, cpu, pages, numa)
    return [check(machine) for check in checks]


def limits(machine: Machine) -> Finding:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES + FILES_PER_RANK * (1 if machine.plan is None else machine.plan.data_parallel_size)
    if files != resource.RLIM_INFINITY and files < wanted:
        text = f"{files} open files are allowed (ulimit -n), {wanted} are needed"
        return machine.found("ulimit", "broken", text, f"ulimit -n {max(4096, wanted)}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    on_gpus = machine.plan is not None and machine.plan.device == "cuda"
    if on_gpus and locked != resource.RLIM_INFINITY:
        text = f"{locked // 1024} KiB may be locked (ulimit -l); RDMA registers memory by locking it"
        return machine.found("ulimit", "broken", text, "ulimit -l unlimited, or capability IPC_LOCK")
    return machine.found("ulimit", "ok", f"open files {files if files >= 0 else 'unlimited'}")


def shm(machine: Machine) -> Finding:
    try:
        status = os.statvfs(machine.root / "dev/shm")
    except OSError as error:
        return machine.found("shm", "broken", f"/dev/shm: {error.strerror}", "mount -t tmpfs tmpfs /dev/shm")
    free = status.f_bavail * status.f_frsize
    on_gpus = machine.plan is not None and machine.plan.device == "cuda"
    wanted = SHM_BYTES_PER_GPU * machine.ranks if on_gpus else SHM_BYTES
    if free < wanted:
        text = f"/dev/shm has {free // MEBI} MiB free, {wanted // MEBI} MiB are needed"
        return machine.found("shm", "broken", text, "ls -lS /dev/shm; mount -o remount,size=8G /dev/shm")
    return machine.found("shm", "ok", f"/dev/shm has {free // MEBI} MiB free")


def memory(machine: Machine) -> Finding:
    """Needed by this machine's ranks; there, free and at all, in the machine and in every control group above us."""
    plan = machine.plan
    free = whole = 1 << 62
    where = "the machine"
    for line in machine.read("proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            whole = int(rest.split()[0]) * 1024
        elif name == "MemAvailable":
            free = int(rest.split()[0]) * 1024
    for group, limit, used in _memory_groups(machine):
        if limit < whole:
            whole, where = limit, f"control group {group}"
        free = min(free, max(0, limit - used))
    needed = PROCESS_BYTES
    if plan is not None and plan.device == "cpu":
        needed += max(1, len(plan.store_nodes)) * plan.store_bytes + machine.ranks * plan.rank_bytes
    sizes = f"{needed // MEBI} MiB are needed, {where} has {whole // MEBI} MiB, {free // MEBI} MiB of them free"
    if needed > whole:
        fix = "a larger limit (memory.max, --memory-per-node), or --kv-cache-memory-bytes"
        return machine.found("memory", "broken", sizes, fix)
    if needed > free:
        return machine.found("memory", "slow", sizes, "ps axo rss,pid,args --sort -rss | head")
    return machine.found("memory", "ok", sizes)


def cores(machine: Machine) -> Finding:
    allowed = len(os.sched_getaffinity(0))
    quota = min(_cpu_quotas(machine), default=float(allowed))
    threads = machine.ranks * (1 if machine.plan is None else machine.plan.threads_per_rank)
    have = min(float(allowed), quota)
    text = f"{threads} threads of ranks, {allowed} cores" + (f", a quota of {quota:g}" if quota < allowed else "")
    if have + 0.5 < threads:
        return machine.found("cores", "slow", text, f"--threads-per-rank {max(1, int(have) // machine.ranks)}")
    return machine.found("cores", "ok", text)


def cpu(machine: Machine) -> Finding:
    used = "" if machine.plan is None else machine.plan.native_kernels
    has_amx = AMX_FLAG in cpu_flags(machine)
    if machine.plan is not None and machine.plan.device == "cuda":
        return machine.found("cpu", "ok", "tensors are on GPUs")
    if used == "none":
        why = machine.plan.reasons.get("native_kernels", "") if machine.plan is not None else ""
        return machine.found("cpu", "slow", f"no native kernels: {why}", "pip install . with a C++ compiler")
    if has_amx and used and used != "amx":
        why = machine.plan.reasons.get("native_kernels", "") if machine.plan is not None else ""
        asked = why.startswith("MOESAIC_ISA")
        text = f"the CPU has AMX, kernels use {used} ({why if asked else 'the kernel gives no permission for AMX'})"
        fix = "unset MOESAIC_ISA" if asked else "dmesg | grep -i amx; a kernel from 5.16 on, no seccomp for arch_prctl"
        return machine.found("cpu", "slow", text, fix)
    return machine.found("cpu", "ok", f"kernels use {used or 'what the CPU has'}")


def pages(machine: Machine) -> Finding:
    mode = machine.read("sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in mode:
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return machine.found("hugepages", "slow", "large pages are off: weights take more time to be found", fix)
    return machine.found("hugepages", "ok", mode or "the kernel does not tell")


def numa(machine: Machine) -> Finding:
    nodes = sorted((machine.root / "sys/devices/system/node").glob("node[0-9]*"))
    return machine.found("numa", "ok", f"{max(1, len(nodes))} node(s) of memory")


def cpu_flags(machine: Machine) -> set[str]:
    lines = (line for line in machine.read("proc/cpuinfo").splitlines() if line.startswith("flags"))
    return set(next(lines, "").partition(":")[2].split())


def _groups(machine: Machine, controller: str) -> Iterator[Path]:
    """The control group of this process for a controller, and those above it."""
    for line in machine.read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops = [machine.root / "sys/fs/cgroup", machine.root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            tops = [machine.root / "sys/fs/cgroup" / controllers, machine.root / "sys/fs/cgroup" / controller]
        else:
            continue
        for top in tops[:1] if tops[0].is_dir() else tops[1:]:
            group = top / path.lstrip("/")
            yield from (part for part in (group, *group.parents) if part.is_relative_to(top))


def _memory_groups(machine: Machine) -> Iterator[tuple[str, int, int]]:
    """Path, limit and use of each that has a limit."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for group in _groups(machine, "memory"):
        for limit_name, use_name in names:
            limit = machine.read(str((group / limit_name).relative_to(machine.root)))
            if limit.isdecimal():
                used = machine.read(str((group / use_name).relative_to(machine.root)))
                yield str(group), int(limit), int(used) if used.isdecimal() else 0


def _cpu_quotas(machine: Machine) -> Iterator[float]:
    for group in _groups(machine, "cpu"):
        place = group.relative_to(machine.root)
        words = machine.read(f"{place}/cpu.max").split()
        if len(words) == 2 and words[0].isdecimal():
            yield int(words[0]) / int(words[1])
        quota, period = machine.read(f"{place}/cpu.cfs_quota_us"), machine.read(f"{place}/cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
