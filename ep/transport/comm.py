"""A Group in the shape of an MPI communicator, which is how DeepEP and FlashInfer want to be told where the others
are."""

from __future__ import annotations

import pickle
from typing import Any

from ep.transport.group import Group

_WORDS_AT_ONCE = 256  # a small gather carries no more (ep/transport/shm_group.py)


class Comm:
    """Get_rank, Get_size, allgather, bcast, barrier and Split as mpi4py has them. For starting up only: objects travel
    as integers. What other ranks of the group send is trusted as they are: it is unpickled."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return self._group.rank

    def Get_size(self) -> int:
        return self._group.size

    def allgather(self, value: Any) -> list[Any]:
        """What every rank brought, by rank. Raises PeerLost."""
        data = pickle.dumps(value)
        lengths = [row[0] for row in self._group.all_gather_ints([len(data)]).wait()]
        num_words = -(-max(lengths) // 8)
        data = data.ljust(num_words * 8, b"\0")
        words = [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8)]
        of_rank: list[bytes] = [b""] * self._group.size
        for first in range(0, num_words, _WORDS_AT_ONCE):
            gathered = self._group.all_gather_ints(words[first : first + _WORDS_AT_ONCE]).wait()
            for rank, row in enumerate(gathered):
                of_rank[rank] += b"".join(word.to_bytes(8, "little", signed=True) for word in row)
        return [pickle.loads(one[:length]) for one, length in zip(of_rank, lengths, strict=True)]

    def bcast(self, value: Any, root: int) -> Any:
        """What `root` brought."""
        return self.allgather(value if self._group.rank == root else None)[root]

    def barrier(self) -> None:
        self._group.all_gather_ints([0]).wait()

    def Split(self, color: int, key: int) -> Comm:
        """The ranks stay together: nobody here asks for parts of a group."""
        assert all(other == color for other, _ in self.allgather((color, key)))
        return self
