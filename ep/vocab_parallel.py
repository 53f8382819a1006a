"""The head shared by the ranks of one machine: each multiplies the rows of all by its own part of the vocabulary.

A step of few rows takes as long as its weights take to be read, and of a large vocabulary the head has a good part of
them. Where every rank multiplies its own rows, each reads all of it. Here a rank puts its rows where the others can
read them, multiplies everybody's by its part, and puts the logits where their owner reads them. A row's logit is the
same sum, whoever adds it up.

A rank's rows are not written anew before all others are done with them: it has waited for their logits, which they put
when they have read its rows. Its logits are not written anew before it is done with them: the others write when they
have its next rows.

Legend: P rows of this rank, N of all ranks, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ep.transport.shm_group import ShmGroup

MAX_ROWS = 64  # of a rank; with more the products take longer than the reading, and each rank has its own
STRIDE = 64  # a part begins at a multiple of so many outputs (native/packed_linear.py: PANEL)

Part = Callable[[Tensor, int, int], Tensor]  # (rows [N, D], first, last) -> their logits of those outputs


def parts_of(vocab_size: int, num_ranks: int) -> list[tuple[int, int]]:
    """For each rank the first output of its part and the one behind its last. Of a vocabulary with fewer multiples of
    STRIDE than ranks some have none."""
    strides = -(-vocab_size // STRIDE)
    ends = [min(vocab_size, strides * (rank + 1) // num_ranks * STRIDE) for rank in range(num_ranks)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


class VocabParallel:
    """Every rank of the group makes one at the same time, and calls `logits` in the same steps (no rows are fine)."""

    def __init__(self, group: ShmGroup, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> None:
        heap, self._signals = group.heap, group.signals
        self._rank, self._ranks = heap.rank, range(heap.size)
        self._peers = [peer for peer in self._ranks if peer != heap.rank]
        self._parts = parts_of(vocab_size, heap.size)
        self._rows_word, self._logits_word = self._signals.reserve(), self._signals.reserve()
        self._number = 0

        def of_ranks(width: int) -> list[Tensor]:
            num_bytes = MAX_ROWS * width * dtype.itemsize
            offset = heap.reserve(num_bytes)
            return [heap.window(rank, offset, num_bytes).view(dtype).view(MAX_ROWS, width) for rank in self._ranks]

        self._rows, self._logits = of_ranks(hidden_size), of_ranks(vocab_size)

    def logits(self, hidden_PD: Tensor, part: Part) -> Tensor:
        """[P, D], at most MAX_ROWS, -> [P, V] in the same dtype, in memory that the next call writes to. part: of this
        rank's own head. Raises PeerLost."""
        self._number += 1
        own = hidden_PD.shape[0]
        self._rows[self._rank][:own] = hidden_PD
        for peer in self._peers:
            self._signals.send(peer, self._rows_word, self._number, own)
        counts = self._signals.wait(self._rows_word, self._peers, self._number)
        counts.insert(self._rank, own)
        first, last = self._parts[self._rank]
        if sum(counts) and last > first:
            rows_ND = torch.cat([rows[:count] for rows, count in zip(self._rows, counts, strict=True)])
            values_NV = part(rows_ND, first, last)
            for to, values in zip(self._logits, torch.split(values_NV, counts), strict=True):
                to[: values.shape[0], first:last] = values
        for peer in self._peers:
            self._signals.send(peer, self._logits_word, self._number)
        self._signals.wait(self._logits_word, self._peers, self._number)
        return self._logits[self._rank][:own]
