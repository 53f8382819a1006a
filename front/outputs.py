"""What callers of the engine get: whole results offline, deltas while streaming. No torch here.

A *request* is one prompt with params.n *choices*; choice `index` counts from 0.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import NamedTuple

import msgspec

from front.chat.events import Event, Message
from front.chat.format import OutputFormat
from front.messages import FinishReason
from front.params import SamplingParams


class Prompt(msgspec.Struct, kw_only=True):
    """A checked request: made by front/sampling_params.py and front/text/tokenizer.py, taken by LLM and AsyncLLM.
    format: how its output is parsed; None: not at all. rank: that is to compute it while it takes work; None: any."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    text: str | None = None
    priority: int = 0
    cache_salt: str = ""
    format: OutputFormat | None = None
    rank: int | None = None


class TokenLogprob(msgspec.Struct, gc=False):
    """token: its text as one piece; raw: its bytes, also where they are only part of a character."""

    token_id: int
    logprob: float
    rank: int
    token: str
    raw: bytes

    @property
    def decoded_token(self) -> str:
        """`token`, as vLLM calls it."""
        return self.token


class PositionLogprobs(msgspec.Struct, gc=False):
    """chosen: the token that stands at this position; top: the most likely ones, best first (may include chosen).

    Also read as vLLM's dict: token id -> TokenLogprob, the chosen one first.
    """

    chosen: TokenLogprob
    top: list[TokenLogprob]

    def _by_id(self) -> dict[int, TokenLogprob]:
        return {token.token_id: token for token in (self.chosen, *self.top)}

    def __getitem__(self, token_id: int) -> TokenLogprob:
        return self._by_id()[token_id]

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._by_id()

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id())

    def __len__(self) -> int:
        return len(self._by_id())

    def get(self, token_id: int, default: TokenLogprob | None = None) -> TokenLogprob | None:
        return self._by_id().get(token_id, default)

    def keys(self) -> KeysView[int]:
        return self._by_id().keys()

    def values(self) -> ValuesView[TokenLogprob]:
        return self._by_id().values()

    def items(self) -> ItemsView[int, TokenLogprob]:
        return self._by_id().items()


class Delta(msgspec.Struct, gc=False):
    """What one step added to one choice. text never ends inside a UTF-8 character nor holds part of a stop string.

    events: what the text turned out to be, where the prompt has a format; `text` is then its content only. Stop strings
    are looked for in content alone. num_reasoning: of these tokens, those of the reasoning.
    prompt_logprobs and num_cached_tokens come with the first delta of choice 0 (None / 0 otherwise). num_accepted,
    num_rejected: drafts of this step that were right and wrong (docs/speculation.md).
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    events: list[Event] | None = None
    num_reasoning: int = 0


class CompletionOutput(msgspec.Struct):
    """message: of LLM.chat where the model's formats are known: content, reasoning and calls of tools apart; `text` has
    them as the model wrote them."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    message: Message | None = None


class RequestOutput(msgspec.Struct):
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    accepted_prediction_tokens: int = 0  # drafts, of whatever source, that were right
    rejected_prediction_tokens: int = 0

    @property
    def finished(self) -> bool:
        """No choice goes on."""
        return all(output.finish_reason is not None for output in self.outputs)


class Progress(NamedTuple):
    """How far one call of LLM is."""

    num_finished: int
    num_requests: int
    num_output_tokens: int
