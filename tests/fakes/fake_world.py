"""What the fakes of communication libraries share: ranks that are threads of one process, and values that arrive later.

Nothing here is a library's; the fakes of them (deep_ep, pplx_kernels, nvshmem, flashinfer.comm) are built of it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SECONDS = 30.0  # no wait of a fake is longer
_WORLDS: dict[int, World] = {}
_NUMBERS = itertools.count()


class World:
    """Ranks that leave parcels for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.number = next(_NUMBERS)
        self.dead: set[int] = set()
        self._parcels: dict[tuple[Any, int, int], Any] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._news = threading.Condition()
        _WORLDS[self.number] = self

    def post(self, key: Any, sender: int, parcels: list[Any]) -> None:
        """One for each rank."""
        with self._news:
            for receiver, parcel in enumerate(parcels):
                assert (key, sender, receiver) not in self._parcels, f"rank {sender} does {key} twice"
                self._parcels[key, sender, receiver] = parcel
            self._news.notify_all()

    def take(self, key: Any, receiver: int) -> dict[int, Any]:
        """Those of all ranks that are alive, by rank. Waits."""

        def complete() -> bool:
            return all(
                (key, sender, receiver) in self._parcels for sender in range(self.size) if sender not in self.dead
            )

        with self._news:
            assert self._news.wait_for(complete, SECONDS), f"rank {receiver} hangs in {key}"
            return {
                sender: self._parcels.pop((key, sender, receiver))
                for sender in range(self.size)
                if (key, sender, receiver) in self._parcels
            }

    def exchange(self, key: Any, rank: int, parcels: list[Any]) -> dict[int, Any]:
        self.post(key, rank, parcels)
        return self.take(key, rank)

    def count(self, what: str, rank: int) -> int:
        """How often this rank has asked for the same before."""
        number = self._counts.get((what, rank), 0)
        self._counts[what, rank] = number + 1
        return number

    def kill(self, rank: int) -> None:
        """This rank answers nobody any more."""
        with self._news:
            self.dead.add(rank)
            self._news.notify_all()


def new_world(size: int, rank: int, gather: Callable[[Any], Any]) -> World:
    """The same World for all ranks that call this together. gather: what every rank brings, by rank."""
    number = gather(World(size).number if rank == 0 else -1)[0]
    return _WORLDS[number]


def world(number: int) -> World:
    return _WORLDS[number]


def poison(tensor: Tensor) -> Tensor:
    """Memory that nobody has written yet."""
    if tensor.dtype is torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)  # its NaN
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(0x55 if tensor.dtype in (torch.uint8, torch.bool) else 0x5555_5555)
    return tensor


def unwritten(*shape: int, dtype: torch.dtype) -> Tensor:
    return poison(torch.empty(shape, dtype=dtype))


class Late:
    """Tensors that hold nothing yet; `arrive` writes them, once."""

    def __init__(self) -> None:
        self._writes: list[tuple[Tensor, Tensor]] = []

    def tensor(self, value: Tensor) -> Tensor:
        holder = poison(torch.empty_like(value))
        self._writes.append((holder, value))
        return holder

    def into(self, holder: Tensor, value: Tensor) -> None:
        self._writes.append((poison(holder), value))

    def arrive(self) -> None:
        writes, self._writes = self._writes, []
        for holder, value in writes:
            if holder.dtype is torch.float8_e4m3fn:
                holder.view(torch.uint8).copy_(value.view(torch.uint8))
            else:
                holder.copy_(value)


def cat_fp8(parts: list[Tensor]) -> Tensor:
    """torch.cat of any dtype."""
    if parts[0].dtype is torch.float8_e4m3fn:
        return torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return torch.cat(parts)


def rounded_fp8(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as float8_e4m3fn with a float32 scale per 128."""
    x_TBI = x_TD.float().unflatten(1, (x_TD.shape[1] // 128, 128))
    scale_TB = x_TBI.abs().amax(-1).clamp(min=1e-4) / 448
    return (x_TBI / scale_TB.unsqueeze(-1)).flatten(1).to(torch.float8_e4m3fn), scale_TB
