"""Matchers of llguidance's C interface by all threads at once (native/src/guides.cpp).

Legend: N masks, W words of each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from native.features import Isa, isa
from native.library import function, library

Words = npt.NDArray[np.int32]

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = ("compute_mask", "get_mask", "get_mask_byte_size", "consume_tokens", "is_stopped", "rollback")
Ask = ctypes.CFUNCTYPE(  # GuideTokenize
    ctypes.c_size_t, _POINTER, _POINTER, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint32), ctypes.c_size_t
)


class Library(ctypes.Structure):
    """GuideLibrary of guides.cpp."""

    _fields_ = tuple((name, _POINTER) for name in _FUNCTIONS)


class _Call(ctypes.Structure):
    """GuideCall of guides.cpp."""

    _fields_ = (
        ("library", ctypes.POINTER(Library)),
        *((name, _NUMBER) for name in ("count", "mask_bytes")),
        *((name, _POINTER) for name in ("matchers", "places", "masks", "starts", "tokens", "stopped")),
    )


_fill = function("guides_fill", ctypes.POINTER(_Call), ctypes.c_int)
_accept = function("guides_accept", ctypes.POINTER(_Call), ctypes.c_int)
_run = function("guides_run", ctypes.POINTER(_Call), ctypes.POINTER(ctypes.c_int64))
_texts = function("guides_texts", Ask, _NUMBER, _NUMBER, ctypes.POINTER(_POINTER))
_forget_texts = function("guides_forget_texts", _POINTER)


def can_run() -> bool:
    """Whether the kernels are here."""
    return isa() > Isa.NONE


def functions(opened: ctypes.CDLL) -> Library:
    """Of llguidance, where it is loaded."""
    return Library(*(ctypes.cast(opened[f"llg_matcher_{name}"], _POINTER).value for name in _FUNCTIONS))


class Together:
    """Calls for many matchers of one step; of one thread at a time."""

    def __init__(self, of: Library) -> None:
        self._call = _Call(ctypes.pointer(of))
        self._of = of
        self._room = self._token_room = 0
        self._matchers: Any = None
        self._places: Any = None
        self._tokens: Any = None
        self._make_room(1, 1)

    def fill(self, matchers: list[int], places: list[int], masks_NW: Words) -> list[int]:
        """The masks of the next token of each, into those places. Of each whether it has stopped."""
        count = len(matchers)
        self._make_room(count, 0)
        self._matchers[:count] = matchers
        self._places[:count] = places
        call = self._call
        call.count, call.mask_bytes, call.masks = count, 4 * masks_NW.shape[1], masks_NW.ctypes.data
        _fill(call, torch.get_num_threads())
        return self._stopped[:count]

    def accept(self, matchers: list[int], tokens: Sequence[Sequence[int]]) -> list[int]:
        """These tokens come next. Of each whether it has stopped."""
        count, every = len(matchers), [token for some in tokens for token in some]
        self._make_room(count, len(every))
        self._matchers[:count] = matchers
        self._tokens[: len(every)] = every
        self._starts[1 : count + 1] = list(accumulate(map(len, tokens)))
        self._call.count = count
        _accept(self._call, torch.get_num_threads())
        return self._stopped[:count]

    def _make_room(self, count: int, num_tokens: int) -> None:
        call = self._call
        if count > self._room:
            self._room = 2 * count
            self._matchers, self._places, self._stopped = ((_NUMBER * self._room)() for _ in range(3))
            self._starts = (_NUMBER * (self._room + 1))()
            call.matchers, call.places = ctypes.addressof(self._matchers), ctypes.addressof(self._places)
            call.stopped, call.starts = ctypes.addressof(self._stopped), ctypes.addressof(self._starts)
        if num_tokens > self._token_room:
            self._token_room = 2 * num_tokens
            self._tokens = (ctypes.c_uint32 * self._token_room)()
            call.tokens = ctypes.addressof(self._tokens)


def fill_run(of: Library, matcher: int, drafts: Sequence[int], pointer: int, size: int) -> int:
    """Where `pointer` is, masks of `size` bytes: before, between and behind the drafts. How many of these may come;
    masks behind the end, or behind one that may not come, are not written."""
    numbers, valid = np.array((matcher, 0, 0, len(drafts), 0), np.int64), ctypes.c_int64()
    tokens, start = np.array(drafts, np.uint32), numbers.ctypes.data
    call = _Call(
        ctypes.pointer(of), 1, size, start, start + 8, pointer, start + 16, tokens.ctypes.data, start + 32
    )  # fmt: skip
    _run(ctypes.byref(call), ctypes.byref(valid))
    return valid.value


class Texts:
    """What texts become as tokens, remembered: up to `most` of up to `most_bytes` bytes. tokenize: of bytes; it may be
    called by any thread."""

    def __init__(self, tokenize: Callable[[bytes], Sequence[int]], most: int, most_bytes: int) -> None:
        def ask(_: int, start: int, length: int, tokens: ctypes._Pointer[ctypes.c_uint32], room: int) -> int:
            made = tokenize(ctypes.string_at(start, length))
            for place, token in enumerate(made[:room]):
                tokens[place] = token
            return len(made)

        self._ask = Ask(ask)  # lives as long as it may be called
        place = _POINTER()
        _texts(self._ask, most, most_bytes, ctypes.byref(place))
        self.pointer = place.value

    @property
    def tokenize(self) -> int:
        """The C function that the library asks, with the pointer."""
        kernels = library()
        assert kernels is not None
        return ctypes.cast(kernels["guides_tokenize"], _POINTER).value or 0

    def close(self) -> None:
        """Nobody may ask any more."""
        pointer, self.pointer = self.pointer, None
        if pointer:
            _forget_texts(pointer)
