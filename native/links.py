"""Messages between ranks over connected sockets, without a thread beside the one that computes (native/src/links.cpp).

A message goes to a box of its receiver: memory, and a word that says what arrived last. Ranks make their boxes in the
same order. Messages are sent and received by calls of the exchange that waits for them (native/exchange.py), and by
nothing else.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

from native.features import Isa, isa
from native.library import function

MAX_RANKS, MAX_BOXES = 64, 256
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_new = function("links_new", ctypes.POINTER(_POINTER), ctypes.POINTER(ctypes.c_int), _NUMBER)
_free = function("links_free", _POINTER)
_box = function("links_box", _POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER)
_state = function("links_state", _POINTER, ctypes.POINTER(_NUMBER), ctypes.POINTER(_NUMBER))


def can_run(size: int) -> bool:
    """Whether so many ranks can be linked here."""
    return size <= MAX_RANKS and isa() > Isa.NONE


class LinkSockets:
    """One per group of ranks; for one thread. num_boxes: made so far."""

    def __init__(self, sockets: Sequence[int]) -> None:
        """sockets: descriptors by rank, -1 for this one; they stay open for as long as this is used."""
        self.num_boxes = 0
        self.size = len(sockets)
        self._handle = ctypes.c_void_p()
        _new(ctypes.byref(self._handle), (ctypes.c_int * self.size)(*sockets), self.size)
        weakref.finalize(self, _free, self._handle).atexit = False

    @property
    def address(self) -> int:
        assert self._handle.value is not None
        return self._handle.value

    def boxes(self, memory: Sequence[int], room: int, words: Sequence[int]) -> int:
        """A box for the messages of each rank, by their addresses; room: bytes of one message. Gives its number."""
        for peer, at in enumerate(zip(memory, words, strict=True)):
            _box(self._handle, peer, at[0], room, at[1])
        self.num_boxes += 1
        return self.num_boxes - 1

    @property
    def lost(self) -> int:
        """A rank whose connection is broken, or -1."""
        return self._state()[0]

    @property
    def waited(self) -> float:
        """Seconds, of all exchanges so far."""
        return self._state()[1] * 1e-9

    def _state(self) -> tuple[int, int]:
        lost, waited = ctypes.c_int64(), ctypes.c_int64()
        _state(self._handle, lost, waited)
        return lost.value, waited.value
