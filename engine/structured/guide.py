"""What a sequence may go on with, by its grammar: the state of one, and the masks of a step's rows.

Legend: P rows sampled in a step, N masks, W words of 32 tokens each (bit i of word w: token 32 w + i may come).
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np
import numpy.typing as npt

from engine.structured.xgrammar_matcher import XgrammarMatcher

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]
Matcher = llguidance.LLMatcher | XgrammarMatcher


class Guide:
    """Of one request. Belongs to the thread that runs the steps, except while none of its steps is under way.

    Until `after` has come in the output, any token may come. When the grammar has ended, only tokens that end the text
    may. A matcher that fails says so in `error`; then too nothing else may come, and the request ends.
    """

    __slots__ = ("_after", "_matcher", "_output", "active", "ended", "ends", "error")

    def __init__(self, matcher: Matcher, ends: Sequence[int] = (), after: tuple[int, ...] = ()) -> None:
        """ends: tokens that end a text."""
        self._matcher = matcher
        self._after = after
        self._output: list[int] = []
        self.active = not after  # whether the next token is bound
        self.ended = bool(matcher.is_stopped())  # only the end may come; also when it has failed
        self.ends = ends
        self.error = ""

    def restate(self, output: Sequence[int]) -> None:
        """The output so far is this, whatever was accepted: a request goes on elsewhere, or a step was dropped."""
        if self._output == output:
            return
        if self._output:
            self._matcher.reset()
            self._output = []
            self.active = not self._after
            self.error = ""
            self._look()
        self.accept(list(output))

    def accept(self, tokens: list[int]) -> None:
        """These come next."""
        known = len(self._output)
        self._output += tokens
        if not self.active:
            begin = self._begin(known)
            if begin is None:
                return
            self.active = True
            tokens = self._output[begin:]
        if tokens and not self.ended:
            self._matcher.consume_tokens(tokens)
            if self._matcher.is_stopped():
                self._look()

    def fill(self, pointer: int, size: int) -> bool:
        """Write the mask of the next token where `size` bytes are. False: only the end may come; write that."""
        if self.ended:
            return False
        self._matcher.unsafe_compute_mask_ptr(pointer, size)
        if self._matcher.is_stopped():  # seen only now
            self._look()
        return not self.error

    def num_valid(self, drafts: Sequence[int]) -> int:
        """How many of these tokens may come next, one after another."""
        if self.ended:
            return 0
        free = 0 if self.active else self._free(drafts)
        if free == len(drafts):
            return free
        return free + int(self._matcher.validate_tokens(list(drafts[free:])))

    def forced(self) -> list[int]:
        """Tokens that come next for certain, though others may spell the same text."""
        return self._matcher.compute_ff_tokens() if self.active and not self.ended else []

    def masks(self, drafts: Sequence[int]) -> tuple[int, list[int]]:
        """Of the places before, between and behind these drafts: how many of the first are free, and the drafts between
        the others."""
        if self.active:
            return 0, list(drafts)
        free = self._free(drafts)
        if free == len(drafts) and not self._begins([*self._output, *drafts]):
            return free + 1, []
        return free, list(drafts[free:])

    @property
    def matcher(self) -> Matcher | None:
        """None: only the end may come."""
        return None if self.ended else self._matcher

    def check(self) -> bool:
        """Whether it has not failed."""
        if self._matcher.is_stopped():
            self._look()
        return not self.error

    def _look(self) -> None:
        """What the matcher says of itself; to be asked when it may have ended."""
        self.ended = bool(self._matcher.is_stopped())
        if self._matcher.is_error():
            self.error = self.error or self._matcher.get_error() or "the matcher has failed"

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


class Masks:
    """Of the rows of one step. They are filled in place, one after another, where the step is sampled: another thread
    would take turns with this one, and the pool of llguidance's executor wakes one for every step, which costs more
    than most masks (benchmarks/bench_structured.py). On a GPU the device computes the step meanwhile."""

    def __init__(self, num_tokens: int, ends: Sequence[int]) -> None:
        """ends: tokens that end a text."""
        self.num_words = -(-num_tokens // 32)
        self._end_W = np.zeros(self.num_words, np.int32)
        for token in ends:
            if token < num_tokens:
                self._end_W.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._masks_NW = np.empty((0, self.num_words), np.int32)
        self._executor = llguidance.LLExecutor(1)

    def fill(self, guides: Sequence[Guide | None], drafts: Sequence[Sequence[int]] = ()) -> tuple[Ints, Words]:
        """For each of the P rows which mask it has (-1: none), and the masks, which stay as they are until the next
        call. guides: None: the row has no grammar. drafts: of each row those before it; the rows of a run come one
        after another, and each has one draft more. Empty: there are none."""
        masks_NW = self._room(len(guides))
        start, size = masks_NW.ctypes.data, 4 * self.num_words
        mask_of = [-1] * len(guides)
        end = 0
        while end < len(guides):
            first, guide = end, guides[end]
            end += 1
            while end < len(drafts) and len(drafts[end]) == end - first:
                end += 1  # the rows of a run
            if guide is None:
                continue
            if end - first > 1:
                begin = self._fill_run(guide, drafts[end - 1], masks_NW, first)
                mask_of[begin:end] = range(begin, end)
            elif guide.active:
                mask_of[first] = first
                if not guide.fill(start + first * size, size):
                    masks_NW[first] = self._end_W
        return np.array(mask_of, np.int64), masks_NW

    def _fill_run(self, guide: Guide, drafts: Sequence[int], masks_NW: Words, first: int) -> int:
        """The masks before, between and behind these drafts; the first row that has one."""
        start, size, end = masks_NW.ctypes.data, 4 * self.num_words, first + len(drafts) + 1
        num_free, between = guide.masks(drafts)
        begin, matcher = first + num_free, guide.matcher
        masks_NW[begin:end] = self._end_W  # what stays so: behind the end, and behind a draft that is refused
        if begin == end or matcher is None:
            return begin
        if not between:
            matcher.unsafe_compute_mask_ptr(start + begin * size, size)
        elif isinstance(matcher, XgrammarMatcher):
            matcher.compute_masks_of_run(start + begin * size, size, between)
        else:  # one alone is computed in place
            run = [(matcher, begin, between)]
            self._executor.unsafe_compute_mask_ptr_with_draft_token(run, start, size, end)
        if not guide.check():
            masks_NW[begin:end] = self._end_W
        return begin

    def _room(self, num: int) -> Words:
        if len(self._masks_NW) < num:
            self._masks_NW = np.empty((2 * num, self.num_words), np.int32)
        return self._masks_NW[:num]
