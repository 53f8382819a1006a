"""POST /v1/responses, and what is kept of it: GET, DELETE, cancel, the input items."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from front.front import EngineBusy, EngineDraining, EngineFailed
from server.api.chat import chat_job
from server.api.endpoint import take
from server.api.event_log import EventLog, Followed
from server.api.generate import Answer, Job
from server.api.openai import ChatRequest
from server.api.responses import CHAT_NAMES, ResponsesRequest
from server.api.responses_answer import CompactionWriter, ResponsesWriter, WarmWriter
from server.api.stored import CHAIN, ResponseStore, Stored
from server.errors import ApiError, as_api_error, bad_request
from server.logs import Record, log_request
from server.service import Service, json_response, record_of
from server.taken import Answered

SEQUENCE_NUMBER = re.compile(r"-1|[0-9]{1,9}")
NAMES = {
    "logprobs": "top_logprobs",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "structured_outputs": "text.format",
}
Json = dict[str, Any]


class _Previous(msgspec.Struct):
    previous_response_id: str | None = None


_previous = msgspec.json.Decoder(_Previous)


class Responses:
    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.config
        self.store = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
        self._running: dict[str, asyncio.Task[None]] = {}  # in the background, by the response's id
        self._logs: dict[str, EventLog] = {}  # of those among them that are streamed

    async def answer(self, request: Request) -> Response:
        earlier = await self._earlier(request)
        try:
            taken = await take(self._service, request, "responses", ChatRequest, earlier)
            source = taken.source
            assert isinstance(source, ResponsesRequest)
            warms = source.generate is False
            if warms:
                if CHAIN not in request.scope:
                    raise bad_request("generate: false needs a WebSocket", "generate", "unsupported_parameter")
                taken.body.max_completion_tokens, taken.body.min_tokens = 1, None
            job = chat_job(self._service, taken, f"resp_{uuid.uuid4().hex}", NAMES)
        except ApiError as error:
            raise error.renamed(CHAT_NAMES) from None
        job.no_output = warms
        chain = request.scope.get(CHAIN, "") if source.store is False else ""
        keeps = source.store is not False or chain
        items: list[Json] = msgspec.json.decode(taken.items) if keeps else []

        def on_end(response: Json) -> None:
            if keeps:
                self.store.put(response, items, chain)

        writer = (WarmWriter if warms else ResponsesWriter)(job, source, self._decode, on_end)
        if source.background:
            return await self._begin(job, writer, items, record_of(request.scope))
        return Answer(self._service, job, writer)

    async def input_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of such a request has; nothing is generated."""
        try:
            taken = await self._service.take(request, "input_tokens", await self._earlier(request))
        except ApiError as error:
            raise error.renamed(CHAT_NAMES) from None
        assert isinstance(taken, Answered)
        return Response(taken.body, media_type="application/json")

    async def compact(self, request: Request) -> Response:
        """The conversation as one item, in which the model has summed it up."""
        earlier = await self._earlier(request)
        try:
            taken = await take(self._service, request, "compact", ChatRequest, earlier)
            job = chat_job(self._service, taken, f"resp_{uuid.uuid4().hex}", NAMES)
        except ApiError as error:
            raise error.renamed(CHAT_NAMES) from None
        assert isinstance(taken.source, ResponsesRequest)
        return Answer(self._service, job, CompactionWriter(job, taken.source, self._decode, lambda response: None))

    async def retrieve(self, request: Request) -> Response:
        """With stream=true the events behind that of the number starting_after: those that were, then those that
        come."""
        stored = self._kept(request)
        if request.query_params.get("stream") != "true":
            return Response(self._as_it_is(stored), media_type="application/json")
        after = request.query_params.get("starting_after", "-1")
        if not SEQUENCE_NUMBER.fullmatch(after):
            raise bad_request("starting_after must be the sequence_number of an event", "starting_after")
        log = self._logs.get(request.path_params["response_id"])
        if log is None and not stored.events:
            message = "only a response made with background: true and stream: true can be streamed again"
            raise bad_request(message, "stream", "unsupported_parameter")
        return Followed(self._service, log or EventLog(stored.events, ended=True), int(after) + 1)

    async def delete(self, request: Request) -> Response:
        self._kept(request)
        name = request.path_params["response_id"]
        await self._stop(name)
        self.store.drop(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Of one that runs in the background; one that has ended stays as it is."""
        response = msgspec.json.decode(self._kept(request).response)
        if not response["background"]:
            raise bad_request(
                "Cannot cancel a synchronous response. It was not made with background: true", "background"
            )
        await self._stop(response["id"])
        return Response(self._kept(request).response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """The newest first, unless order=asc; at most `limit` (20), those behind the item `after`."""
        stored = self._kept(request)
        items = msgspec.json.decode(stored.items)[: stored.num_input]
        found = [_input_item(item, place) for place, item in enumerate(items)]
        asked = request.query_params
        order, limit, after = asked.get("order", "desc"), asked.get("limit", "20"), asked.get("after")
        if order not in ("asc", "desc"):
            raise bad_request("order must be asc or desc", "order", "invalid_value")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:4]) <= 100:
            raise bad_request("limit must be from 1 to 100", "limit", "invalid_value")
        if order == "desc":
            found.reverse()
        if after is not None:
            places = [place for place, item in enumerate(found) if item["id"] == after]
            if not places:
                raise bad_request(f"after: the response has no item {after!r:.80}", "after", "invalid_value")
            found = found[places[0] + 1 :]
        page = found[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        more = len(page) < len(found)
        return json_response({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})

    # ---- inside ------------------------------------------------------------------------------------------------

    def _decode(self, token_ids: list[int]) -> str:
        return self._service.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def _earlier(self, request: Request) -> bytes:
        """The items of the response that this one continues; b"": it begins. ApiError 404."""
        body = await self._service.body(request)
        name = None
        if b'"previous_response_id"' in body:
            with contextlib.suppress(
                msgspec.DecodeError, RecursionError, UnicodeError
            ):  # the intake says what is wrong
                name = _previous.decode(body).previous_response_id
        if name is None:
            return b""
        chained = self.store.get(request.scope[CHAIN] + name) if CHAIN in request.scope else None
        return (chained or self._found(name, "previous_response_id")).items

    def _as_it_is(self, stored: Stored) -> bytes:
        """The response; of one that was queued when it was stored, whether its output has begun."""
        response = msgspec.json.decode(stored.response)
        front = self._service.engine.front
        if response["status"] == "queued" and any(
            map(front.has_begun, self._service.in_flight.prompt_ids([response["id"]]))
        ):
            return msgspec.json.encode({**response, "status": "in_progress"})
        return stored.response

    def _kept(self, request: Request) -> Stored:
        name = request.path_params["response_id"]
        if not name.startswith("resp_"):
            raise bad_request(f"{name!r:.80} is no id of a response: those begin with resp_", "response_id")
        return self._found(name, "response_id")

    def _found(self, name: str, field: str) -> Stored:
        stored = self.store.get(name)
        if stored is None:
            code = "previous_response_not_found" if field == "previous_response_id" else "response_not_found"
            message = f"Response with id {name!r:.80} not found: there is none, or it is kept no longer"
            raise ApiError(404, message, param=field, code=code)
        return stored

    async def _begin(self, job: Job, writer: ResponsesWriter, items: list[Json], record: Record) -> Response:
        """Answers at once, or with a stream; a task goes on. ApiError 503 when too many wait."""
        if not self._service.config.max_stored_responses:
            raise bad_request("background needs a server that keeps responses", "background", "unsupported_parameter")
        queued = writer.response("queued")
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        log = EventLog() if job.stream else None
        task = asyncio.create_task(self._run(job, writer, items, record, log, admitted))
        self._running[job.answer_id] = task
        task.add_done_callback(lambda _: self._running.pop(job.answer_id, None))
        await admitted
        return json_response(queued) if log is None else Followed(self._service, log, 0)

    async def _run(
        self,
        job: Job,
        writer: ResponsesWriter,
        items: list[Json],
        outer: Record,
        log: EventLog | None,
        admitted: asyncio.Future[None],
    ) -> None:
        in_flight = self._service.in_flight
        try:
            self._service.require_ready()
            current = in_flight.open(job.request_id, 1)
        except ApiError as refused:
            admitted.set_exception(refused)
            return
        self.store.put(writer.response("queued"), items, running=True)
        if log is not None:
            self._logs[job.answer_id] = log
            log.add(writer.queued())
        admitted.set_result(None)
        record = Record(outer.request_id, outer.method, "/v1/responses (background)", 200, model=job.model)
        record.params, record.num_choices = job.prompts[0].params, 1
        record.prompt_tokens = len(job.prompts[0].token_ids)
        current.answer_id = job.answer_id
        current.prompt_ids = [job.prompts[0].request_id]
        status = "cancelled"
        error: Json | None = None
        try:
            answer = Answer(self._service, job, writer)
            if log is None:
                await answer.gather(record)
            else:
                await answer.tell(record, log.add)
            status = ""
        except asyncio.CancelledError:
            if current.cause == "timeout":
                status, error = "failed", {"code": "server_error", "message": "the request took too long"}
        except (EngineDraining, EngineBusy, EngineFailed, ApiError) as failure:
            status, error = "failed", {"code": "server_error", "message": as_api_error(failure).message}
        finally:
            in_flight.close(current)
            if status:
                response = writer.response(status, error=error)
                self.store.put(response, items)
            if log is not None:
                if status:
                    log.add(writer.gone(response))
                self.store.put_events(job.answer_id, log.end())
                del self._logs[job.answer_id]
            log_request(record)

    async def _stop(self, name: str) -> None:
        task = self._running.get(name)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def _input_item(item: Json, place: int) -> Json:
    """With an id, and a message's text as a part."""
    named = {"id": f"in_{place}", **item}
    content = item.get("content")
    if "role" in item and isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        named["content"] = [{"type": kind, "text": content}]
    if "role" in item:
        named.setdefault("type", "message")
        named.setdefault("status", "completed")
    return named
