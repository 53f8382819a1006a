"""The front's core: which requests live, where they run, and what their tokens mean. Pure bookkeeping: no sockets, no loop.

A *request* (a Prompt) has params.n *sequences*, one per choice, all on one rank so that they share the prompt's KV. Ranks know
sequences by an integer that this module gives out. What to send and what to tell the callers comes back as `Work`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from engine.detokenizer import Detokenizer, StopStrings
from engine.messages import (
    Abort,
    AddRequest,
    FinishReason,
    FrontToRank,
    Logprobs,
    Outputs,
    RankFailed,
    RankReady,
    RankStats,
    RankToFront,
    SamplingParams,
    TokenOutput,
)
from engine.outputs import Delta, PositionLogprobs, Prompt, TokenLogprob
from engine.routing import Router
from engine.sampling_params import seeds
from engine.text import Tokenizer

_MAX_FINISHED = 65536


class EngineFailed(RuntimeError):
    """A rank is gone; no request can go on."""


class EngineDraining(RuntimeError):
    """The engine takes no new requests."""


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request took. Times are seconds of the front's clock (time.monotonic()); first_token None: none came."""

    request_id: str
    rank: int
    arrival: float
    first_token: float | None
    finish: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int  # of all choices
    finish_reasons: tuple[FinishReason, ...]  # one per choice
    params: SamplingParams


class Work(NamedTuple):
    """deltas: (request id, what it got). messages: (rank, what to send to it)."""

    deltas: list[tuple[str, Delta]]
    messages: list[tuple[int, FrontToRank]]


class _Request:
    __slots__ = ("arrival", "first_token", "num_cached", "num_output", "open", "prompt", "rank", "reasons", "sequences")

    def __init__(self, prompt: Prompt, rank: int, arrival: float) -> None:
        self.prompt = prompt
        self.rank = rank
        self.arrival = arrival
        self.first_token: float | None = None
        self.num_cached = 0
        self.num_output = 0
        self.open = prompt.params.n  # choices that have not finished
        self.reasons: list[FinishReason] = ["abort"] * prompt.params.n
        self.sequences: list[_Sequence] = []


class _Sequence:
    """One choice. token_ids is its log: the prompt, then every token that was released."""

    __slots__ = (
        "cost",
        "detokenizer",
        "first",
        "index",
        "min_tokens",
        "num_output",
        "pending",
        "request",
        "sequence_id",
        "stops",
        "token_ids",
    )

    def __init__(self, sequence_id: int, index: int, request: _Request, detokenizer: Detokenizer) -> None:
        params = request.prompt.params
        self.sequence_id = sequence_id
        self.index = index
        self.request = request
        self.detokenizer = detokenizer
        self.stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self.min_tokens = params.min_tokens
        self.token_ids = list(request.prompt.token_ids)
        self.num_output = 0
        self.first = True  # no output yet
        self.cost = 0  # tokens charged to the rank's load, all in all
        self.pending = 0  # the part of it that goes with the first output: prompt tokens to compute


