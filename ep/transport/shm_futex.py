"""Sleeping on a word of shared memory (Linux futex), and the order in which memory is written.

Python has neither; both are reached through the C library. The word is an aligned 32-bit integer in memory that several
processes map (futex(2); the call without FUTEX_PRIVATE_FLAG).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import platform
import threading
from collections.abc import Callable

_SYSCALL_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_EVERYBODY = 1 << 30
_SEQUENTIALLY_CONSISTENT = 5  # memory_order_seq_cst of C11


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


def unsupported() -> str | None:
    """Why this machine cannot serve, or None when it can."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _SYSCALL_FUTEX:
        return f"needs Linux on x86-64 or aarch64; this is {platform.system()} on {machine}"
    if machine != "x86_64" and ctypes.util.find_library("atomic") is None:
        return "needs the library libatomic.so.1 on this processor"
    return None


class Futex:
    """One per thread that waits. Raises OSError where `unsupported` says why."""

    def __init__(self) -> None:
        reason = unsupported()
        if reason is not None:
            raise OSError(f"shared memory between ranks {reason}")
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._call.argtypes = [
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint32,
        ]
        self._number = _SYSCALL_FUTEX[platform.machine()]
        self._timespec = _Timespec()
        self._timespec_at = ctypes.addressof(self._timespec)

    def wait(self, address: int, value: int, seconds: float) -> None:
        """Sleep while the word equals `value`, at most `seconds`. May return early for no reason."""
        self._timespec.seconds = int(seconds)
        self._timespec.nanoseconds = int((seconds % 1) * 1e9)
        if self._call(self._number, address, _WAIT, value, self._timespec_at, None, 0) < 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, "futex wait failed")

    def wake(self, address: int) -> None:
        """Wake all that sleep on the word."""
        self._call(self._number, address, _WAKE, _EVERYBODY, None, None, 0)


def full_fence() -> Callable[[], None]:
    """A function after which no earlier write is still unseen when a later read is made."""
    if platform.machine() == "x86_64":
        # A processor of this kind reorders only a read before an earlier write, and taking a lock (one locked
        # instruction) forbids that too. It is ten times cheaper than a call into a C library.
        lock = threading.Lock()

        def fence() -> None:
            lock.acquire()
            lock.release()

        return fence
    return _library_fence()


def order_fence() -> Callable[[], None] | None:
    """A function that keeps writes, and reads, in the order of the program; None where the processor does so itself."""
    return None if platform.machine() == "x86_64" else _library_fence()


def _library_fence() -> Callable[[], None]:
    library = ctypes.CDLL(ctypes.util.find_library("atomic"))

    def fence() -> None:
        library.atomic_thread_fence(_SEQUENTIALLY_CONSISTENT)

    return fence
