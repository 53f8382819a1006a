"""What the front keeps of a live request and of each of its choices. No sockets, no loop, no torch here."""

from __future__ import annotations

import msgspec

from front.chat.events import Content, Event, content_of
from front.messages import AddRequest, FinishReason, TokenOutput
from front.outputs import Delta, Prompt
from front.params import SamplingParams
from front.text.detokenizer import Detokenizer, StopStrings

_MOST_FORMERS = 4  # ranks that were lost one after another before the next one released a token


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
    most_output_tokens: int  # of one of them
    queued: float | None  # seconds that it waited on its rank for its first step; None: it had none
    num_preemptions: int  # of all choices
    finish_reasons: tuple[FinishReason, ...]  # one per choice
    params: SamplingParams


class LiveRequest:
    __slots__ = (
        "arrival", "first_token", "most_output", "num_cached", "num_output", "num_preemptions", "open", "prompt",
        "queued", "rank", "reasons", "sequences",
    )  # fmt: skip

    def __init__(self, prompt: Prompt, arrival: float) -> None:
        self.prompt = prompt
        self.rank = 0  # where it runs, or ran last
        self.arrival = arrival
        self.first_token: float | None = None
        self.num_cached = 0
        self.num_output = 0
        self.most_output = 0
        self.queued: float | None = None
        self.num_preemptions = 0
        self.open = prompt.params.n  # choices that have not finished
        self.reasons: list[FinishReason] = ["abort"] * prompt.params.n
        self.sequences: list[Sequence] = []  # those that have not finished

    def finished(self, now: float) -> FinishedRequest:
        prompt = self.prompt
        return FinishedRequest(
            request_id=prompt.request_id,
            rank=self.rank,
            arrival=self.arrival,
            first_token=self.first_token,
            finish=now,
            num_prompt_tokens=len(prompt.token_ids),
            num_cached_tokens=self.num_cached,
            num_output_tokens=self.num_output,
            most_output_tokens=self.most_output,
            queued=self.queued,
            num_preemptions=self.num_preemptions,
            finish_reasons=tuple(self.reasons),
            params=prompt.params,
        )


