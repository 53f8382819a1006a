"""The C library's allocator, told what to do with freed memory: to keep what a step frees, since the next step wants
the same again, or to give back what a large request took."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_KEEP_BYTES = 512 << 20
_BLOCK_BYTES = 256 << 10  # larger ones are mapped for themselves: a body, or what is sent on
_MMAP_BYTES = 32 << 20  # the most that glibc accepts


def tune_malloc() -> None:
    """Without this glibc maps each large activation anew and gives it back, and every step pays for the page faults.

    For a process of our own only, at its start. Does nothing where the C library has no such settings.
    """
    _set(_MMAP_BYTES, _KEEP_BYTES)


def return_freed_memory() -> None:
    """Without this glibc raises its thresholds with the first large block that is freed, and keeps tens of megabytes
    from then on. Under the same conditions as above."""
    _set(_BLOCK_BYTES, 2 * _BLOCK_BYTES)


def _set(mmap_bytes: int, trim_bytes: int) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, mmap_bytes)
    mallopt(_M_TRIM_THRESHOLD, trim_bytes)
