"""A fake of torch.distributed._symmetric_memory._nvshmem_triton for kernels in Triton's interpreter, on the memory of the fake of
nvshmem4py. The part that adapters use.

A put takes what it sends at once, and brings it some time later: in any order, but a signal never before the bytes that belong to
it. Time passes while somebody looks at memory that others write (`deliver`).
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from typing import Any

from fake_world import World
from nvshmem.core import SignalOp, peer_address, this_pe
from triton.runtime.interpreter import InterpretedFunction

_CHANCE = random.Random(0)


@dataclass(frozen=True)
class _Flying:
    """To an address, then onto a word."""

    to: int
    content: bytes
    word: int
    value: int


_IN_FLIGHT: dict[World, list[_Flying]] = {}


def requires_nvshmem(jit_func: Any) -> Any:
    if not isinstance(jit_func, InterpretedFunction):
        raise TypeError(f"Expected a JITFunction, but got {type(jit_func)}")
    this_pe()  # started
    return jit_func


def putmem_signal_block(
    dst: Any, src: Any, size_bytes: Any, signal: Any, sig_val: Any, sig_op: Any, pe: Any, _semantic: Any = None
) -> None:
    """dst and signal are addresses of this PE's own; what changes is the peer's."""
    world, rank = this_pe()
    for value, bits in ((size_bytes, 32), (sig_op, 32), (pe, 32), (sig_val, 64)):
        assert value.dtype.is_int() and value.dtype.primitive_bitwidth >= bits and not value.shape, "scalars"
    assert dst.dtype.is_ptr() and src.dtype.is_ptr() and signal.dtype.element_ty.primitive_bitwidth == 64
    to, source, word, num_bytes, value, act, peer = (
        int(x.handle.data.item()) for x in (dst, src, signal, size_bytes, sig_val, sig_op, pe)
    )
    assert act == SignalOp.SIGNAL_ADD and value > 0, "the enumeration of the library's header, not 0 and 5"
    assert 0 <= peer < world.size and num_bytes > 0 and word % 8 == 0
    peer_address(source, num_bytes, rank)  # sent from symmetric memory, which a network card may read
    content = ctypes.string_at(source, num_bytes)
    flying = _Flying(peer_address(to, num_bytes, peer), content, peer_address(word, 8, peer), value)
    _IN_FLIGHT.setdefault(world, []).append(flying)


def deliver() -> bool:
    """One of those in flight to anybody in this PE's world arrives; False: none is."""
    world, _ = this_pe()
    flying = _IN_FLIGHT.get(world)
    if not flying:
        return False
    one = flying.pop(_CHANCE.randrange(len(flying)))
    ctypes.memmove(one.to, one.content, len(one.content))
    number = ctypes.c_int64.from_address(one.word)
    number.value += one.value
    return True
