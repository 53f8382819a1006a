"""Deltas joined into the whole result of a request."""

from __future__ import annotations

from front.messages import FinishReason
from front.outputs import CompletionOutput, Delta, PositionLogprobs, Prompt, RequestOutput


class _Choice:
    __slots__ = ("finish_reason", "logprobs", "stop_reason", "texts", "token_ids")

    def __init__(self, wants_logprobs: bool) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = [] if wants_logprobs else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None


class Collector:
    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._choices = [_Choice(prompt.params.logprobs is not None) for _ in range(prompt.params.n)]
        self._open = prompt.params.n
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._num_cached = self._num_accepted = self._num_rejected = 0

    @property
    def finished(self) -> bool:
        return self._open == 0

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    def add(self, delta: Delta) -> None:
        choice = self._choices[delta.index]
        choice.texts.append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        if choice.logprobs is not None and delta.logprobs is not None:
            choice.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        if delta.num_cached_tokens:
            self._num_cached = delta.num_cached_tokens
        self._num_accepted += delta.num_accepted
        self._num_rejected += delta.num_rejected
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
            self._open -= 1

    def output(self) -> RequestOutput:
        """What has come so far; finish_reason is None for choices that go on."""
        return RequestOutput(
            request_id=self._prompt.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[self._completion(index) for index in range(len(self._choices))],
            num_cached_tokens=self._num_cached,
            accepted_prediction_tokens=self._num_accepted,
            rejected_prediction_tokens=self._num_rejected,
        )

    def _completion(self, index: int) -> CompletionOutput:
        choice = self._choices[index]
        logprobs = choice.logprobs
        return CompletionOutput(
            index=index,
            text="".join(choice.texts),
            token_ids=choice.token_ids,
            cumulative_logprob=sum(item.chosen.logprob for item in logprobs) if logprobs is not None else None,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
