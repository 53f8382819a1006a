"""A symmetric heap and its signals in memory that the processes of one machine share (ep/transport/heap.py).

Each rank makes a piece of anonymous memory (memfd) and maps everybody's. It has no name anywhere: whatever happens to
the processes, the kernel frees it with the last of them. The heap is reserved large and takes memory only where it
is written.

A segment begins with the words below, int64 each, then come the signals, one per cache line. All have one writer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import dbo.alive as alive
from ep.protocol import PeerLost
from ep.transport.shm_futex import Futex, full_fence, order_fence
from ep.transport.shm_rendezvous import SignIn, Watch, rendezvous

HEAP_BYTES = 1 << 33
_LINE = 64
_WORDS_PER_LINE = _LINE // 8
_SIGNAL_BYTES = 1 << 18
# Words of the first lines of a segment; written by its owner unless said otherwise.
_STATE = 0  # one of the states below
_BLAMED = 8  # why it left: bit r is set when it found that rank r is lost
_ASLEEP = 16  # 1 while it sleeps, or is about to
_ABORTED = 24  # epoch + 1 of an epoch that was aborted, by any rank
_ABORTED_RANKS = 25  # bit r: because rank r is lost; set by any rank
_FIRST_SIGNAL = 64
_PRESENT, _LEFT = 1, 2
_NUMBER = 0xFFFFFFFF  # the part of a signal that counts
_BEHIND = 1 << 31  # numbers may wrap: one is behind another when the difference is this large
_SPIN_SECONDS = 50e-6  # giving the core away; sleeping at once costs 20 to 50 microseconds more to wake up
_FIRST_NAP, _LONGEST_NAP = 0.001, 0.008  # seconds; after each the waiter looks whether its peers still live


class ShmHeap:
    """SymmetricHeap over the segments of all ranks. Every wait is bounded by `timeout` seconds."""

    def __init__(
        self,
        place: Path,
        name: str,
        rank: int,
        size: int,
        timeout: float,
        epoch: int,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """Meet the others at `place` (ep/transport/shm_rendezvous.py). Raises PeerLost, and OSError when memory cannot
        be shared."""
        self.rank = rank
        self.size = size
        self._used = _SIGNAL_BYTES
        watch = Watch()
        file = os.memfd_create(f"moesaic-{name}-{epoch}-{rank}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, HEAP_BYTES)
            own = mmap.mmap(file, HEAP_BYTES)
            with rendezvous(place, name, rank, size, epoch) as all_ranks:
                all_ranks.sign_in(file)
                try:
                    found = all_ranks.await_all(timeout, watch, stop)
                    self._segments = [own if peer == rank else _map(peer, found[peer], watch) for peer in range(size)]
                    track = alive.AGREEING if name == alive.AGREEMENT else alive.COMPUTING
                    self.signals = ShmSignals(self._segments, rank, timeout, epoch, watch, track)
                    self.signals.enter()
                except BaseException:
                    own[8 * _STATE : 8 * _STATE + 8] = _LEFT.to_bytes(8, sys.byteorder)  # others may have mapped it
                    raise
        except BaseException:
            watch.close()
            raise
        finally:
            os.close(file)
        self._bytes = [torch.frombuffer(segment, dtype=torch.uint8) for segment in self._segments]

    def reserve(self, num_bytes: int) -> int:
        offset = self._used
        self._used += -(-num_bytes // _LINE) * _LINE
        if self._used > HEAP_BYTES:
            raise ValueError(f"the ranks' shared heap has {HEAP_BYTES} bytes; {self._used} are asked for")
        return offset

    def window(self, rank: int, offset: int, num_bytes: int) -> Tensor:
        return self._bytes[rank][offset : offset + num_bytes]

    def ints(self, rank: int, offset: int, count: int) -> memoryview:
        """Those int64 of `rank`, as plain memory."""
        return memoryview(self._segments[rank])[offset : offset + 8 * count].cast("q")


def _map(peer: int, who: SignIn, watch: Watch) -> mmap.mmap:
    try:
        file = who.open()
    except OSError as error:
        if isinstance(error, FileNotFoundError) or peer in watch.ended():
            raise PeerLost((peer,), f"it has gone again before its memory could be mapped: {error}") from error
        reason = f"the memory of rank {peer} (process {who.pid}) cannot be mapped; the gloo backend needs none"
        raise OSError(error.errno, reason, error.filename) from error
    try:
        return mmap.mmap(file, HEAP_BYTES)
    finally:
        os.close(file)


class ShmSignals:
    """Signals over the segments of all ranks. One thread sends and waits; `abort` and `leave` may come from another."""

    def __init__(
        self,
        segments: Sequence[mmap.mmap],
        rank: int,
        timeout: float,
        epoch: int,
        watch: Watch,
        track: int = alive.COMPUTING,
    ) -> None:
        """track: where its waits are shown (dbo/alive.py)."""
        self._rank = rank
        self.shown_from = 0  # the number by which rank 0 is shown when it is waited for
        self._track = track
        self._size = len(segments)
        self._timeout = timeout
        self._epoch = epoch
        self._watch = watch
        self._futex = Futex()
        self._fence = full_fence()
        self._order = order_fence()
        self._of_rank = [memoryview(segment).cast("q") for segment in segments]
        self._own = self._of_rank[rank]
        self._address = [ctypes.addressof(ctypes.c_char.from_buffer(segment)) for segment in segments]
        self._num_words = 0
        self._peers = [peer for peer in range(self._size) if peer != rank]
        self._gone: tuple[tuple[int, ...], str] | None = None  # not the error itself, whose traceback holds this
        self._first = self.reserve()

    def enter(self) -> None:
        """Return when every rank has mapped every segment."""
        self._own[_STATE] = _PRESENT
        for peer in self._peers:
            self.send(peer, self._first, 1)
        self.wait(self._first, self._peers, 1)

    def reserve(self) -> int:
        word, self._num_words = self._num_words, self._num_words + 1
        if (_FIRST_SIGNAL + self._num_words * self._size * _WORDS_PER_LINE) * 8 > _SIGNAL_BYTES:
            raise ValueError(f"the ranks' shared heap has room for {word} signals; one more is asked for")
        return word

    def send(self, peer: int, word: int, number: int, value: int = 0) -> None:
        if self._gone is not None:
            raise PeerLost(*self._gone)
        words = self._of_rank[peer]
        index = self._index(word, self._rank)
        if self._order is not None:
            self._order()
        words[index] = value << 32 | number & _NUMBER
        self._fence()
        if words[_ASLEEP]:
            self._futex.wake(self._address[peer] + index * 8)

    def wait(self, word: int, peers: Sequence[int], number: int) -> list[int]:
        own = self._own
        deadline = 0.0
        values: list[int] = []
        for peer in peers:
            index = self._index(word, peer)
            signal = own[index]
            if signal - number & _BEHIND:
                deadline = deadline or time.monotonic() + self._timeout
                signal = self._await(index, number, word, peers, deadline)
            values.append(signal >> 32)
        if self._order is not None:
            self._order()
        return values

    def address(self, rank: int, word: int, sender: int) -> int:
        """Where the word of `sender` at `rank` lies in this process."""
        return self._address[rank] + 8 * self._index(word, sender)

    def asleep_address(self, rank: int) -> int:
        """Where `rank` says that it sleeps on one of its words."""
        return self._address[rank] + 8 * _ASLEEP

    def abort(self, ranks: Sequence[int]) -> None:
        """End every wait of every rank: they raise PeerLost naming `ranks`."""
        for words in self._of_rank:
            words[_ABORTED_RANKS] |= alive.mask(ranks)
            words[_ABORTED] = self._epoch + 1

    def leave(self, ranks: tuple[int, ...], reason: str) -> PeerLost:
        """Nothing more is sent or awaited; the waits of others end, naming `ranks` (lost, as this rank found), or this
        one.

        Returns what is to be raised.
        """
        if self._gone is None:
            self._gone = ranks, reason
            self._own[_BLAMED] = alive.mask(ranks)
            self._own[_STATE] = _LEFT
        return PeerLost(*self._gone)

    def anybody_ended(self) -> bool:
        return bool(self._watch.ended())

    def anybody_left(self) -> bool:
        return any(self._of_rank[peer][_STATE] == _LEFT for peer in self._peers)

    def anybody_reached(self, word: int, number: int) -> bool:
        """Whether some peer's word has; does not wait."""
        return any(not self._own[self._index(word, peer)] - number & _BEHIND for peer in self._peers)

    def close(self) -> None:
        """`leave`, and stop watching the others. Not while a thread waits."""
        self.leave((), f"rank {self._rank} has left its group")
        self._watch.close()

    def _index(self, word: int, sender: int) -> int:
        return _FIRST_SIGNAL + (word * self._size + sender) * _WORDS_PER_LINE

    def _await(self, index: int, number: int, word: int, peers: Sequence[int], deadline: float) -> int:
        """The signal at `index` once it has reached `number`."""
        own = self._own
        end = time.perf_counter() + _SPIN_SECONDS
        while time.perf_counter() < end:
            os.sched_yield()
            signal = own[index]
            if not signal - number & _BEHIND:
                return signal
        nap = _FIRST_NAP
        try:
            while True:
                own[_ASLEEP] = 1
                signal = own[index]
                if not signal - number & _BEHIND:
                    return signal
                self._futex.wait(self._address[self._rank] + index * 8, signal & _NUMBER, nap)
                signal = own[index]
                if not signal - number & _BEHIND:
                    return signal
                alive.mark()  # this rank gets on; whom it waits for may not
                missing = self._check(number, word, peers, deadline)
                alive.waits(self._track, deadline - self._timeout, alive.mask(missing) << self.shown_from)
                nap = min(2 * nap, _LONGEST_NAP)
        finally:
            own[_ASLEEP] = 0
            alive.goes_on(self._track)

    def _check(self, number: int, word: int, peers: Sequence[int], deadline: float) -> list[int]:
        """The peers that are waited for. Raises PeerLost when waiting any longer is in vain."""
        own = self._own
        if self._gone is not None:
            raise PeerLost(*self._gone)
        if own[_ABORTED] == self._epoch + 1:
            raise self.leave(_ranks(own[_ABORTED_RANKS]), f"epoch {self._epoch} was aborted")
        late = time.monotonic() > deadline
        ended = self._watch.ended()
        left = [peer for peer in self._peers if self._of_rank[peer][_STATE] == _LEFT]
        # Read last: what a rank sent before it left or ended counts.
        missing = [peer for peer in peers if own[self._index(word, peer)] - number & _BEHIND]
        dead = tuple(peer for peer in missing if peer in ended)
        if dead:
            raise self.leave(dead, f"rank {self._rank} saw them end")
        for peer in left:
            if peer in missing:
                blamed = _ranks(self._of_rank[peer][_BLAMED] & ~(1 << self._rank))
                raise self.leave(blamed or (peer,), f"rank {self._rank} was left by rank {peer}")
        if late and missing:
            raise self.leave(tuple(missing), f"rank {self._rank} waited {self._timeout:g} s for them")
        return missing


def _ranks(mask: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
