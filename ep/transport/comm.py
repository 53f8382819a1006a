"""Values that travel by gathers of integers, for starting up only: bytes, and a Group in the shape of an MPI
communicator, which is how DeepEP and FlashInfer want to be told where the other ranks are."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import msgpack

from dbo.steps import Steps, drain
from ep.transport.group import Group

_WORDS_AT_ONCE = 256  # a small gather carries no more (ep/transport/shm_group.py)
_BYTEARRAY, _TUPLE = 1, 2  # what msgpack has no type of its own for; a library in C++ asks for the exact type


def gather_bytes(group: Group, data: bytes) -> Steps[list[bytes]]:
    """What every rank brought, by rank; the lengths may differ. Raises PeerLost."""
    gathered = group.all_gather_ints([len(data)])
    yield
    lengths = [length for (length,) in gathered.wait()]
    num_words = -(-max(lengths) // 8)
    words = np.frombuffer(data.ljust(num_words * 8, b"\0"), dtype="<i8").tolist()
    of_rank: list[list[int]] = [[] for _ in lengths]
    for first in range(0, num_words, _WORDS_AT_ONCE):
        gathered = group.all_gather_ints(words[first : first + _WORDS_AT_ONCE])
        yield
        for collected, row in zip(of_rank, gathered.wait(), strict=True):
            collected += row
    return [np.array(one, dtype="<i8").tobytes()[:length] for one, length in zip(of_rank, lengths, strict=True)]


class Comm:
    """Get_rank, Get_size, allgather, bcast, barrier and Split as mpi4py has them. Plain values travel: None, numbers,
    texts, bytes, bytearrays, and lists, tuples and dicts of them. Nothing that arrives is executed."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return self._group.rank

    def Get_size(self) -> int:
        return self._group.size

    def allgather(self, value: Any) -> list[Any]:
        """What every rank brought, by rank. Raises PeerLost, and TypeError for a value that is not plain."""
        return [_decode(one) for one in drain(gather_bytes(self._group, _encode(value)))]

    def bcast(self, value: Any, root: int) -> Any:
        """What `root` brought."""
        return self.allgather(value if self._group.rank == root else None)[root]

    def barrier(self) -> None:
        self._group.all_gather_ints([0]).wait()

    def Split(self, color: int, key: int) -> Comm:
        """The ranks stay together: neither library asks for parts of a group."""
        assert all(other == color for other, _ in self.allgather((color, key)))
        return self


def _encode(value: Any) -> bytes:
    return msgpack.encode(_marked(value))


def _marked(value: Any) -> Any:
    """`value` with what msgpack would give back as another type marked as what it is."""
    if isinstance(value, bytearray):
        return msgpack.Ext(_BYTEARRAY, bytes(value))
    if isinstance(value, tuple):
        return msgpack.Ext(_TUPLE, _encode(list(value)))
    if isinstance(value, list):
        return [_marked(one) for one in value]
    if isinstance(value, dict):
        return {key: _marked(one) for key, one in value.items()}
    return value


def _decode(data: bytes | memoryview) -> Any:
    return msgpack.decode(data, ext_hook=_of_type)


def _of_type(code: int, data: memoryview) -> Any:
    return bytearray(data) if code == _BYTEARRAY else tuple(_decode(data))