class Sequence:
    """One choice. token_ids is its log: the prompt, then every token that was released.

    sequence_id: what its rank calls it; a new one for every rank it is sent to, so that late messages of a
    lost rank are not taken for those of the next one.
    """

    __slots__ = (
        "answered",
        "awaited",
        "cost",
        "detokenizer",
        "formers",
        "index",
        "key",
        "min_tokens",
        "num_output",
        "parser",
        "pending",
        "request",
        "seed",
        "sequence_id",
        "stops",
        "token_ids",
    )  # fmt: skip

    def __init__(self, index: int, seed: int, request: LiveRequest, detokenizer: Detokenizer) -> None:
        params = request.prompt.params
        self.sequence_id = -1
        self.index = index
        self.seed = seed
        self.request = request
        self.key = request.prompt.request_id
        self.detokenizer = detokenizer
        self.stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        format = request.prompt.format
        self.parser = format.parser(self.key, index) if format is not None else None
        self.min_tokens = params.min_tokens
        self.token_ids = list(request.prompt.token_ids)
        self.num_output = 0
        self.answered = False  # has had an output
        self.awaited = True  # has had no output from this rank
        self.formers: tuple[tuple[int, int, int], ...] = ()  # of AddRequest
        self.cost = 0  # tokens charged to the rank's load, all in all
        self.pending = 0  # the part of it that goes with the rank's first output: tokens to compute

    def message(self, eos_token_ids: tuple[int, ...]) -> AddRequest:
        """For the rank that is to continue it: what has been released comes with the prompt and is not sampled
        again."""
        request = self.request
        prompt, params = request.prompt, request.prompt.params
        # Stop strings are found here, bad words are token ids by now, and the prompt is scored once.
        own = msgspec.structs.replace(
            params,
            n=1,
            seed=None,
            stop=(),
            bad_words=(),
            prompt_logprobs=params.prompt_logprobs if self.index == 0 and not self.answered else None,
        )
        return AddRequest(
            request_id=self.sequence_id,
            token_ids=list(self.token_ids) if self.num_output else prompt.token_ids,
            prompt_len=len(prompt.token_ids),
            params=own,
            seed=self.seed,
            eos_token_ids=eos_token_ids,
            priority=prompt.priority,
            cache_salt=prompt.cache_salt,
            arrival=request.arrival,
            formers=self.formers,
        )

    def leave(self, rank: int, intact: bool) -> None:
        """That rank, which had it, is lost. intact: its cache is still to be had."""
        older = self.formers if self.awaited else ()
        num_computed = 0 if self.awaited else len(self.token_ids) - 1  # the last one was sampled, and nothing more
        latest = ((rank, self.sequence_id, num_computed),) if intact else ()
        self.formers = (*older, *latest)[-_MOST_FORMERS:]

    def delta(self, output: TokenOutput) -> Delta:
        """What an output adds. The caller then extends the log by the delta's tokens."""
        if self.parser is not None:
            return self._delta_with_events(output)
        if output.finish_reason is None and self.stops is None:
            return Delta(self.index, self.detokenizer.push(output.new_token_ids), output.new_token_ids)
        return self._delta_with_end(output)

    def last_delta(self, reason: FinishReason) -> Delta:
        """What was held back, when the sequence is ended from outside."""
        if self.parser is not None:
            events = self._last_events(cut=True)
            return Delta(self.index, content_of(events), [], finish_reason=reason, events=events)
        text = self.detokenizer.finish()
        text = text if self.stops is None else self.stops.finish() + text
        return Delta(self.index, text, [], finish_reason=reason)

    def _delta_with_end(self, output: TokenOutput) -> Delta:
        """What an output adds, with stop strings or at the end of the sequence. The text of a token that ended it is
        not shown, unless asked for."""
        token_ids = output.new_token_ids
        reason, stop_reason = output.finish_reason, output.stop_reason
        shown = self._shown(output)
        detokenizer, stops = self.detokenizer, self.stops
        if stops is None:
            text = detokenizer.push(shown) + detokenizer.finish()
            return Delta(self.index, text, token_ids, finish_reason=reason, stop_reason=stop_reason)

        text = ""
        for place, token_id in enumerate(shown):
            look = self.num_output + place + 1 > self.min_tokens
            text += stops.push(detokenizer.push((token_id,)), look)
            if stops.found is not None:
                kept = token_ids[: place + 1]
                return Delta(self.index, text, kept, finish_reason="stop", stop_reason=stops.found)
        if reason is not None:
            text += stops.push(detokenizer.finish(), look=False) + stops.finish()
        return Delta(self.index, text, token_ids, finish_reason=reason, stop_reason=stop_reason)

    def _shown(self, output: TokenOutput) -> list[int]:
        include_end = self.request.prompt.params.include_stop_str_in_output
        ends_with_stop_token = output.finish_reason == "stop" and not include_end
        return output.new_token_ids[:-1] if ends_with_stop_token else output.new_token_ids

    # ---- parsed ----

    def _delta_with_events(self, output: TokenOutput) -> Delta:
        """Tokens are parsed one by one, so that it is known which of them are reasoning, and behind which one enough
        calls have been made."""
        parser, stops, detokenizer = self.parser, self.stops, self.detokenizer
        assert parser is not None
        delta = Delta(self.index, "", output.new_token_ids, events=[])
        events = delta.events = []
        for place, token_id in enumerate(self._shown(output)):
            reasoned = parser.reasoning
            text = detokenizer.push((token_id,))
            if text:
                look = self.num_output + place + 1 > self.min_tokens
                events += self._unstopped(parser.feed(text), look)
            delta.num_reasoning += reasoned and parser.reasoning
            if parser.ended or (stops is not None and stops.found is not None):
                delta.token_ids = output.new_token_ids[: place + 1]
                delta.finish_reason, delta.stop_reason = "stop", None if stops is None else stops.found
                break
        else:
            delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
            if delta.finish_reason is not None:
                events += self._last_events(cut=delta.finish_reason != "stop")
        delta.text = content_of(events)
        return delta

    def _last_events(self, cut: bool) -> list[Event]:
        assert self.parser is not None
        text = self.detokenizer.finish()
        events = self._unstopped([*(self.parser.feed(text) if text else ()), *self.parser.finish(cut)], look=False)
        held = "" if self.stops is None else self.stops.finish()
        return [*events, Content(held)] if held else events

    def _unstopped(self, events: list[Event], look: bool) -> list[Event]:
        """Without what stop strings hold back or cut off: they are looked for in content, and a call ends the search
        for one that has begun."""
        stops = self.stops
        if stops is None:
            return events
        passed: list[Event] = []
        for event in events:
            text = stops.push(event.text, look) if isinstance(event, Content) else stops.finish()
            if text:
                passed.append(Content(text))
            if stops.found is not None:
                break
            if not isinstance(event, Content):
                passed.append(event)
        return passed