class Front:
    """One per server or offline engine. Not thread-safe; nothing here waits."""

    def __init__(
        self,
        num_ranks: int,
        tokenizer: Tokenizer,
        *,
        block_size: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """block_size: tokens of a KV block, the unit of prefix affinity."""
        self.tokenizer = tokenizer
        self.router = Router(num_ranks, block_size)
        self.stats = [RankStats() for _ in range(num_ranks)]
        self.ready: dict[int, RankReady] = {}
        self.failed: str | None = None
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = itertools.count()
        self._finished: deque[FinishedRequest] = deque(maxlen=_MAX_FINISHED)

    # ---- requests in ----

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, prompt: Prompt) -> list[tuple[int, AddRequest]]:
        """prompt.params must be resolved (sampling_params.resolve). ValueError when its request id is in use."""
        params = prompt.params
        assert params.max_tokens is not None and prompt.token_ids
        if prompt.request_id in self._requests:
            raise ValueError(f"request_id {prompt.request_id!r} is in use by a running request")
        rank = self.router.choose(prompt.token_ids, prompt.cache_salt)
        request = _Request(prompt, rank, self._clock())
        self._requests[prompt.request_id] = request
        messages = []
        for index, seed in enumerate(seeds(params.seed, params.n)):
            sequence = self._open_sequence(index, request)
            # Stop strings are found here, bad words are token ids by now, and the prompt is scored once.
            own = msgspec.structs.replace(
                params,
                n=1,
                seed=None,
                stop=(),
                bad_words=(),
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            )
            message = AddRequest(
                request_id=sequence.sequence_id,
                token_ids=prompt.token_ids,
                prompt_len=len(prompt.token_ids),
                params=own,
                seed=seed,
                eos_token_ids=self.tokenizer.eos_token_ids,
                priority=prompt.priority,
                cache_salt=prompt.cache_salt,
                arrival=request.arrival,
            )
            messages.append((rank, message))
        return messages

    def _open_sequence(self, index: int, request: _Request) -> _Sequence:
        prompt = request.prompt
        detokenizer = self.tokenizer.detokenizer(prompt.token_ids, prompt.params.skip_special_tokens)
        sequence = _Sequence(next(self._next_id), index, request, detokenizer)
        # Choices share the prompt's KV and its computation: the first one is charged for both.
        assert prompt.params.max_tokens is not None
        prompt_len = len(prompt.token_ids) if index == 0 else 0
        sequence.pending = prompt_len
        sequence.cost = self.router.expected_tokens(prompt_len, prompt.params.max_tokens) + prompt_len
        self.router.loads[request.rank] += sequence.cost
        request.sequences.append(sequence)
        self._sequences[sequence.sequence_id] = sequence
        return sequence

    def abort(self, request_id: str) -> Work:
        """End a request: its open choices get a final delta with finish_reason "abort". Nothing if it is not live."""
        request = self._requests.get(request_id)
        if request is None:
            return Work([], [])
        open_sequences = [item for item in request.sequences if item.sequence_id in self._sequences]
        now = self._clock()
        deltas = []
        for sequence in open_sequences:
            text = sequence.detokenizer.finish()
            if sequence.stops is not None:
                text = sequence.stops.finish() + text
            deltas.append((request_id, Delta(sequence.index, text, [], finish_reason="abort")))
            self._close_sequence(sequence, "abort", now)
        return Work(deltas, [(request.rank, Abort([item.sequence_id for item in open_sequences]))])

    # ---- outputs out ----

    def on_message(self, message: RankToFront) -> Work:
        """Take what a rank sent. After RankFailed, `failed` says why and no request will go on."""
        if isinstance(message, Outputs):
            return self._on_outputs(message)
        if isinstance(message, RankReady):
            self.ready[message.rank] = message
        else:
            assert isinstance(message, RankFailed)
            error = message.error.removeprefix(f"rank {message.rank}: ")
            self.failed = f"rank {message.rank} failed: {error}"
        return Work([], [])

    def take_finished(self) -> list[FinishedRequest]:
        """Requests that finished since the last call (at most the newest 65536)."""
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def _on_outputs(self, message: Outputs) -> Work:
        self.stats[message.rank] = message.stats
        now = self._clock()
        sequences = self._sequences
        deltas: list[tuple[str, Delta]] = []
        stopped: list[int] = []
        for output in message.outputs:
            sequence = sequences.get(output.request_id)
            if sequence is None:  # aborted, or stopped by a stop string, while this was under way
                continue
            delta = self._advance(sequence, output, now)
            deltas.append((sequence.request.prompt.request_id, delta))
            if delta.finish_reason is not None:
                if output.finish_reason is None:
                    stopped.append(output.request_id)
                self._close_sequence(sequence, delta.finish_reason, now)
        return Work(deltas, [(message.rank, Abort(stopped))] if stopped else [])

    def _advance(self, sequence: _Sequence, output: TokenOutput, now: float) -> Delta:
        """One output into one delta. The text of a token that ended the sequence is not shown, unless asked for."""
        token_ids = output.new_token_ids
        logprobs = output.logprobs
        if output.finish_reason is None and sequence.stops is None:
            delta = Delta(sequence.index, sequence.detokenizer.push(token_ids), token_ids)
        else:
            delta = self._advance_slowly(sequence, output)
            token_ids = delta.token_ids
        num_new = len(token_ids)
        sequence.token_ids.extend(token_ids)
        sequence.num_output += num_new
        sequence.request.num_output += num_new
        if logprobs is not None:
            delta.logprobs = [self._position(logprobs[place]) for place in range(num_new)]
        if sequence.first:
            self._first_output(sequence, output, delta, now)
        return delta

    def _advance_slowly(self, sequence: _Sequence, output: TokenOutput) -> Delta:
        """The same with stop strings, or at the end of a sequence."""
        token_ids = output.new_token_ids
        reason, stop_reason = output.finish_reason, output.stop_reason
        include_end = sequence.request.prompt.params.include_stop_str_in_output
        ends_with_stop_token = reason == "stop" and not include_end
        shown = token_ids[:-1] if ends_with_stop_token else token_ids
        detokenizer, stops = sequence.detokenizer, sequence.stops
        if stops is None:
            text = detokenizer.push(shown) + detokenizer.finish()
            return Delta(sequence.index, text, token_ids, finish_reason=reason, stop_reason=stop_reason)

        text = ""
        for place, token_id in enumerate(shown):
            look = sequence.num_output + place + 1 > sequence.min_tokens
            text += stops.push(detokenizer.push((token_id,)), look)
            if stops.found is not None:
                kept = token_ids[: place + 1]
                return Delta(sequence.index, text, kept, finish_reason="stop", stop_reason=stops.found)
        if reason is not None:
            text += stops.push(detokenizer.finish(), look=False) + stops.finish()
        return Delta(sequence.index, text, token_ids, finish_reason=reason, stop_reason=stop_reason)

    def _first_output(self, sequence: _Sequence, output: TokenOutput, delta: Delta, now: float) -> None:
        request = sequence.request
        sequence.first = False
        self.router.loads[request.rank] -= sequence.pending
        sequence.cost -= sequence.pending
        if request.first_token is None and output.new_token_ids:
            request.first_token = now
        if sequence.index == 0:
            request.num_cached = delta.num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                delta.prompt_logprobs = [
                    self._position(item) if item is not None else None for item in output.prompt_logprobs
                ]

    def _close_sequence(self, sequence: _Sequence, reason: FinishReason, now: float) -> None:
        request = sequence.request
        del self._sequences[sequence.sequence_id]
        self.router.loads[request.rank] -= sequence.cost
        self.router.finished(sequence.num_output)
        request.reasons[sequence.index] = reason
        request.open -= 1
        if request.open:
            return
        prompt = request.prompt
        del self._requests[prompt.request_id]
        self._finished.append(
            FinishedRequest(
                request_id=prompt.request_id,
                rank=request.rank,
                arrival=request.arrival,
                first_token=request.first_token,
                finish=now,
                num_prompt_tokens=len(prompt.token_ids),
                num_cached_tokens=request.num_cached,
                num_output_tokens=request.num_output,
                finish_reasons=tuple(request.reasons),
                params=prompt.params,
            )
        )

    def _position(self, logprobs: Logprobs) -> PositionLogprobs:
        ids, values = logprobs.ids, logprobs.values
        top = [self._token(ids[place], values[place], place) for place in range(1, len(ids))]
        return PositionLogprobs(self._token(ids[0], values[0], logprobs.rank), top)

    def _token(self, token_id: int, logprob: float, rank: int) -> TokenLogprob:
        raw = self.tokenizer.token_bytes(token_id)
        return TokenLogprob(token_id, logprob, rank, raw.decode("utf-8", "replace"), raw)
