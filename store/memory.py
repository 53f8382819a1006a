"""The store of one machine: a file in memory (memfd), or the file of the disk cache, that holds packed weights.

The first process of a server makes the file and keeps it; ranks open it through /proc/PID/fd, which the kernel allows
to processes of the same user only. What is in it is cut into *parts*, numbered alike by all ranks. A part is claimed by
a lock on one byte (fcntl(2), open file description locks): the kernel takes it back when the process that has it ends,
however that happens, so that another can fill the part instead.

The file: HEADER_BYTES of header, then for each part where it begins and whether it is full, then the parts. When all
are full, every rank maps the file anew, for reading only, at the same address; the last one that does so seals it, and
from then on the kernel lets nobody write to it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from store.pages import (
    ALIGNMENT,
    FAILED,
    LARGE_PAGE,
    MADV_HUGEPAGE,
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_NORESERVE,
    MAP_PRIVATE,
    MAP_SHARED,
    PROT_NONE,
    PROT_READ,
    PROT_WRITE,
    LargePages,
    load_libc,
    populate,
    up,
)

MOST_WRITTEN = 1 << 30  # bytes by one system call
MAGIC = b"moesaic weights\n"
VERSION = 2  # of this file's layout
HEADER_BYTES = 4096
_HEADER = struct.Struct("<16sQQQQ64s")  # magic, version, number of parts, bytes in use, how many are full, key
_PART = struct.Struct("<QQ")  # offset (0: no room yet), full
_LOCK = struct.Struct("hhqqi4x")  # struct flock
# Bytes that are locked; parts follow.
_ROOM_LOCK, _FIRST_PART_LOCK = 0, 1
_USE_LOCK = 1 << 62  # shared by all that use a full store
LOCK_SECONDS = 10.0  # for the lock on the header, which is held for microseconds

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
Buffer: TypeAlias = "bytes | ctypes.Array[ctypes.c_uint8]"


class StoreError(ValueError):
    """A store that cannot be used: one line that says why."""


def make_store(name: str) -> int:
    """A descriptor of an empty store in memory, which lives as long as something has it open or mapped."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(file, 0o600)
    return file


def complete_key(file: int) -> str:
    """The key of a store that is full; "": it is not, or is no store of this version."""
    raw = os.pread(file, _HEADER.size, 0)
    if len(raw) < _HEADER.size:
        return ""
    magic, version, num_parts, used, full, key = _HEADER.unpack(raw)
    whole = magic == MAGIC and version == VERSION and full >= num_parts > 0 and os.fstat(file).st_size >= used
    return str(key.rstrip(b"\0").decode()) if whole else ""


