"""Memory as the kernel gives it: libc's calls, pages that are mapped ahead, and large pages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator

LARGE_PAGE = 2 << 20
ALIGNMENT = 4096
SLOW_PAGE_SECONDS = 3e-3  # copying one takes a sixth of that
MOST_SLOW_PAGES = 64
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_COLLAPSE = 14, 22, 25
MAPPED_AT_ONCE = 16 << 20  # bytes by one system call: about a millisecond
FAILED = ctypes.c_void_p(-1).value


def load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@contextlib.contextmanager
def brought_in(file: int, locked: bool = False) -> Iterator[None]:
    """Have the system read this file into its page cache, mapped for a block; locked: as `populate` has it. In large
    pages, where the file system has them (ext4 of Linux 6.16, XFS): a process that maps the file takes a page fault for
    each of them, not for each 4 KiB. What is in the page cache already stays as it is."""
    libc, size = load_libc(), os.fstat(file).st_size
    reserved = libc.mmap(None, size + LARGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if reserved == FAILED:
        yield
        return
    address = up(reserved, LARGE_PAGE)
    try:
        if libc.mmap(address, size, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) != FAILED:
            libc.madvise(address, size, MADV_HUGEPAGE)
            populate(libc, address, size, locked)
        yield
    finally:
        libc.munmap(reserved, size + LARGE_PAGE)


def populate(libc: ctypes.CDLL, address: int, size: int, locked: bool) -> None:
    """Have the kernel map the pages there, and touch each, as the host of a virtual machine maps what a disk has
    written when it is read. locked: and keep them in memory, as far as this process may (mlock(2), RLIMIT_MEMLOCK)."""
    for start in range(address, address + size, MAPPED_AT_ONCE):
        length = min(MAPPED_AT_ONCE, address + size - start)
        locked = locked and libc.mlock(start, up(length, ALIGNMENT)) == 0
        if not locked and libc.madvise(start, up(length, ALIGNMENT), _MADV_POPULATE_READ) != 0:
            return
        memoryview((ctypes.c_uint8 * length).from_address(start)).cast("B")[::ALIGNMENT].tobytes()


class LargePages:
    """Of a file in memory that is mapped from `address` on, which is the beginning of one."""

    def __init__(self, libc: ctypes.CDLL, file: int, address: int) -> None:
        self._libc, self._file, self._address = libc, file, address
        self._num_slow = 0
        self._prepared: set[int] = set()  # by number

    def prepared(self, start: int, num_bytes: int) -> bool:
        """Whether these bytes lie in pages that were prepared here."""
        return self._prepared.issuperset(range(start // LARGE_PAGE, (start + num_bytes - 1) // LARGE_PAGE + 1))

    def prepare(self, start: int, num_bytes: int) -> None:
        """Have large pages where nothing is yet: those that begin in these bytes, which nobody has written to. As
        `enlarge`, but nothing is copied. The kernel wants something to be there."""
        for page in range(up(start, LARGE_PAGE), start + num_bytes, LARGE_PAGE):
            if self._num_slow >= MOST_SLOW_PAGES:
                return
            os.pwrite(self._file, b"\0", page)
            if self._collapse(page):
                self._prepared.add(page // LARGE_PAGE)

    def enlarge(self, start: int, num_bytes: int) -> None:
        """Large pages in the place of those that lie in these bytes, which have all been written, where the kernel has
        them (madvise(2), MADV_COLLAPSE, as the systems' setting for shared memory is usually `never`). No more of them
        once some were refused or took long: memory is in pieces then, or a virtual machine's host has yet to find
        it."""
        for page in range(up(start, LARGE_PAGE), start + num_bytes - LARGE_PAGE + 1, LARGE_PAGE):
            if self._num_slow >= MOST_SLOW_PAGES:
                return
            self._collapse(page)

    def _collapse(self, page: int) -> bool:
        began = time.thread_time()
        refused = self._libc.madvise(self._address + page, LARGE_PAGE, _MADV_COLLAPSE) != 0
        self._num_slow += refused or time.thread_time() - began > SLOW_PAGE_SECONDS
        return not refused
