"""Experts over several machines, or a server on each behind a router (replicas)? What a decode step costs either way,
for `moesaic explain --nnodes N` on CPUs.

What differs is told, and nothing else. With shared experts a machine reads only its part of them, for the tokens of
all machines; a replica reads those of its own tokens, which soon are all of them. Shared experts wait for exchanges:
two round trips in each layer with experts, and the bytes of rows (docs/cpu_cluster.md has the formula). Products,
attention and sampling are the same. Without torch.
"""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

READ_BYTES = 1 << 28  # of each of two buffers: more than caches hold for one process
STREAMS = (1, 4, 16, 64, 256)  # of a machine


class Sharing(Struct, frozen=True, kw_only=True):
    """A model on machines. experts, chosen: of a layer and of a token; layers: with experts; hidden: numbers of a row;
    item, sent_item: bytes of a number on the way back and there; expert_bytes, other_bytes: of all weights; ranks: of
    a machine; link: bytes per second in each direction; round_trip: seconds; memory: bytes that are free; reads: bytes
    per second that a machine reads from there."""

    nodes: int
    ranks: int
    experts: int
    chosen: int
    layers: int
    hidden: int
    item: int
    sent_item: int
    expert_bytes: int
    other_bytes: int
    link: float
    round_trip: float
    memory: int
    reads: float

    @property
    def bytes_per_token(self) -> float:
        """That leave a machine for a token: its rows on their way there, and back. On average as many come."""
        ranks = self.nodes * self.ranks
        far = (ranks - self.ranks) * (1 - (1 - 1 / ranks) ** self.chosen)
        return self.layers * far * (self.sent_item * self.hidden + 8 * self.chosen + self.item * self.hidden)

    @property
    def round_trips(self) -> float:
        """Seconds of a step that no bandwidth makes shorter."""
        return 2 * self.layers * self.round_trip

    def read(self, tokens: int) -> float:
        """The part of all experts that so many tokens need, drawn alike."""
        return 1.0 - (1.0 - self.chosen / self.experts) ** tokens

    def row(self, streams: int) -> Row:
        """streams: of each machine."""
        shared = self.expert_bytes * self.read(self.nodes * streams) / self.nodes / self.reads
        alone = self.expert_bytes * self.read(streams) / self.reads
        exchange = self.round_trips + streams * self.bytes_per_token / self.link
        return Row(streams, 1000 * alone, 1000 * shared, 1000 * exchange)

    def rows(self) -> list[Row]:
        return [self.row(streams) for streams in STREAMS]

    @property
    def advice(self) -> str:
        """One sentence."""
        whole = self.expert_bytes + self.other_bytes
        if whole > self.memory:
            return (
                f"Share the experts: the weights take {whole >> 20} MiB, and {self.memory >> 20} MiB are free here, so "
                "a replica does not fit."
            )
        better = [row for row in self.rows() if row.saved_ms > 0]
        if not better:
            return (
                f"Run a replica on each machine: at no number of streams up to {STREAMS[-1]} of a machine do shared "
                "experts save as much reading as exchanges take."
            )
        first, best = better[0], max(better, key=lambda row: row.saved_ms)
        return (
            f"Share the experts if a machine has {first.streams} streams or more most of the time (at {best.streams} a "
            f"step is {best.saved_ms:.1f} ms shorter); with fewer run a replica on each."
        )


class Row(Struct, frozen=True):
    """Of a decode step. streams: of a machine; milliseconds that experts take to be read by a replica and where they
    are shared, and that exchanges take there."""

    streams: int
    replica_ms: float
    shared_ms: float
    exchange_ms: float

    @property
    def saved_ms(self) -> float:
        """By sharing; below 0: that is slower."""
        return self.replica_ms - self.shared_ms - self.exchange_ms


def memory_rate(threads: int) -> float:
    """Bytes per second that so many threads of this machine read, measured: some tenths of a second."""
    first, second = ctypes.create_string_buffer(READ_BYTES), ctypes.create_string_buffer(READ_BYTES)
    for buffer in (first, second):
        ctypes.memset(buffer, 1, READ_BYTES)  # pages of their own
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    part = READ_BYTES // threads
    places = [(ctypes.addressof(first) + n * part, ctypes.addressof(second) + n * part) for n in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            assert not any(pool.map(lambda at: compare(*at, part), places))
            seconds.append(time.perf_counter() - began)
    return 2 * part * threads / min(seconds)
