"""Logits processors: code of the operator that changes logits before anything else does (docs/serving.md).

Each is a pure function of what a request asked for, its tokens so far and the logits. Nothing of it is carried from
one step to the next, and the history is made anew from the request's tokens whenever it takes a row: so tokens are the
same with drafts (a row for each, with its own history), after a preemption, and at another rank.

Legend: V vocabulary entries, without padding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.sampling.processor_names import described, processor_class
from front.params import SamplingParams

log = logging.getLogger("moesaic.rank")

# (prompt, output so far, logits float32 [V]) -> logits of the same shape; those given may be changed and returned.
RequestLogitsProcessor = Callable[[tuple[int, ...], list[int], Tensor], Tensor]


class LogitsProcessor(Protocol):
    """What a class of logits processors is. Each rank makes one of it, when it is built. Names are those of vLLM's
    processors of single requests."""

    def __init__(self, vocab_size: int, device: torch.device) -> None: ...

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Called when a request comes, and again when it goes on at another rank. params.extra_args: what it says to
        processors. None: this request's logits stay as they are. What is returned is called on another thread."""
        ...


class RequestProcessors:
    """Of one request. Belongs to the thread that runs the steps, except while none of its steps is under way. One that
    fails says so in `error`; the request then ends."""

    __slots__ = ("_ends", "_failed", "_min_tokens", "_output", "_parts", "_prompt", "error")

    def __init__(self, params: SamplingParams, parts: Sequence[tuple[str, RequestLogitsProcessor]]) -> None:
        self._parts = parts
        self._min_tokens = params.min_tokens
        self._ends: frozenset[int] = frozenset()
        self._prompt: tuple[int, ...] = ()
        self._output: list[int] = []
        self._failed: tuple[list[int], str] | None = None  # behind these drafts, if they come, with this error
        self.error = ""

    def restate(self, token_ids: Sequence[int], prompt_len: int, ends: frozenset[int]) -> None:
        """The tokens so far are these, whatever was known before. ends: tokens that end the sequence."""
        self._prompt, self._output = tuple(token_ids[:prompt_len]), list(token_ids[prompt_len:])
        self._ends, self._failed = ends, None

    def accept(self, tokens: Sequence[int]) -> None:
        """These come next: what failed behind drafts has failed if all of those are among them."""
        if self._failed is not None:
            drafts, error = self._failed
            if len(tokens) > len(drafts) and list(tokens[: len(drafts)]) == drafts:
                self.error = error
            self._failed = None
        self._output += tokens

    def apply(self, logits_V: Tensor, drafts: Sequence[int]) -> None:
        """In place, as if these drafts were part of the output. float32."""
        if self.error:
            return
        name = ""
        try:
            for name, process in self._parts:  # noqa: B007  (named where it fails)
                changed = process(self._prompt, [*self._output, *drafts], logits_V)
                if not isinstance(changed, Tensor) or changed.shape != logits_V.shape:
                    raise TypeError(f"it must return logits of shape {list(logits_V.shape)}")
                if changed is not logits_V:
                    logits_V.copy_(changed)
            if not -math.inf < float(logits_V.max()) < math.inf:
                raise ValueError("no finite logit is left, or one is NaN or infinite")
        except (Exception, SystemExit) as error:
            self._fail(drafts, f"logits processor {name}: {described(error)}")
            logits_V.zero_()

    def _fail(self, drafts: Sequence[int], error: str) -> None:
        if not drafts:
            self.error = error
            return
        ended = any(
            token in self._ends and len(self._output) + place >= self._min_tokens
            for place, token in enumerate(drafts, 1)
        )
        if self._failed is None and not ended:  # behind the end no row counts
            self._failed = list(drafts), error


class LogitsProcessors:
    """Of a rank: one of each class."""

    def __init__(self, names: Sequence[str], vocab_size: int, device: torch.device) -> None:
        """ValueError names the class that cannot be made."""
        self._made: list[tuple[str, LogitsProcessor]] = []
        for name in names:
            try:
                self._made.append((name, processor_class(name)(vocab_size, device)))
            except ValueError:
                raise
            except Exception as error:
                raise ValueError(f"logits_processors {name!r:.200}: {described(error)}") from error

    def of(self, params: SamplingParams) -> RequestProcessors | None:
        """None: none of them wants to see this request. One that fails says so in `error`."""
        parts, name = [], ""
        try:
            for name, processor in self._made:
                process = processor.new_req_logits_processor(params)
                if process is not None:
                    parts.append((name, process))
        except (Exception, SystemExit) as error:
            failed = RequestProcessors(params, ())
            failed.error = f"logits processor {name}: {described(error)}"
            return failed
        return RequestProcessors(params, parts) if parts else None
