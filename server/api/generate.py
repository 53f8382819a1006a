"""One generating request: its engine streams joined, its numbers counted, and its answer, whole or streamed.

What the two endpoints write differently is behind `Writer` (server/api/completions.py, server/api/chat.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Protocol

from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from front.async_llm import AsyncLLM, RequestStream
from front.chat.events import Content, Event, Message
from front.front import EngineBusy, EngineDraining, EngineFailed
from front.outputs import Delta, PositionLogprobs, Prompt
from front.search.beam_deltas import beam_deltas
from front.search.beams import BeamSearchParams, beam_names
from server.api.openai import Usage, usage_of
from server.errors import ApiError, as_api_error, unfinished
from server.http import ResponseWriter, response_writer_of
from server.in_flight import InFlightRequest
from server.logs import Record
from server.service import Service, json_response, record_of

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that gathers tokens would undo streaming
]
AT_ONCE = 16  # prompts of one request that are sent before others have their turn
GOODBYE_SECONDS = 5.0  # how long the last words to a slow client may take


class Job(Struct, kw_only=True):
    """What to generate and how to show it. Choices are prompt-major: choice // n is the prompt.

    echo: text that stands before the output of each prompt's choices; None: no echo. no_output: max_tokens was 0, so
    the one token that the engine had to make is not shown. reasoning: it is part of the answer. named_tool: the request
    named the function that is called. The writer reads the rest.
    """

    request_id: str
    answer_id: str
    model: str
    created: int
    prompts: list[Prompt]
    n: int
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    usage_details: bool = True
    logprobs: bool = False
    echo: list[str] | None = None
    echo_logprobs: bool = False
    prompt_logprobs: bool = False
    no_output: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    reasoning: bool = True
    named_tool: bool = False
    beams: BeamSearchParams | None = None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def engine_ids(self) -> list[list[str]]:
        """The engine's names of what each prompt asks of it."""
        width = 0 if self.beams is None else self.beams.beam_width
        return [beam_names(prompt.request_id, width) or [prompt.request_id] for prompt in self.prompts]


class Writer(Protocol):
    def frames(self, deltas: list[Delta], record: Record) -> bytes:
        """Server-sent events for what is new; empty when there is nothing to say."""
        ...

    def end(self, total: Usage, record: Record) -> bytes:
        """The last words of a stream."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The last words of a stream that cannot go on."""
        ...

    def whole(self, choices: list[Choice], prompts: list[PromptFacts], total: Usage) -> object:
        """The body of an answer that is not streamed."""
        ...


class Choice(Struct):
    """All that came for one choice."""

    index: int
    texts: list[str] = []
    steps: list[tuple[list[Event], list[PositionLogprobs] | None]] = []
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.steps.append((events_of(delta), delta.logprobs))
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def message(self) -> Message:
        """All events joined."""
        joined = Message()
        for events, _ in self.steps:
            joined.add(events)
        return joined


def events_of(delta: Delta) -> list[Event]:
    """What its text is."""
    if delta.events is not None:
        return delta.events
    return [Content(delta.text)] if delta.text else []


class PromptFacts(Struct):
    logprobs: list[PositionLogprobs | None] | None = None


# ---- from the engine ----------------------------------------------------------------------------------------------


Deltas = RequestStream | AsyncGenerator[list[Delta], None]


def deltas_of(engine: AsyncLLM, job: Job) -> Deltas:
    """What each step adds, with the choice numbers of the whole request. Close it when leaving early."""
    if job.beams is not None:
        return beam_deltas(engine, job.prompts, job.beams)
    source: Deltas = engine.stream(job.prompts[0]) if len(job.prompts) == 1 else _joined(engine, job)
    return prompt_first(source, job.n) if job.stream and job.echo_logprobs else source


