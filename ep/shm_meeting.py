"""Where the processes of one machine find each other: a folder in which each signs in, and whether each still lives.

A rank's sign-in is one small file, made whole by a rename: its process id, when that process started (ids are used
again), and the number of an open file that it offers to the others with that file's inode (-1: none).
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ep.protocol import PeerLost

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01  # seconds between two looks into the folder


@dataclass(frozen=True, slots=True)
class SignIn:
    """What a rank wrote: who it is, and the file it offers."""

    pid: int
    started: int
    file: int
    inode: int

    def open(self) -> int:
        """A descriptor of the file offered. Raises FileNotFoundError when it is offered no more."""
        file = os.open(f"/proc/{self.pid}/fd/{self.file}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(file).st_ino != self.inode:  # its number has passed to another file
            os.close(file)
            raise FileNotFoundError(f"process {self.pid} has withdrawn its file {self.file}")
        return file


class Watch:
    """Tells which of some processes have ended, however they ended. No rights over them are needed."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}  # pidfd -> rank

    def add(self, rank: int, who: SignIn) -> bool:
        """False when that process has ended already."""
        try:
            pidfd = os.pidfd_open(who.pid)
        except ProcessLookupError:
            return False
        self._poll.register(pidfd, select.POLLIN)
        self._rank_of[pidfd] = rank
        # Read after the pidfd was opened: the id cannot have passed to another process in between.
        return started(who.pid) == who.started

    def ended(self) -> tuple[int, ...]:
        """Ranks whose process is no more; does not wait."""
        rank_of = self._rank_of
        return tuple(sorted(rank_of[pidfd] for pidfd, _ in self._poll.poll(0) if pidfd in rank_of))

    def close(self) -> None:
        """Watch nobody any more. Another thread may be asking."""
        pidfds, self._rank_of, self._poll = list(self._rank_of), {}, select.poll()
        for pidfd in pidfds:
            os.close(pidfd)


def started(pid: int) -> int:
    """When the process started, in the kernel's ticks (proc_pid_stat(5)); -1: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(text.rpartition(")")[2].split()[19])  # the name in brackets may hold anything


def sign_in(folder: Path, name: str, rank: int, file: int = -1) -> Path:
    """Say that this process is `rank` of the meeting `name`. The path is the caller's to remove when all have come."""
    path = _path(folder, name, rank)
    draft = path.with_suffix(".new")
    inode = -1 if file < 0 else os.fstat(file).st_ino
    draft.write_text(f"{os.getpid()} {started(os.getpid())} {file} {inode}")
    draft.replace(path)
    return path


def await_sign_ins(
    folder: Path,
    name: str,
    rank: int,
    size: int,
    timeout: float,
    watch: Watch,
    stop: Callable[[], bool] | None = None,
) -> dict[int, SignIn]:
    """What every other rank wrote; `watch` then watches them.

    stop: asked every few milliseconds; True ends the waiting. Raises PeerLost: naming who has signed in and died, or who
    has not come within `timeout` seconds or until `stop`.
    """
    deadline = time.monotonic() + timeout
    found: dict[int, SignIn] = {}
    pause = _FIRST_PAUSE
    while True:
        for peer in range(size):
            if peer == rank or peer in found:
                continue
            try:
                pid, start, file, inode = _path(folder, name, peer).read_text().split()
            except FileNotFoundError:
                continue
            found[peer] = SignIn(int(pid), int(start), int(file), int(inode))
            if not watch.add(peer, found[peer]):
                raise PeerLost((peer,), f"rank {rank} found that it had signed in to {name} and ended")
        ended = watch.ended()
        if ended:
            raise PeerLost(ended, f"rank {rank} saw them end while it waited for all to sign in to {name}")
        if len(found) == size - 1:
            return found
        absent = _absent(range(size), rank, found)
        if stop is not None and stop():
            raise PeerLost(absent, f"rank {rank} was told not to wait for them at {name}")
        if time.monotonic() > deadline:
            raise PeerLost(absent, f"rank {rank} waited {timeout:g} s for them at {name}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _absent(ranks: Iterable[int], rank: int, found: dict[int, SignIn]) -> tuple[int, ...]:
    return tuple(peer for peer in ranks if peer != rank and peer not in found)


def _path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"meet-{name}-{rank}"
