"""What a sequence may go on with, by its grammar: the state of one, and the masks of a step's rows.

Legend: P rows sampled in a step, N masks, W words of 32 tokens each (bit i of word w: token 32 w + i may come).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import llguidance
import numpy as np
import numpy.typing as npt

from engine.structured.xgrammar_matcher import XgrammarMatcher

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]
Matcher: TypeAlias = "llguidance.LLMatcher | XgrammarMatcher"


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

    def accept(self, tokens: list[int], pointer: int = 0, size: int = 0) -> bool:
        """These come next. pointer: write the mask of the token behind them there, where `size` bytes are; where the
        grammar had ended before it stays as it is. False: it was not written, as there is none, the end has come, or
        the matcher fails at it, which `fill` finds again."""
        output, matcher = self._output, self._matcher
        output += tokens
        if not self.active:
            begin = self._begin(len(output) - len(tokens))
            if begin is None:
                return False
            self.active = True
            tokens = output[begin:]
        if self.ended:
            return pointer != 0
        if tokens and not matcher.consume_tokens(tokens):
            self._look()
            return False
        if pointer:
            matcher.unsafe_compute_mask_ptr(pointer, size)
        if not matcher.is_stopped():
            return pointer != 0
        if not (pointer and matcher.is_error()):
            self._look()
        return False

    def fill(self, pointer: int, size: int) -> bool:
        """Write the mask of the next token where `size` bytes are. False: only the end may come; write that."""
        if self.ended:
            return False
        self._matcher.unsafe_compute_mask_ptr(pointer, size)
        return self.check()

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
    """The guides of the batch's rows, and the masks of one step's. What a row may go on with is worked out right behind
    the token that it has got, as long as what its matcher has touched is in the caches: behind the next forward pass it
    takes longer. The masks of a run of drafts are worked out where the step is sampled. All of it one
    after another, by the thread that runs the steps: another one would take turns with it, and the pool of llguidance's
    executor wakes one for every step, which costs more than most masks (benchmarks/bench_structured.py)."""

    def __init__(self, max_rows: int, num_tokens: int, ends: Sequence[int]) -> None:
        """ends: tokens that end a text."""
        self.num_words = -(-num_tokens // 32)
        self._end_W = np.zeros(self.num_words, np.int32)
        for token in ends:
            if token < num_tokens:
                self._end_W.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self.guides: dict[int, Guide] = {}  # by row
        self._max_rows = max_rows
        self._make_room(np.empty((max_rows, self.num_words), np.int32))
        self._mask_of_row = np.full(max_rows, -1, np.int64)  # its own, or none
        self._unknown: set[int] = set()  # rows whose mask is not worked out
        self._executor = llguidance.LLExecutor(1)

    def put(self, row: int, guide: Guide) -> None:
        self.guides[row] = guide
        self._unknown.add(row)

    def drop(self, row: int) -> None:
        """Nothing happens where the row has no guide."""
        if self.guides.pop(row, None) is not None:
            self._mask_of_row[row] = -1
            self._unknown.discard(row)

    def accept(self, rows: Sequence[int], token_ids: Sequence[list[int]]) -> None:
        """Each row has got these tokens. The masks behind them are worked out."""
        guides, unknown, start, size = self.guides, self._unknown, self._start, 4 * self.num_words
        for row, tokens in zip(rows, token_ids, strict=True):
            guide = guides.get(row)
            if guide is None:
                continue
            if not guide.accept(tokens, start + row * size, size):
                unknown.add(row)
            elif row in unknown and not guide.ended:
                unknown.remove(row)
                self._mask_of_row[row] = row

    def fill(self, rows: Sequence[int], drafts: Sequence[Sequence[int]] = ()) -> tuple[Ints, Words]:
        """For each of the P rows which mask it has (-1: none), and the masks, which stay as they are until the next
        call or token. drafts: of each row those before it; the rows of a run are one row of the batch, come one after
        another, and each has one draft more. Empty: there are none."""
        if self._unknown:
            for row in self._unknown.intersection(() if drafts else rows):
                self._work_out(row)
        mask_P = self._mask_of_row[rows]
        end = 0
        while end < len(drafts):
            first = end
            end += 1
            while end < len(drafts) and len(drafts[end]) == end - first:
                end += 1  # the rows of a run
            row = rows[first]
            if end - first == 1 and row in self._unknown:
                self._work_out(row)
                mask_P[first] = self._mask_of_row[row]
            elif end - first > 1 and row in self.guides:
                mask_P[first:end] = self._fill_run(self.guides[row], drafts[end - 1], first)
        return mask_P, self._masks_NW

    def _work_out(self, row: int) -> None:
        """The mask of a row of which it was not known. It has none as long as any token may come."""
        guide, size = self.guides[row], 4 * self.num_words
        if not guide.active:
            self._mask_of_row[row] = -1
            return
        if not guide.fill(self._start + row * size, size):
            self._masks_NW[row] = self._end_W
        self._mask_of_row[row] = row
        self._unknown.remove(row)

    def _fill_run(self, guide: Guide, drafts: Sequence[int], first: int) -> Ints:
        """The masks before, between and behind these drafts; which they are. first: of the step's rows."""
        count, size = len(drafts) + 1, 4 * self.num_words
        first += self._max_rows
        end = first + count
        if len(self._masks_NW) < end:
            self._make_room(np.concatenate((self._masks_NW, np.empty((end, self.num_words), np.int32))))
        num_free, between = guide.masks(drafts)
        begin, matcher = first + num_free, guide.matcher
        which = np.arange(first, end)
        which[:num_free] = -1
        self._masks_NW[begin:end] = self._end_W  # what stays so: behind the end, and behind a draft that is refused
        if begin == end or matcher is None:
            return which
        if not between:
            matcher.unsafe_compute_mask_ptr(self._start + begin * size, size)
        elif isinstance(matcher, XgrammarMatcher):
            matcher.compute_masks_of_run(self._start + begin * size, size, between)
        else:  # one alone is computed in place
            run = [(matcher, begin, between)]
            self._executor.unsafe_compute_mask_ptr_with_draft_token(run, self._start, size, end)
        if not guide.check():
            self._masks_NW[begin:end] = self._end_W
        return which

    def _make_room(self, masks_NW: Words) -> None:
        """One for each row of the batch, and behind them those of runs."""
        self._masks_NW, self._start = masks_NW, masks_NW.ctypes.data
