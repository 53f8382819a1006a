"""Ranks that are threads of this process, in groups of several machines: by another address than the loopback's first."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rank_threads import together
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ep.protocol import PeerLost
from ep.transport.group import GlooGroup
from ep.transport.remote import remote_groups

T = TypeVar("T")
ADDRESS = "127.0.0.2"
_epochs = itertools.count()


def on_machines(
    size: int, act: Callable[[GlooGroup], T], timeout: float = 30.0, places: Sequence[Path | None] = ()
) -> list[T | PeerLost]:
    """act(group) on every rank. places: by rank, of its machine; without them each rank is a machine of its own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    epoch = next(_epochs) + os.getpid()

    def run(rank: int) -> T:
        place = places[rank] if places else None
        agreement, group = remote_groups(("127.0.0.1", store.port), ADDRESS, rank, size, timeout, epoch, place=place)
        assert isinstance(group, GlooGroup)
        try:
            value = act(group)
            with contextlib.suppress(PeerLost):
                agreement.all_gather_ints([0]).wait()  # nobody leaves while another may still need it
            return value
        finally:
            group.close()
            agreement.close()

    return together(size, run)
