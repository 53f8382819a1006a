"""Beam search: the likeliest outputs of a prompt, by ordinary requests for one token each, whose best tokens and
log-probabilities say how the beams go on. The prefix cache has what beams share.

The rules are those of transformers' generate(num_beams=..., do_sample=False): of the best continuations of all beams
those that end are finished where they are among the first `beam_width`, the best others go on, and a finished beam
ranks by the sum of its log-probabilities over its number of tokens to the power of length_penalty. Names are vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from front.messages import FinishReason
from front.outputs import PositionLogprobs, Prompt, RequestOutput, TokenLogprob
from front.params import SamplingParams
from front.text.tokenizer import Tokenizer

MAX_BEAM_WIDTH = 64
EARLY_STOPPING = (False, True, "never")


class BeamSearchParams(msgspec.Struct, frozen=True):
    """early_stopping: when a search ends that has beam_width finished beams: True: at once; False: when the best
    beam that goes on is worse than all of them as it is; "never": when it cannot become better than one of them.
    temperature changes nothing but what processed_logprobs are."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[int, ...] = ()


class BeamSearchSequence(msgspec.Struct):
    """tokens: prompt and output. text: of both. logprobs: of each token of the output, with the best others."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float
    score: float
    text: str
    finish_reason: FinishReason
    stop_reason: int | None = None


class BeamSearchOutput(msgspec.Struct):
    """The best first."""

    sequences: list[BeamSearchSequence]


class Beam(Struct):
    """tokens: of the output. total: of their log-probabilities."""

    tokens: list[int] = []
    logprobs: list[PositionLogprobs] = []
    total: float = 0.0
    finish_reason: FinishReason = "abort"
    stop_reason: int | None = None


def validate_beams(params: BeamSearchParams, mode: str = "raw_logprobs") -> None:
    """mode: of the ranks' log-probabilities. ValueError names the field and its limit."""
    limits = {"beam_width": MAX_BEAM_WIDTH, "max_tokens": None}
    for name, limit in limits.items():
        value = getattr(params, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value > (limit or value):
            bound = "at least 1" if limit is None else f"from 1 to {limit}"
            raise ValueError(f"{name} must be an integer {bound}, not {value!r}")
    penalty = params.length_penalty
    if not isinstance(penalty, int | float) or isinstance(penalty, bool) or not -10 <= penalty <= 10:
        raise ValueError(f"length_penalty must be from -10 to 10, not {penalty!r}")
    if params.early_stopping not in EARLY_STOPPING:
        raise ValueError(f'early_stopping must be True, False or "never", not {params.early_stopping!r}')
    if not mode.endswith("logprobs"):
        raise ValueError(f"use_beam_search needs log-probabilities, and logprobs_mode is {mode}")


class Search:
    """Of one prompt. Its beams are to be continued by a token each (`prompts`), until there are none."""

    def __init__(self, prompt: Prompt, params: BeamSearchParams, ends: Sequence[int]) -> None:
        """prompt: its params have max_tokens as the context has room. ends: tokens that end a text."""
        assert prompt.params.max_tokens is not None
        self._prompt, self._params = prompt, params
        self._max_tokens = prompt.params.max_tokens
        self._eos = frozenset(() if params.ignore_eos else ends)
        self._stops = self._eos | frozenset(params.stop_token_ids)
        self._kept = max(2, 1 + len(self._stops)) * params.beam_width  # continuations that are looked at
        self._running = [Beam()]
        self._finished: list[Beam] = []
        self.num_cached = 0

    @property
    def num_logprobs(self) -> int:
        return max(self._kept, self._prompt.params.logprobs or 0)

    def names(self) -> list[str]:
        """Of its requests, of which each is one of these again in the next step."""
        return beam_names(self._prompt.request_id, self._params.beam_width)

    def prompts(self) -> list[Prompt]:
        """What is to be asked next; []: the search has ended."""
        one = SamplingParams(
            max_tokens=1, temperature=self._params.temperature, logprobs=self.num_logprobs, skip_special_tokens=False
        )
        asked = []
        for name, beam in zip(self.names(), self._running, strict=False):
            own = msgspec.structs.replace(self._prompt, request_id=name, params=one, text=None, format=None)
            own.token_ids = self._prompt.token_ids + beam.tokens
            asked.append(own)
        return asked

    def take_results(self, results: Iterable[RequestOutput]) -> None:
        """Of its requests, in their order, among others."""
        names = set(self.names())
        own = [result for result in results if result.request_id in names]
        if not own:
            return
        found = [result.outputs[0].logprobs for result in own]
        self.num_cached = self.num_cached or own[0].num_cached_tokens
        if all(found):
            self.take([positions[0] for positions in found if positions])
        else:
            reasons = {result.outputs[0].finish_reason for result in own}
            self.stop("error" if "error" in reasons else "abort")

    def take(self, found: Sequence[PositionLogprobs]) -> None:
        """For each prompt the tokens that may follow it."""
        width, length = self._params.beam_width, len(self._running[0].tokens) + 1
        last = length == self._max_tokens
        candidates = [
            (beam.total + token.logprob, beam, token, position)
            for beam, position in zip(self._running, found, strict=True)
            for token in position.top
            if token.logprob > -math.inf
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        full = len(self._finished) == width and self._params.early_stopping is True
        finished = list(self._finished)
        running: list[Beam] = []
        for place, (total, beam, token, position) in enumerate(candidates[: self._kept]):
            ends = token.token_id in self._stops
            if not (ends or last):
                if len(running) < width:
                    running.append(self._longer(beam, token, position, total))
            elif place < width and not full:
                finished.append(self._longer(beam, token, position, total, "stop" if ends else "length"))
        finished.sort(key=lambda beam: -self.score(beam))
        self._finished = finished[:width]
        self._running = running if self._goes_on(running, length) else []

    def stop(self, reason: FinishReason) -> None:
        """Something has ended it from outside: beams are what they are."""
        for beam in self._running:
            beam.finish_reason = reason
        self._finished += sorted(self._running, key=lambda beam: -beam.total)
        self._finished, self._running = self._finished[: self._params.beam_width], []

    def score(self, beam: Beam) -> float:
        return beam.total / float(max(1, len(beam.tokens)) ** self._params.length_penalty)

    @property
    def best(self) -> list[Beam]:
        return self._finished

    def output(self, tokenizer: Tokenizer) -> BeamSearchOutput:
        sequences = []
        for beam in self._finished:
            tokens = self._prompt.token_ids + beam.tokens
            ends = beam.finish_reason == "stop" and not self._params.include_stop_str_in_output
            text = tokenizer.decode(tokens[:-1] if ends else tokens, self._params.skip_special_tokens)
            sequences.append(
                BeamSearchSequence(
                    tokens, beam.logprobs, beam.total, self.score(beam), text, beam.finish_reason, beam.stop_reason
                )
            )
        return BeamSearchOutput(sequences)

    def _longer(
        self, beam: Beam, token: TokenLogprob, position: PositionLogprobs, total: float, reason: FinishReason = "abort"
    ) -> Beam:
        stopped = reason == "stop" and token.token_id not in self._eos
        logprobs = [*beam.logprobs, PositionLogprobs(token, position.top)]
        return Beam([*beam.tokens, token.token_id], logprobs, total, reason, token.token_id if stopped else None)

    def _goes_on(self, running: list[Beam], length: int) -> bool:
        params = self._params
        if not running or len(self._finished) < params.beam_width:
            return bool(running)
        reach = self._max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        better = running[0].total / reach**params.length_penalty > self.score(self._finished[-1])
        return better and params.early_stopping is not True


def beam_names(request_id: str, beam_width: int) -> list[str]:
    """The engine's names of the requests of a search."""
    return [f"{request_id}.{beam}" for beam in range(beam_width)]
