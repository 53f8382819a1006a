"""Ranks that are threads of this process: of any kind, or of the backends for GPUs with their tokens on the CPU (over the
libraries' fakes, tests/fakes, and with gloo in NCCL's place)."""

from __future__ import annotations

import contextlib
import datetime
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import FileStore

from ep.protocol import PeerLost
from ep.transport.device_group import DeviceGroup
from ep.transport.shm_group import shm_group

T = TypeVar("T")
TIMEOUT = 20.0


def together(size: int, act: Callable[[int], T]) -> list[T | PeerLost]:
    """act(rank) in one thread per rank; what each returned, or the PeerLost that it raised."""
    results: dict[int, T | PeerLost | Exception] = {}

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = act(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank hangs"
    values: list[T | PeerLost] = []
    for rank in range(size):
        value = results[rank]
        if isinstance(value, Exception) and not isinstance(value, PeerLost):
            raise value
        values.append(value)
    return values


def on_ranks(folder: Path, size: int, act: Callable[[DeviceGroup], T]) -> list[T | PeerLost]:
    """act(group) on every rank."""
    store = str(folder / f"store-{uuid.uuid4().hex}")
    name = uuid.uuid4().hex

    def meeting() -> FileStore:
        opened = FileStore(store)
        opened.set_timeout(datetime.timedelta(seconds=TIMEOUT))
        return opened

    def run(rank: int) -> T:
        control = shm_group(folder, rank, size, TIMEOUT, name)
        group = DeviceGroup(control, torch.device("cpu"), TIMEOUT, meeting)
        try:
            value = act(group)
            with contextlib.suppress(PeerLost):
                group.all_gather_ints([0]).wait()  # nobody leaves while another may still need it
            return value
        finally:
            group.close()

    return together(size, run)
