"""One sequence as the scheduler sees it: its tokens, how far it is computed, and when it ends. No torch here.

Three lengths matter, computed <= length, known <= length:
- known tokens, `len(tokens)`: prompt and every output token that has come back;
- `length`: known tokens plus those being sampled by a step in flight (placeholders, `length - len(tokens)` of them);
- `num_computed`: tokens whose keys and values some step up to the last scheduled one computes.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TYPE_CHECKING

from cache.manager import Holding
from cache.rows import stay_of
from front.messages import AddRequest, FinishReason, Logprobs, TokenOutput

if TYPE_CHECKING:
    from engine.sampling.processors import RequestProcessors
    from engine.structured.guide import Guide


class Status(IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waiting again, after its blocks were taken away
    FINISHED = 3


class Request:
    """Plain mutable state; the scheduler and the KV cache own the changes. Ordered by `order`, which is unique."""

    __slots__ = (
        "added",
        "cache_salt",
        "eos_token_ids",
        "first_output_sent",
        "formers",
        "guide",
        "held",
        "last_step",
        "length",
        "max_length",
        "message",
        "min_length",
        "num_accepted",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "num_rejected",
        "order",
        "processors",
        "prompt_len",
        "prompt_logprobs",
        "queued",
        "request_id",
        "row",
        "speculates",
        "status",
        "stop_ids",
        "tokens",
    )

    def __init__(self, message: AddRequest, order: tuple[float, ...], max_length: int, held: Holding) -> None:
        """max_length: the most tokens (prompt and output) that fit anywhere; params.max_tokens may lower it."""
        params = message.params
        assert params.max_tokens is not None, "the front resolves max_tokens"
        self.message = message
        self.request_id = message.request_id
        self.order = order
        self.tokens = list(message.token_ids)
        self.prompt_len = message.prompt_len
        self.max_length = min(max_length, message.prompt_len + params.max_tokens)
        self.min_length = message.prompt_len + params.min_tokens
        self.eos_token_ids = frozenset(() if params.ignore_eos else message.eos_token_ids)
        self.stop_ids = self.eos_token_ids | frozenset(params.stop_token_ids)
        self.cache_salt = message.cache_salt

        self.status = Status.WAITING
        self.row = -1
        self.last_step = -1  # id of the last step that refers to the row
        self.length = len(self.tokens)
        self.num_computed = 0
        self.num_cached = -1  # tokens found in the prefix cache at the first admission; -1: never admitted
        replayed = len(self.tokens) > self.prompt_len  # then its first output went out long ago
        self.first_output_sent = replayed
        wants = params.prompt_logprobs is not None and not replayed
        self.prompt_logprobs: list[Logprobs | None] | None = [None] if wants else None  # None: none wanted, or all sent

        self.guide: Guide | None = None  # of its grammar, once that is compiled
        self.processors: RequestProcessors | None = None  # of its logits
        self.held = held  # of the cache; the manager's
        self.formers = message.formers  # where it was before; (): nothing of that is of use any more
        self.speculates = False  # it may have drafts (engine/speculation/drafter.py)
        self.num_accepted = self.num_rejected = 0  # drafts, since the last output
        self.num_preemptions = 0
        self.added = time.monotonic()
        self.queued: float | None = None  # seconds until it was first let into a step

    def __lt__(self, other: Request) -> bool:
        return self.order < other.order

    @property
    def num_pending(self) -> int:
        """Output tokens that steps in flight are sampling."""
        return self.length - len(self.tokens)

    @property
    def stay(self) -> int:
        """In its row, or in the next one."""
        return stay_of(self.request_id, self.num_preemptions)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def error(self) -> str:
        """Why it cannot go on; "": it can."""
        if self.guide is not None and self.guide.error:
            return f"its grammar: {self.guide.error}"
        return "" if self.processors is None else self.processors.error

    def first_admitted(self, num_cached: int) -> None:
        """num_cached: tokens found in the prefix cache."""
        self.num_cached = num_cached
        self.queued = time.monotonic() - self.added

    def keep_prompt_logprobs(self, start: int, chunk: list[Logprobs] | None) -> None:
        """Collect them until the first output. After a preemption or a rollback they come again."""
        if chunk and self.prompt_logprobs is not None:
            self.prompt_logprobs[start + 1 :] = chunk

    def end_within(self, num_new: int) -> tuple[int, FinishReason | None, int | None]:
        """The last num_new known tokens came from one sample; drop those behind the end of the sequence. Returns how
        many stay, why it ends there (None: it goes on), and the stop token id that did it (None for EOS and length).

        Stop tokens do not count before min_tokens outputs.
        """
        first = len(self.tokens) - num_new
        for index in range(first, len(self.tokens)):
            token = self.tokens[index]
            stopped = token in self.stop_ids and index + 1 >= self.min_length
            if stopped or index + 1 >= self.max_length:
                self.length -= len(self.tokens) - index - 1
                del self.tokens[index + 1 :]
                if not stopped:
                    return index + 1 - first, "length", None
                return index + 1 - first, "stop", None if token in self.eos_token_ids else token
        return num_new, None, None

    def goes_on_with(self, new: list[int]) -> bool:
        """Whether `new`, the last of `tokens`, is one token that does not end it, and nothing else is to be said."""
        one = len(new) == 1 and len(self.tokens) < self.max_length
        return one and new[0] not in self.stop_ids and self.first_output_sent

    def output(self, num_new: int, logprobs: list[Logprobs] | None) -> TokenOutput:
        """Of a sample of num_new tokens, the last of `tokens`: cut where the sequence ends, with what comes only
        once."""
        new = self.tokens[len(self.tokens) - num_new :]
        num_new, reason, stop_reason = self.end_within(num_new)
        prompt_logprobs, num_cached, queued = None, 0, None
        if not self.first_output_sent:
            self.first_output_sent = True
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
            num_cached, queued = self.num_cached, self.queued
        num_accepted, num_rejected = self.num_accepted, self.num_rejected
        self.num_accepted = self.num_rejected = 0
        return TokenOutput(
            request_id=self.request_id,
            new_token_ids=new[:num_new],
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if logprobs is None else logprobs[:num_new],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached,
            num_accepted=num_accepted,
            num_rejected=num_rejected,
            queued=queued,
            num_preemptions=0 if reason is None else self.num_preemptions,
        )
