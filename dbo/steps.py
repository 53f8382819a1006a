"""A forward pass is a generator that yields wherever its bytes are in flight (docs/design.md, D1).

`drain` runs one to its end; `weave` gives several a turn each, round and round, and is itself such a generator.
Together they are serial execution, dual-batch overlap, and a cluster of N ranks inside one process.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


def drain(steps: Steps[T]) -> T:
    """Run `steps` to its end and return its value. Exceptions raised inside it pass through."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            value: T = done.value
            return value


def weave(*threads: Steps[T]) -> Steps[list[T]]:
    """Advance each of `threads` by one step in turn until all have ended; the value is the list of their values.

    When one of them raises, the others are closed (their `finally` blocks run) and the exception passes through, so
    that no half of a batch stays parked.
    """
    live = dict(enumerate(threads))
    results: dict[int, T] = {}
    with ExitStack() as cleanup:
        for steps in threads:
            cleanup.callback(steps.close)  # does nothing to one that has ended
        while live:
            for index, steps in list(live.items()):
                try:
                    next(steps)
                except StopIteration as done:
                    results[index] = done.value
                    del live[index]
            if live:
                yield
    return [results[index] for index in range(len(threads))]
