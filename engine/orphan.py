"""No process outlives the one that started it. Linux only; elsewhere this does nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process (SIGKILL) when its parent ends, however that ends.

    parent: the parent's process id as the parent gave it, to see that it has not ended before this call (then this
    process exits at once). Note of prctl(2): the signal follows the parent's *thread* that forked, so parents start
    children from their main thread.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        raise SystemExit("the parent process has ended")