async def _joined(engine: AsyncLLM, job: Job) -> AsyncGenerator[list[Delta], None]:
    """Several prompts: a task each. What comes between the first and the last of them holds for all: an abort ends
    those that are not sent yet, too, and a drain or a loss does not refuse them."""
    arrived: list[list[Delta]] = []
    errors: list[Exception] = []
    woken = asyncio.Event()

    async def pump(number: int, prompt: Prompt, aborted: set[str]) -> None:
        try:
            async with aclosing(engine.stream(prompt, goes_on=True)) as stream:
                if prompt.request_id in aborted:
                    engine.abort(prompt.request_id)
                async for deltas in stream:
                    for delta in deltas:
                        delta.index += number * job.n
                    arrived.append(deltas)
                    woken.set()
        except Exception as error:
            errors.append(error)
        finally:
            woken.set()

    pumps: list[asyncio.Task[None]] = []
    with engine.series(prompt.request_id for prompt in job.prompts) as aborted:
        try:
            for number, prompt in enumerate(job.prompts):
                pumps.append(asyncio.create_task(pump(number, prompt, aborted)))
                if number % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)  # others have their turn
            while True:
                running = any(not task.done() for task in pumps)
                woken.clear()
                if arrived:
                    joined = [delta for deltas in arrived for delta in deltas]
                    arrived.clear()
                    yield joined
                elif errors:
                    raise errors[0]
                elif not running:
                    return
                else:
                    await woken.wait()
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def prompt_first(source: Deltas, n: int) -> AsyncGenerator[list[Delta], None]:
    """Holds a prompt's choices back until choice 0 has brought the logprobs of the prompt, which all of them show."""
    known: set[int] = set()
    held: dict[int, list[Delta]] = {}
    async with aclosing(source):
        async for deltas in source:
            out: list[Delta] = []
            for delta in deltas:
                prompt = delta.index // n
                if prompt not in known and delta.prompt_logprobs is None:
                    held.setdefault(prompt, []).append(delta)
                    continue
                out.append(delta)
                if prompt not in known:
                    known.add(prompt)
                    out += held.pop(prompt, [])
            if out:
                yield out
        rest = [delta for deltas in held.values() for delta in deltas]
        if rest:  # aborted before the first output
            yield rest


# ---- to the client ------------------------------------------------------------------------------------------------


