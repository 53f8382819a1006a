"""Where the processes of one machine find each other: a file in which each signs in, and whether each still lives.

The file has its whole size from the beginning, and is written in place: no rendezvous fails because a disk is full. A
rank's sign-in is one record of it: its process id, when that process started (ids are used again), and what it offers
to the others: the number of an open file with that file's inode, and a port (-1: none). Meetings of one name have some
records by turns, epoch after epoch, so that one which is out of date does not disturb its followers. A record has one
writer; its checksum tells a reader that it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

import dbo.alive as alive
from ep.protocol import PeerLost

_RECORD = struct.Struct("=QQqqqqq")  # checksum, the rendezvous's name and epoch, and the fields of SignIn
_RECORD_BYTES = 64
_RANKS, _TURNS, _NAMES = 64, 16, 16  # records of a rendezvous, meetings of a name by turns, names
_FILE_BYTES = _RECORD_BYTES * _RANKS * _TURNS * _NAMES
_FILE_NAME = "meetings"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01  # seconds between two looks


class SignIn(Struct, frozen=True):
    """What a rank wrote: who it is, and what it offers."""

    pid: int
    started: int
    file: int = -1
    inode: int = -1
    port: int = -1

    def open(self) -> int:
        """A descriptor of the file offered. Raises FileNotFoundError when it is offered no more."""
        try:
            file = os.open(f"/proc/{self.pid}/fd/{self.file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            raise FileNotFoundError(
                f"process {self.pid} has withdrawn its file {self.file}: it is a socket now"
            ) from error
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
        """Watch no process any more. Another thread may be asking."""
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


class Rendezvous:
    """One rendezvous, as `rank` of `size` processes sees it."""

    def __init__(self, records: mmap.mmap, name: str, epoch: int, rank: int, size: int) -> None:
        """name, epoch: keep meetings in one file apart."""
        self.name = f"{name}-{epoch}"
        self._records = records
        self._key = zlib.crc32(name.encode()) << 32 | epoch & 0xFFFFFFFF
        place = zlib.crc32(name.encode()) % _NAMES * _TURNS + epoch % _TURNS
        self._first = place * _RANKS * _RECORD_BYTES
        self._rank = rank
        self._size = size

    def sign_in(self, file: int = -1, port: int = -1, who: SignIn | None = None) -> None:
        """Say that this process is here. who: it is another process (for tests)."""
        inode = -1 if file < 0 else os.fstat(file).st_ino
        who = who or SignIn(os.getpid(), started(os.getpid()), file, inode, port)
        record = _RECORD.pack(0, self._key, who.pid, who.started, who.file, who.inode, who.port)
        self._put(zlib.crc32(record[8:]).to_bytes(8, "little") + record[8:])

    def sign_out(self) -> None:
        self._put(bytes(_RECORD.size))

    def await_all(self, timeout: float, watch: Watch, stop: Callable[[], bool] | None = None) -> dict[int, SignIn]:
        """What every other rank wrote; `watch` then watches them.

        stop: asked every few milliseconds; True ends the waiting. Raises PeerLost: naming who has signed in and died,
        or who has not come within `timeout` seconds or until `stop`.
        """
        rank, deadline = self._rank, time.monotonic() + timeout
        found: dict[int, SignIn] = {}
        pause = _FIRST_PAUSE
        while True:
            for peer in range(self._size):
                who = None if peer == rank or peer in found else self._read(peer)
                if who is None:
                    continue
                found[peer] = who
                if not watch.add(peer, who):
                    raise PeerLost((peer,), f"rank {rank} found that it had signed in to {self.name} and ended")
            ended = watch.ended()
            if ended:
                raise PeerLost(ended, f"rank {rank} saw them end while it waited for all to sign in to {self.name}")
            if len(found) == self._size - 1:
                return found
            absent = _absent(range(self._size), rank, found)
            if stop is not None and stop():
                raise PeerLost(absent, f"rank {rank} was told not to wait for them at {self.name}")
            if time.monotonic() > deadline:
                raise PeerLost(absent, f"rank {rank} waited {timeout:g} s for them at {self.name}")
            alive.waits(alive.AGREEING, deadline - timeout, alive.mask(absent))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _put(self, record: bytes) -> None:
        at = self._first + self._rank * _RECORD_BYTES
        self._records[at : at + len(record)] = record

    def _read(self, peer: int) -> SignIn | None:
        at = self._first + peer * _RECORD_BYTES
        record = self._records[at : at + _RECORD.size]
        checksum, key, pid, start, file, inode, port = _RECORD.unpack(record)
        if key != self._key or checksum != zlib.crc32(record[8:]):
            return None
        return SignIn(pid, start, file, inode, port)


@contextlib.contextmanager
def rendezvous(place: Path, name: str, rank: int, size: int, epoch: int) -> Iterator[Rendezvous]:
    """A Rendezvous in the file `place`, or in one of the directory `place`, either of which exists. At the end this
    rank signs out. Raises OSError."""
    path, make = (place / _FILE_NAME, os.O_CREAT) if place.is_dir() else (place, 0)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | make, 0o600)
    try:
        if os.fstat(file).st_size < _FILE_BYTES:
            os.posix_fallocate(file, 0, _FILE_BYTES)
        records = mmap.mmap(file, _FILE_BYTES)
    finally:
        os.close(file)
    with records:
        met = Rendezvous(records, name, epoch, rank, size)
        try:
            yield met
        finally:
            met.sign_out()


def _absent(ranks: Iterable[int], rank: int, found: dict[int, SignIn]) -> tuple[int, ...]:
    return tuple(peer for peer in ranks if peer != rank and peer not in found)
