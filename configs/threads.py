"""Which cores the threads of a server's ranks run on, and whether they spin. Standard library only."""

from __future__ import annotations


def pin_ranks(ranks: int, threads: int, cores: int, small: bool, restricted: bool) -> tuple[bool, str]:
    """Whether each rank keeps to `threads` cores of its own, and why.

    Only ranks that fill the machine do: others may share it with a second server, which would take the same cores.
    small: the model is; restricted: this process may not use all cores.
    """
    numbers = f"{ranks} rank(s) x {threads} thread(s) on {cores} core(s)"
    if ranks == 1:
        return False, "one rank may use every core"
    if ranks * threads > cores:
        return False, f"{numbers}: they take turns"
    if small or threads < cores // ranks:
        return False, f"{numbers}: they do not fill them"
    if restricted:
        return False, "the cores that this process may use are chosen already"
    return True, f"{numbers}: each rank keeps to its own"


def spin_threads(ranks: int, threads: int, cores: int) -> tuple[bool, str]:
    """Whether a thread that has nothing to do looks for work for a moment before it sleeps, and why."""
    if threads == 1:
        return False, "a rank has one thread"
    if ranks * threads > cores:
        return False, "threads share cores: who waits sleeps at once"
    return True, "each thread has a core: to wake a sleeping one takes longer than many an operation"
