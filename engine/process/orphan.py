"""How processes start each other: none outlives the one that started it (Linux only), or is taken for another."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


_PID_BITS = 22  # the most that a process id of Linux has


def life_of(process: int) -> int:
    """A number that no other process of this machine has or had, and from which `pid_of` gives the process id. In a
    container that is started again, processes have the ids of those before. process: its id; the number itself when it
    has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return process
    ticks = int(
        text.rpartition(")")[2].split()[19]
    )  # when it started (proc_pid_stat(5)); the name in brackets may hold anything
    return process | ticks << _PID_BITS


def is_alive(life: int) -> bool:
    """Whether the process of that `life_of` has not ended."""
    return life >> _PID_BITS > 0 and life_of(pid_of(life)) == life


def pid_of(life: int) -> int:
    return life & ((1 << _PID_BITS) - 1)


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
        raise SystemExit(1)  # without a word: nobody has asked for anything any more


def adopt_orphans(on: bool = True) -> bool:
    """Have the processes below this one become its children when their own parent ends, or not any more: whoever else
    ends below it is then not this process's to wait for. False: not on this system."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0)
