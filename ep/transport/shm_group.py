"""A Group of processes of one machine over shared memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from ep.protocol import Pending
from ep.transport.shm_heap import ShmHeap, ShmSignals

# A rank starts gather n only when it has waited for gather n - _OPEN, so its peers have waited for n - 2 * _OPEN:
# that room is free again.
_OPEN = 4
_ROOMS = 2 * _OPEN
_ROOM_BYTES = 4096
MAX_INTS = _ROOM_BYTES // 8
MAX_RANKS = 62  # bits of a word


class ShmGroup:
    """Processes joined by a ShmHeap. When an exchange fails the group is closed, as with gloo: the others learn of
    it."""

    def __init__(self, heap: ShmHeap) -> None:
        self.rank = heap.rank
        self.size = heap.size
        self.heap = heap
        self.signals: ShmSignals = heap.signals
        self._peers = [peer for peer in range(heap.size) if peer != heap.rank]
        self._word = self.signals.reserve()
        offset = heap.reserve(_ROOMS * heap.size * _ROOM_BYTES)
        # [rank][room * size + sender]: int64 memory
        self._rooms = [heap.ints(rank, offset, _ROOMS * heap.size * MAX_INTS) for rank in range(heap.size)]
        self._num_started = 0
        self._num_waited = 0

    def all_gather_ints(self, values: Sequence[int]) -> Pending[list[list[int]]]:
        """At most MAX_INTS values; at most 4 gathers under way at once, waited for in order."""
        if len(values) > MAX_INTS:
            raise ValueError(f"a gather takes at most {MAX_INTS} integers, not {len(values)}")
        self._num_started += 1
        assert self._num_started - self._num_waited <= _OPEN, "too many gathers under way"
        at = (self._num_started % _ROOMS * self.size + self.rank) * MAX_INTS
        packed = array("q", values)
        for peer in self._peers:
            self._rooms[peer][at : at + len(values)] = packed
            self.signals.send(peer, self._word, self._num_started)
        return _Gather(self, self._num_started, list(values))

    def gathered(self, number: int, values: list[int]) -> list[list[int]]:
        """The second half of gather `number`."""
        self.signals.wait(self._word, self._peers, number)
        self._num_waited = number
        own = self._rooms[self.rank]
        at = number % _ROOMS * self.size * MAX_INTS
        rows = [own[at + peer * MAX_INTS : at + peer * MAX_INTS + len(values)].tolist() for peer in range(self.size)]
        rows[self.rank] = values
        return rows

    def anybody_ended(self) -> bool:
        """Whether some rank's process is no more; does not wait."""
        return self.signals.anybody_ended()

    def anybody_left(self) -> bool:
        """Whether some rank has closed its group, or found that another is lost; does not wait."""
        return self.signals.anybody_left()

    def abort(self, ranks: Sequence[int]) -> None:
        """End all waits of all ranks of this group: they raise PeerLost naming `ranks`. Any thread may call it."""
        self.signals.abort(ranks)

    def close(self) -> None:
        self.signals.close()


class _Gather:
    __slots__ = ("_group", "_number", "_values")

    def __init__(self, group: ShmGroup, number: int, values: list[int]) -> None:
        self._group = group
        self._number = number
        self._values = values

    def wait(self) -> list[list[int]]:
        return self._group.gathered(self._number, self._values)


def shm_group(
    place: str | Path,
    rank: int,
    size: int,
    timeout: float,
    name: str,
    epoch: int = 0,
    stop: Callable[[], bool] | None = None,
) -> ShmGroup:
    """Join `size` processes of this machine.

    place: a directory or a file that exists, where they meet (ep/transport/shm_rendezvous.py). name, epoch: keep groups
    that meet in one place apart. timeout: seconds, the bound of every wait of the group, this one included. stop: asked
    now and then while waiting for the others to come; True ends that. Raises ValueError for numbers out of range,
    PeerLost naming the ranks that did not come or ended, and OSError when this machine cannot share memory.
    """
    if not 2 <= size <= MAX_RANKS:
        raise ValueError(f"size is {size}; it must be 2 to {MAX_RANKS} ranks that share memory")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} of {size}; it must be 0 to size - 1")
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout}; it must be more than 0 seconds")
    return ShmGroup(ShmHeap(Path(place), name, rank, size, timeout, epoch, stop))