class Answer(Response):
    """The response to a generating request. Of starlette's Response it keeps only that it is an ASGI application.

    Nothing is sent before the engine has answered (or `keep_alive_interval` has passed), so that a request which cannot
    start gets an HTTP error.
    """

    def __init__(self, service: Service, job: Job, writer: Writer) -> None:
        self._service = service
        self._job = job
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, job = self._service, self._job
        service.require_ready()
        record = record_of(scope)
        record.model = job.model
        record.params, record.num_choices = job.prompts[0].params, job.num_choices
        record.prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
        engine_ids = [name for names in job.engine_ids for name in names]
        num_sequences = job.num_choices if job.beams is None else len(engine_ids)
        current = service.in_flight.open(job.request_id, num_sequences)
        current.answer_id = job.answer_id
        current.prompt_ids = engine_ids
        failure: ApiError | None = None
        body: object = None
        try:
            current.watch(receive)
            if job.stream:
                current.stream_to(send, SSE_HEADERS)
                await self._stream(current, record, response_writer_of(scope))
            else:
                body = await self.gather(record)
        except asyncio.CancelledError:
            if current.cause is None:
                raise
        except (EngineDraining, EngineBusy, EngineFailed, ApiError) as error:
            failure = as_api_error(error)
        finally:
            service.in_flight.close(current)
        if current.cause == "timeout":
            failure = ApiError(
                408, f"the request took longer than {service.config.request_timeout:g} s", code="timeout"
            )
        if current.cause in ("disconnect", "stalled"):
            record.status, record.finish = 499, current.cause
        elif failure is not None:
            record.finish = failure.code or "error"
            if not current.started:
                raise failure
            record.status = failure.status
            await self._last_words(current, self._writer.failed(failure))
        elif not job.stream:
            await json_response(body)(scope, receive, send)

    @staticmethod
    async def _last_words(current: InFlightRequest, data: bytes) -> None:
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await current.write(data, time.monotonic(), more=False)
        except TimeoutError:
            pass

    async def _stream(self, current: InFlightRequest, record: Record, response_writer: ResponseWriter | None) -> None:
        job, writer = self._job, self._writer
        counter = _Counter(job, record)
        last = b""  # the frames of the last choices to end leave together with the words that end the answer

        def write_at_once(response_writer: ResponseWriter, deltas: list[Delta]) -> bool:
            """What the loop below does, within the engine's wake-up: most tokens go this way."""
            if current.is_writing or not response_writer.open:
                return False
            now = counter.count(deltas)
            frames = writer.frames(deltas, record)
            if frames:
                current.write_to(response_writer, frames, now)
            return True

        try:
            async with aclosing(deltas_of(self._service.engine, job)) as source:
                if response_writer is not None and isinstance(source, RequestStream):
                    source.set_sink(partial(write_at_once, response_writer))
                async for deltas in source:
                    now = counter.count(deltas)
                    frames = writer.frames(deltas, record)
                    if not counter.num_open:
                        last = frames
                    elif frames:
                        await current.write(frames, now)
        finally:
            counter.report(self._service)
        last += writer.end(usage_of(record), record)
        await current.write(last, time.monotonic(), more=False)

    async def tell(self, record: Record, put: Callable[[bytes], None]) -> None:
        """The events of a streamed answer, as they come."""
        counter = _Counter(self._job, record)
        try:
            async with aclosing(deltas_of(self._service.engine, self._job)) as source:
                async for deltas in source:
                    counter.count(deltas)
                    put(self._writer.frames(deltas, record))
        finally:
            counter.report(self._service)
        put(self._writer.end(usage_of(record), record))

    async def gather(self, record: Record) -> object:
        """The body of an answer that is not streamed."""
        job = self._job
        choices = [Choice(index) for index in range(job.num_choices)]
        prompts = [PromptFacts() for _ in job.prompts]
        counter = _Counter(job, record)
        try:
            async with aclosing(deltas_of(self._service.engine, job)) as source:
                async for deltas in source:
                    counter.count(deltas)
                    for delta in deltas:
                        choices[delta.index].add(delta)
                        if delta.prompt_logprobs is not None:
                            prompts[delta.index // job.n].logprobs = delta.prompt_logprobs
        finally:
            counter.report(self._service)
        return self._writer.whole(choices, prompts, usage_of(record))


class _Counter:
    """Counts what comes into the request's record, and the times between it."""

    def __init__(self, job: Job, record: Record) -> None:
        self._engine_ids = job.engine_ids
        self._n = job.n
        self._hides = job.no_output
        self._record = record
        self.num_open = job.num_choices  # choices that have not ended
        self._last = [0.0] * job.num_choices  # when the choice's last delta came; 0: none has
        self._gaps: list[list[float]] = [[] for _ in job.prompts]
        self._params = job.prompts[0].params

    def count(self, deltas: list[Delta]) -> float:
        """Returns the time. ApiError when the engine could not finish a choice."""
        now = time.monotonic()
        record, last = self._record, self._last
        record.first_token = record.first_token or now
        for delta in deltas:
            index = delta.index
            if last[index]:
                self._gaps[index // self._n].append(now - last[index])
            else:
                record.cached_tokens += delta.num_cached_tokens
            last[index] = now
            if self._hides:
                _hide(delta)
            record.output_tokens += len(delta.token_ids)
            record.accepted_drafts += delta.num_accepted
            record.rejected_drafts += delta.num_rejected
            record.reasoning_tokens += delta.num_reasoning
            if delta.finish_reason is not None:
                record.finish = delta.finish_reason
                self.num_open -= 1
                if delta.finish_reason == "error":
                    raise unfinished(self._params)
        return now

    def report(self, service: Service) -> None:
        for names, gaps in zip(self._engine_ids, self._gaps, strict=True):
            self._record.finished += filter(None, [service.metrics.add_gaps(name, gaps) for name in names])


def _hide(delta: Delta) -> None:
    delta.text, delta.token_ids, delta.logprobs, delta.events = "", [], None, None
    if delta.finish_reason == "stop":
        delta.finish_reason, delta.stop_reason = "length", None
