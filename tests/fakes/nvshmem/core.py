"""Each thread that calls `init` is a PE of its own. Memory is ordinary memory, of which peers hold views; freshly allocated it
holds anything. A signal is set when all that was put before it is there."""

from __future__ import annotations

import ctypes
import enum
import itertools
import threading
from typing import Any

import torch
from cuda.core import Buffer, Device
from fake_world import World, poison, world
from torch import Tensor


class SignalOp(enum.IntEnum):
    SIGNAL_SET = 9
    SIGNAL_ADD = 10


class _Pe:
    def __init__(self, number: int, rank: int) -> None:
        self.world: World = world(number)
        self.rank = rank
        self.pieces: list[Tensor] = []
        self.of_rank: list[list[Tensor]] = []  # by allocation, then by PE


_HERE = threading.local()


def _pe() -> _Pe:
    pe: _Pe | None = _HERE.__dict__.get("pe")
    assert pe is not None, "NVSHMEM Library is not initialized"
    return pe


def this_pe() -> tuple[World, int]:
    """For the fakes of libraries on top of this one."""
    return _pe().world, _pe().rank


def get_unique_id(empty: bool = False) -> int:
    return -1 if empty else next(_IDS)


def init(
    device: Device, uid: Any = None, rank: int = -1, nranks: int = 0, mpi_comm: Any = None, initializer_method: str = ""
) -> None:
    assert initializer_method == "uid" and mpi_comm is None and isinstance(device, Device)
    assert 0 <= rank < nranks and "pe" not in _HERE.__dict__, "NVSHMEM is started once in a process"
    _HERE.pe = _Pe(_meet(uid, nranks), rank)


def finalize() -> None:
    _pe()
    del _HERE.pe


def _meet(uid: int, nranks: int) -> int:
    assert uid >= 0, "the ID of one PE is handed to all"
    with _LOCK:
        if uid not in _WORLDS:
            _WORLDS[uid] = World(nranks).number
        return _WORLDS[uid]


_LOCK = threading.Lock()
_IDS = itertools.count()
_WORLDS: dict[int, int] = {}


def bytetensor(shape: tuple[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Collective: all PEs allocate the same."""
    pe = _pe()
    own = poison(torch.empty(shape, dtype=torch.uint8))
    key = ("allocate", len(pe.pieces))
    came = pe.world.exchange(key, pe.rank, [own] * pe.world.size)
    assert all(peer.shape == own.shape for peer in came.values()), "symmetric memory has one size"
    pe.pieces.append(own)
    pe.of_rank.append([came[rank] for rank in range(pe.world.size)])
    return own


def get_peer_tensor(tensor: Tensor, peer_pe: int) -> Tensor:
    pe = _pe()
    index = next((i for i, piece in enumerate(pe.pieces) if piece.data_ptr() == tensor.data_ptr()), -1)
    assert index >= 0, "Tried to retrieve buffer from Tensor not tracked by nvshmem"
    return pe.of_rank[index][peer_pe]


def signal_op(
    signal_var: Buffer, signal_val: int, signal_op: SignalOp, remote_pe: int = -1, stream: Any = None
) -> None:
    """The address is this PE's own; the word that changes is the peer's."""
    assert isinstance(signal_var, Buffer) and signal_var.size >= 8 and stream is not None
    assert signal_op == SignalOp.SIGNAL_SET and 0 <= signal_val < 1 << 64 and signal_var.handle % 8 == 0
    ctypes.c_uint64.from_address(peer_address(signal_var.handle, 8, remote_pe)).value = signal_val


def peer_address(address: int, num_bytes: int, remote_pe: int) -> int:
    """Where a peer has what this PE has at `address`."""
    pe = _pe()
    for piece, of_rank in zip(pe.pieces, pe.of_rank, strict=True):
        offset = address - piece.data_ptr()
        if 0 <= offset < piece.numel():
            assert offset + num_bytes <= piece.numel(), "beyond an allocation"
            return of_rank[remote_pe].data_ptr() + offset
    raise AssertionError("not in symmetric memory")
