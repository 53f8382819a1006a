"""Groups of ranks on several machines: they meet in a TCPStore, and are joined by gloo over TCP.

A machine that vanishes says nothing, and gloo would wait for it until its timeout. So the kernel is told to ask: a
connection whose other end has not answered for some seconds is broken, and a rank that waits for it learns of that.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ep.protocol import Pending
from ep.transport.group import Group, LocalGroup, join_gloo
from ep.transport.joining import rendezvous
from ep.transport.links import Links, open_links
from ep.transport.shm_futex import unsupported
from ep.transport.shm_group import ShmGroup, shm_group

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger("moesaic.remote")

_BOOT = Path("/proc/sys/kernel/random/boot_id")
SILENT_SECONDS = 3  # without an answer of the other machine's kernel
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS - 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000),  # the same while something is sent
)


def remote_groups(
    store: tuple[str, int],
    address: str,
    rank: int,
    size: int,
    timeout: float,
    epoch: int = 0,
    stop: Callable[[], bool] | None = None,
    place: Path | None = None,
) -> tuple[Group, Group]:
    """As ep.table.make_groups with gloo, for ranks of several machines.

    store: host and port of the TCPStore; address: of this machine, where the other ranks reach it. place: a directory
    that exists, where the ranks of this machine find each other (ep/transport/shm_rendezvous.py); None: they exchange
    as those of different machines do.
    """
    if size == 1:
        return LocalGroup(), LocalGroup()

    def open_store() -> Store:
        longest = datetime.timedelta(seconds=timeout)
        return dist.TCPStore(*store, timeout=longest, wait_for_workers=False)  # type: ignore[attr-defined]

    meeting = rendezvous(open_store, f"epoch-{epoch}", rank, size, timeout, stop)
    agreement = join_gloo(meeting, rank, size, timeout, "agreement", epoch, address, stop)
    try:
        experts = join_gloo(meeting, rank, size, timeout, "experts", epoch, address, stop)
        sockets = open_links(meeting, rank, size, experts.all_gather_ints, address, timeout, stop)
        if sockets is not None:
            experts.machine = machine_group(place, rank, size, experts.all_gather_ints, timeout, epoch, stop)
            each = 1 if experts.machine is None else experts.machine.size
            experts.links = Links(rank, range(rank % each, size, each), sockets, timeout, experts.lost)
        watch_connections()
        experts.background = Progress().background
    except BaseException:
        agreement.close()
        raise
    return agreement, experts


def machine_group(
    place: Path | None,
    rank: int,
    size: int,
    gather: Callable[[Sequence[int]], Pending[list[list[int]]]],
    timeout: float,
    epoch: int,
    stop: Callable[[], bool] | None = None,
) -> ShmGroup | None:
    """The ranks of this machine, that is with this place, in shared memory; all ranks call this. None on all of them:
    machines have different numbers of ranks, or one each, or memory cannot be shared."""
    told = 0 if place is None or unsupported() else _name_of(place)
    names = [name for (name,) in gather([told]).wait()]
    each = names.count(names[0])
    alike = all(names[first : first + each].count(names[first]) == each for first in range(0, size, each))
    if 0 in names or each == 1 or size == each or not alike or len(set(names)) * each != size:
        return None
    assert place is not None
    group = None
    try:
        group = shm_group(place, rank % each, each, timeout, "machine", epoch, stop)
        group.signals.shown_from = rank // each * each
    except OSError as error:
        log.warning("ranks of this machine exchange by its network: %s", error)
    if all(joined for (joined,) in gather([group is not None]).wait()):
        return group
    if group is not None:
        group.close()
    return None


def _name_of(place: Path) -> int:
    """Other places, and those of other machines, have other names."""
    found = place.stat()
    text = f"{_BOOT.read_text()} {found.st_dev} {found.st_ino}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") + 1


def watch_connections() -> None:
    """Break every TCP connection of this process whose other end stays silent. gloo does not show its sockets, and all
    others of a rank lead to the same machines."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            if os.readlink(Path("/proc/self/fd") / name).startswith("socket:"):
                _watch(socket.socket(fileno=os.dup(int(name))))


class Progress:
    """gloo's threads of this process, which carry bytes beside the thread that computes.

    In the background they do not interrupt it: the kernel's buffers hold what comes meanwhile. They would do so for
    every 64 KiB that arrives. On a core shared with the computing thread a split step of prompts took 1.19 times the
    ideal without that, and 1.10 times with it (benchmarks/bench_dbo.py --mbit 1600). For the short exchanges of decodes
    it is wrong: nothing is computed meanwhile, and each would wait for a tick (benchmarks/bench_cluster.py).
    """

    def __init__(self) -> None:
        self._tasks = []
        self._background = False
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # ended meanwhile
                if "gloo" in (Path("/proc/self/task") / task / "comm").read_text():
                    self._tasks.append(int(task))

    def background(self, on: bool) -> None:
        """From now on. Costs nothing where nothing changes."""
        if on == self._background:
            return
        self._background = on
        for task in self._tasks:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(task, os.SCHED_BATCH if on else os.SCHED_OTHER, os.sched_param(0))


def _watch(connection: socket.socket) -> None:
    with connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            for level, option, value in _OPTIONS:
                connection.setsockopt(level, option, value)
