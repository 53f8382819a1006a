"""What a sequence may go on with, by its grammar: the state of one, and the masks of a step's rows.

Legend: N masks, W words of 32 tokens each (bit i of word w: token 32 w + i may come).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]


class Guide:
    """Of one request. Belongs to the thread that runs the steps, except while none of its steps is under way.

    Until `after` has come in the output, any token may come. When the grammar has ended, only tokens that end the text
    may. A matcher that fails says so in `error`; then too nothing else may come, and the request ends.
    """

    __slots__ = ("_active", "_after", "_matcher", "_output", "ends", "error")

    def __init__(self, matcher: llguidance.LLMatcher, ends: Sequence[int] = (), after: tuple[int, ...] = ()) -> None:
        """ends: tokens that end a text."""
        self._matcher = matcher
        self._after = after
        self._output: list[int] = []
        self._active = not after
        self.ends = ends
        self.error = ""

    def restate(self, output: Sequence[int]) -> None:
        """The output so far is this, whatever was accepted: a request goes on elsewhere, or a step was dropped."""
        if self._output == output:
            return
        if self._output:
            self._matcher.reset()
            self._output = []
            self._active = not self._after
            self.error = ""
        self.accept(output)

    def accept(self, tokens: Sequence[int]) -> None:
        """These come next."""
        known = len(self._output)
        self._output += tokens
        if not self._active:
            begin = self._begin(known)
            if begin is None:
                return
            self._active = True
            tokens = self._output[begin:]
        if tokens and not self._ended and not self._matcher.consume_tokens(list(tokens)):
            self.check()

    def num_valid(self, drafts: Sequence[int]) -> int:
        """How many of these tokens may come next, one after another."""
        if self._ended:
            return 0
        free = 0 if self._active else self._free(drafts)
        if free == len(drafts):
            return free
        return free + int(self._matcher.validate_tokens(list(drafts[free:])))

    def masks(self, drafts: Sequence[int]) -> tuple[int, list[int]]:
        """Of the places before, between and behind these drafts: how many of the first are free, and the drafts between
        the others."""
        if self._active:
            return 0, list(drafts)
        free = self._free(drafts)
        if free == len(drafts) and not self._begins([*self._output, *drafts]):
            return free + 1, []
        return free, list(drafts[free:])

    @property
    def matcher(self) -> llguidance.LLMatcher | None:
        """None: only the end may come."""
        return None if self._ended else self._matcher

    def check(self) -> bool:
        """Whether it has not failed."""
        if self._matcher.is_error():
            self.error = self.error or self._matcher.get_error() or "the matcher has failed"
        return not self.error

    @property
    def _ended(self) -> bool:
        return bool(self._matcher.is_stopped())  # also when it has failed

    def _begin(self, known: int) -> int | None:
        """The place in the output behind `after`, if that is behind `known`."""
        output, size = self._output, len(self._after)
        for end in range(max(known + 1, size), len(output) + 1):
            if tuple(output[end - size : end]) == self._after:
                return end
        return None

    def _free(self, drafts: Sequence[int]) -> int:
        """How many of the drafts come before the grammar begins, the last token of `after` among them."""
        text = [*self._output[-len(self._after) :], *drafts]
        first = len(text) - len(drafts)
        for end in range(first + 1, len(text) + 1):
            if self._begins(text[:end]):
                return end - first
        return len(drafts)

    def _begins(self, output: Sequence[int]) -> bool:
        return tuple(output[len(output) - len(self._after) :]) == self._after


Rows = Sequence[tuple[Guide, Sequence[int]]]  # with their drafts
Filled = tuple[dict[Guide, list[int]], Words]


class Masks:
    """Of the rows of one step, filled on a thread of its own while the step computes."""

    def __init__(self, num_tokens: int, ends: Sequence[int]) -> None:
        """ends: tokens that end a text."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._under_way: Future[Filled] | None = None
        self.num_words = -(-num_tokens // 32)
        self._end_W = np.zeros(self.num_words, np.int32)
        for token in ends:
            if token < num_tokens:
                self._end_W.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._masks_NW = np.empty((0, self.num_words), np.int32)
        self._executor = llguidance.LLExecutor(1)

    def begin(self, rows: Rows) -> None:
        """Start to `fill`; the guides are left alone until `take`, or `forget`."""
        self.forget()
        self._under_way = self._thread.submit(self.fill, rows)

    def take(self, rows: Rows) -> Filled:
        """What was begun for these, else what `fill` gives."""
        begun, self._under_way = self._under_way, None
        if begun is not None:
            places, masks_NW = begun.result()
            if all(len(places.get(guide, ())) == len(drafts) + 1 for guide, drafts in rows):
                return places, masks_NW
        return self.fill(rows)

    def forget(self) -> None:
        """The step that it was begun for was dropped."""
        begun, self._under_way = self._under_way, None
        if begun is not None:
            begun.exception()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def fill(self, rows: Rows) -> Filled:
        """For each guide, per place before, between and behind its drafts, which mask it has (-1: none); and the masks,
        which stay as they are until the next call."""
        places: dict[Guide, list[int]] = {}
        plain: list[tuple[llguidance.LLMatcher, int]] = []
        drafted: list[tuple[llguidance.LLMatcher, int, list[int]]] = []
        asked: list[tuple[Guide, int, int]] = []
        num = 0
        for guide, drafts in rows:
            num_free, between = guide.masks(drafts)
            count = len(drafts) + 1 - num_free
            places[guide] = [-1] * num_free + list(range(num, num + count))
            matcher = guide.matcher
            if count and matcher is not None:
                asked.append((guide, num, count))
                if between:
                    drafted.append((matcher, num, between))
                else:
                    plain.append((matcher, num))
            num += count
        masks_NW = self._room(num)
        masks_NW[:] = self._end_W  # what stays so: behind the end, and behind a draft that is refused
        start, size = masks_NW.ctypes.data, 4 * self.num_words
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, start, size, num)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, start, size, num)
        for guide, first, count in asked:
            if not guide.check():
                masks_NW[first : first + count] = self._end_W
        return places, masks_NW

    def _room(self, num: int) -> Words:
        if len(self._masks_NW) < num:
            self._masks_NW = np.empty((2 * num, self.num_words), np.int32)
        return self._masks_NW[:num]