def in_use(file: int) -> bool:
    """Whether some process uses this store (`Store.use`), by a descriptor of its own."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _USE_LOCK, 1, 0)
    found, *_ = _LOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))
    return bool(found != fcntl.F_UNLCK)


class Store:
    """One rank's view of the store. complete: all parts are full.

    Raises StoreError when the file cannot be opened, or holds other weights than those of `key`.
    """

    def __init__(self, path: Path, key: str, capacity: int) -> None:
        """key: at most 64 characters. capacity: bytes of addresses to reserve; no memory is taken."""
        self._key = key.encode()
        assert len(self._key) <= 64
        self._libc = load_libc()
        self._header = threading.Lock()  # threads of one process share the lock on the file
        self.num_parts = 0
        try:
            self._reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"the store of weights cannot be opened: {error.strerror}") from None
        self.complete = complete_key(self._reader) == key
        self._writer = -1
        if not self.complete:
            try:
                self._writer = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                os.close(self._reader)
                raise StoreError(f"the store of weights cannot be filled: {error.strerror}") from None
        self._size = up(max(capacity, self.used), LARGE_PAGE)
        self._reserved = self._libc.mmap(
            None, self._size + LARGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0
        )
        if self._reserved == FAILED:
            self._close_files()
            raise StoreError(f"no room for {self._size} bytes of addresses: {os.strerror(ctypes.get_errno())}")
        self.address = up(self._reserved, LARGE_PAGE)
        if not self.complete:
            self._map_for_writing()
        if self.complete:
            self._map_for_reading()
        self.pages = LargePages(self._libc, self._writer, self.address)

    # ---- filling ----

    def begin(self, num_parts: int) -> None:
        """Say how many parts there are: the first rank writes the header, the others compare. Raises StoreError when
        it is a store of other weights."""
        self.num_parts = num_parts
        with self._header, _Locked(self._file, _ROOM_LOCK):
            raw = os.pread(self._file, _HEADER.size, 0)
            if not raw.strip(b"\0"):
                first = up(HEADER_BYTES + num_parts * _PART.size, LARGE_PAGE)
                os.ftruncate(self._file, first)
                self._write_header(first, 0)
                return
        magic, version, parts, _, _, key = _HEADER.unpack(raw)
        if (magic, version, parts, key.rstrip(b"\0")) != (MAGIC, VERSION, num_parts, self._key):
            raise StoreError("the store of weights was made for another model, another format or another version")

    def claim(self, part: int) -> bool:
        """Take a part that is not full and that no other rank fills; until `release`."""
        if not _lock(self._file, _FIRST_PART_LOCK + part):
            return False
        if self.is_full(part):
            self.release(part)
            return False
        return True

    def release(self, part: int) -> None:
        _unlock(self._file, _FIRST_PART_LOCK + part)

    def room(self, part: int, num_bytes: int) -> int:
        """Where a part of this size lies: the same answer for all ranks. It begins on a page of the system's. Any
        thread may ask."""
        with self._header, _Locked(self._file, _ROOM_LOCK):
            offset = self._part(part)[0]
            if not offset:
                used, full = self._counts()
                offset = up(used, LARGE_PAGE if num_bytes >= LARGE_PAGE else ALIGNMENT)
                end = offset + num_bytes
                if end > self._size:
                    raise StoreError(f"the weights take more than the {self._size} bytes that were reserved for them")
                os.ftruncate(self._file, up(end, LARGE_PAGE))
                self._write_header(end, full)
                self._put(self._at(part), _PART.pack(offset, 0))
            return offset

    def write(self, start: int, data: Buffer) -> None:
        """Through the mapping where large pages have been prepared, else by pwrite(2): a small page that is not there
        costs a page fault, and zeros before the data. Any thread may do this; of those that call pwrite(2) for one file
        the kernel lets one go on at a time."""
        view = memoryview(data).cast("B")
        if not isinstance(data, bytes) and self.pages.prepared(start, len(view)):
            ctypes.memmove(self.address + start, data, len(view))
            return
        done = 0
        while done < len(view):
            done += os.pwrite(self._file, view[done : done + MOST_WRITTEN], start + done)

    def fill(self, part: int) -> None:
        """Say that a claimed part is full, and give up the claim."""
        with self._header, _Locked(self._file, _ROOM_LOCK):
            used, full = self._counts()
            self._put(self._at(part), _PART.pack(self._part(part)[0], 1))
            self._write_header(used, full + 1)
        self.release(part)

    def finish(self) -> None:
        """All parts are full: from now on this process can only read them, at the addresses that they have."""
        if self._writer < 0:
            return
        with self._header, _Locked(self._file, _ROOM_LOCK):
            used, full = self._counts()
            if full < self.num_parts:  # who filled the last one ended before it counted it
                assert all(self.full_parts())
                self._write_header(used, self.num_parts)
        self.complete = True
        self._map_for_reading()
        try:
            fcntl.fcntl(self._writer, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            # Busy: another rank still maps it for writing, and seals it in its turn. Otherwise it is sealed.
            if error.errno not in (errno.EBUSY, errno.EPERM):
                raise
        os.close(self._writer)
        self._writer = -1

    # ---- reading ----

    def use(self) -> None:
        """Say, until `close` or the end of this process, that this store is in use (store/versions.py)."""
        fcntl.fcntl(self._reader, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _USE_LOCK, 1, 0))

    @property
    def used(self) -> int:
        """Bytes in use, with the header."""
        return self._counts()[0]

    def full_parts(self) -> bytes:
        """A byte for each part, in order: 1 where it is full."""
        raw = os.pread(self._file, self.num_parts * _PART.size, HEADER_BYTES)
        return bytes(full for _, full in _PART.iter_unpack(raw))

    def is_full(self, part: int) -> bool:
        return self._part(part)[1] > 0

    def offset(self, part: int) -> int:
        """Where a part begins that has room."""
        return self._part(part)[0]

    def read(self, start: int, num_bytes: int) -> bytes:
        return ctypes.string_at(self.address + start, num_bytes)

    def buffer(self, start: int, num_bytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """These bytes of the file, where they are mapped; valid until `close`. When the store is complete, writing to
        them ends the process."""
        return (ctypes.c_uint8 * num_bytes).from_address(self.address + start)

    def map_ahead(self, locked: bool = False) -> None:
        """Have the kernel map the pages of a full store now (MADV_POPULATE_READ of Linux 5.14; nothing where it is
        older), so that the step that reads an expert for the first time does not pay for it. locked: as `populate` has
        it. For a thread of its own, while others read."""
        populate(self._libc, self.address, self.used, locked)

    def close(self) -> None:
        """Nothing that lies in the store may be used after this."""
        if self._reserved:
            self._libc.munmap(self._reserved, self._size + LARGE_PAGE)
            self._reserved = 0
        self._close_files()

    # ---- the file ----

    @property
    def _file(self) -> int:
        return self._reader if self._writer < 0 else self._writer

    def _close_files(self) -> None:
        for file in (self._reader, self._writer):
            if file >= 0:
                os.close(file)
        self._reader = self._writer = -1

    def _at(self, part: int) -> int:
        assert 0 <= part < self.num_parts
        return HEADER_BYTES + part * _PART.size

    def _part(self, part: int) -> tuple[int, int]:
        offset, full = _PART.unpack(os.pread(self._file, _PART.size, self._at(part)))
        return offset, full

    def _counts(self) -> tuple[int, int]:
        """Bytes in use, and how many parts are full."""
        raw = os.pread(self._file, _HEADER.size, 0)
        if len(raw) < _HEADER.size:
            return 0, 0
        _, _, _, used, full, _ = _HEADER.unpack(raw)
        return used, full

    def _write_header(self, used: int, full: int) -> None:
        self._put(0, _HEADER.pack(MAGIC, VERSION, self.num_parts, used, full, self._key))

    def _put(self, start: int, data: bytes) -> None:
        """Through the mapping: a few bytes do not wait for what others write (pwrite(2))."""
        assert self._writer >= 0
        ctypes.memmove(self.address + start, data, len(data))

    def _map(self, file: int, size: int, protection: int) -> None:
        if self._libc.mmap(self.address, size, protection, MAP_SHARED | MAP_FIXED, file, 0) == FAILED:
            raise StoreError(f"the store of weights cannot be mapped: {os.strerror(ctypes.get_errno())}")

    def _map_for_writing(self) -> None:
        """Once it is mapped, no other rank can seal it. One may have filled and sealed all of it since this one looked:
        it is complete, then."""
        try:
            self._map(self._writer, self._size, PROT_READ | PROT_WRITE)
        except StoreError:
            self.complete = complete_key(self._reader) == self._key.decode()
            if not self.complete:
                raise
            os.close(self._writer)
            self._writer = -1

    def _map_for_reading(self) -> None:
        """In the place of whatever was mapped there; a kernel counts a mapping of a descriptor that cannot write as
        none that forbids the seal."""
        raw = os.pread(self._reader, _HEADER.size, 0)
        self.num_parts = _HEADER.unpack(raw)[2]
        self._map(self._reader, up(self.used, ALIGNMENT), PROT_READ)
        self._libc.madvise(self.address, up(self.used, ALIGNMENT), MADV_HUGEPAGE)  # how a file is read (brought_in)
        end = self.address + up(self.used, ALIGNMENT)
        rest = self._reserved + self._size + LARGE_PAGE - end
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        if rest and self._libc.mmap(end, rest, PROT_NONE, flags, -1, 0) == FAILED:
            raise StoreError(f"the store of weights cannot be mapped: {os.strerror(ctypes.get_errno())}")


def await_parts(
    waiting: Callable[[], bool],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call waiting() until it is False: it does what can be done meanwhile. Raises StoreError after `seconds`."""
    deadline = clock() + seconds
    while waiting():
        if clock() > deadline:
            raise StoreError(f"other ranks have not filled their part of the store of weights within {seconds:g} s")
        sleep(0.002)


class _Locked:
    """The lock on one byte, for a block."""

    def __init__(self, file: int, byte: int) -> None:
        self._file, self._byte = file, byte

    def __enter__(self) -> None:
        await_parts(lambda: not _lock(self._file, self._byte), LOCK_SECONDS)

    def __exit__(self, *_: object) -> None:
        _unlock(self._file, self._byte)


def _lock(file: int, byte: int) -> bool:
    """Whether this descriptor has the lock now."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _unlock(file: int, byte: int) -> None:
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))
