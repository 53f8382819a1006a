"""Processes of their own for tests, with little to import."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forked_with_torch() -> ForkServerContext:
    """Its processes are forked from one that has imported torch, and has done nothing else: most of a start is that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
    return context
