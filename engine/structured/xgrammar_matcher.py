"""A matcher of the back end xgrammar, used as one of llguidance's is."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np


class XgrammarMatcher:
    """Of one sequence. An error stays until `reset`."""

    __slots__ = ("_error", "_mask_W", "_matcher")

    def __init__(self, matcher: Any, num_tokens: int) -> None:
        """matcher: an xgrammar.GrammarMatcher at the beginning. num_tokens: of its vocabulary."""
        self._matcher = matcher
        self._mask_W = np.zeros(-(-num_tokens // 32), np.int32)
        self._error = ""

    def reset(self) -> None:
        self._matcher.reset()
        self._error = ""

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Whether they may come; if not there is an error. What comes behind the end is not looked at."""
        for token in tokens:
            if self.is_stopped():
                break
            if not self._accept(token):
                self._error = f"token {token} is none that the grammar allows"
        return not self._error

    def compute_ff_tokens(self) -> list[int]:
        """The library knows what text must come, and no tokens of it."""
        return []

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """How many of them may come, one after another. Nothing changes."""
        num = 0
        for token in tokens:
            if self.is_stopped() or not self._accept(token):
                break
            num += 1
        self._matcher.rollback(num)
        return num

    def is_stopped(self) -> bool:
        """Whether the end has come, or an error."""
        return bool(self._error) or bool(self._matcher.is_terminated())

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    def is_accepting(self) -> bool:
        """Whether the text so far is a whole one."""
        return not self._error and bool(self._matcher.is_completed())

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        """The tokens that may come next, written where `size` bytes are; nothing where the end has come."""
        if self.is_stopped():
            return
        try:
            self._matcher.fill_next_token_bitmask(self._mask_W[None])
        except RuntimeError as error:
            self._error = str(error)
            return
        known = min(size, self._mask_W.nbytes)
        ctypes.memmove(pointer, self._mask_W.ctypes.data, known)
        ctypes.memset(pointer + known, 0, size - known)

    def compute_masks_of_run(self, pointer: int, size: int, drafts: Sequence[int]) -> None:
        """The masks before, between and behind the drafts, `size` bytes each, one after another. Those behind the end,
        or behind a draft that may not come, stay as they are."""
        num = 0
        self.unsafe_compute_mask_ptr(pointer, size)
        for draft in drafts:
            if self.is_stopped() or not self._accept(draft):
                break
            num += 1
            if not self.is_stopped():
                self.unsafe_compute_mask_ptr(pointer + num * size, size)
        self._matcher.rollback(num)

    def _accept(self, token: int) -> bool:
        return 0 <= token < 32 * len(self._mask_W) and bool(self._matcher.accept_token(token))
