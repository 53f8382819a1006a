"""Memory that every rank has at the same offsets, and words that announce what was put there.

This is the little that an all-to-all by put and signal needs (ep/backends/shm.py). ep/transport/shm_heap.py has it for
the processes of one machine; NVSHMEM and torch's symmetric memory offer the same between GPUs that reach each other's
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class SymmetricHeap(Protocol):
    """Ranks 0 to size - 1 reserve the same pieces in the same order, so that a piece has one offset on all of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def reserve(self, num_bytes: int) -> int:
        """The offset of a new piece, a multiple of 64. It is zero at first and lasts as long as the heap."""
        ...

    def window(self, rank: int, offset: int, num_bytes: int) -> Tensor:
        """Those bytes of `rank`, uint8 [num_bytes]. Writing to another rank's is a put."""
        ...


class Signals(Protocol):
    """Words of 64 bits, one per sender in every rank: a running number (32 bits) and a value beside it (31 bits)."""

    def reserve(self) -> int:
        """A new word, the same on all ranks; its number is 0 at first."""
        ...

    def send(self, peer: int, word: int, number: int, value: int = 0) -> None:
        """Set this rank's word at `peer`. A rank that sees it sees everything that this rank put there before."""
        ...

    def wait(self, word: int, peers: Sequence[int], number: int) -> list[int]:
        """Return when the words of all `peers` have reached `number`, with the values beside them.

        Raises PeerLost, within the heap's timeout, naming those that have not.
        """
        ...
