"""The C library's allocator, told to keep what a step frees: the next step wants the same again."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_KEEP_BYTES = 512 << 20
_MMAP_BYTES = 32 << 20  # the most that glibc accepts


def keep_freed_memory() -> None:
    """Without this glibc maps each large activation anew and gives it back, and every step pays for the page faults.

    For a process of our own only, at its start. Does nothing where the C library has no such settings.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
