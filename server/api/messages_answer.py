"""POST /v1/messages and /v1/messages/count_tokens: content blocks, made of a choice's events, and the server-sent
events that tell of them in Anthropic's order."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from front.chat.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from front.outputs import Delta
from server.api.chat import chat_job
from server.api.endpoint import encode, take
from server.api.generate import Answer, Choice, Job, PromptFacts, events_of
from server.api.messages import CHAT_NAMES
from server.api.openai import ChatRequest, Usage
from server.errors import ApiError
from server.logs import Record
from server.service import Service
from server.taken import Answered

NAMES = {"prompt": "messages", "stop": "stop_sequences", "structured_outputs": "output_config.format"}
SIGNATURE = "moesaic"  # of thinking; it comes back with it, and is not looked at
Json = dict[str, Any]


class Messages:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: Request) -> Response:
        try:
            taken = await take(self._service, request, "messages", ChatRequest)
            job = chat_job(self._service, taken, f"msg_{uuid.uuid4().hex}", NAMES)
        except ApiError as error:
            raise error.renamed(CHAT_NAMES) from None
        return Answer(self._service, job, MessagesWriter(job))

    async def count_tokens(self, request: Request) -> Response:
        taken = await self._service.take(request, "count_tokens")
        assert isinstance(taken, Answered)
        return Response(taken.body, media_type="application/json")


class MessagesWriter:
    """For one request."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun = False
        self._frames: list[bytes] = []
        self._blocks: list[Json] = []
        self._open: Json | None = None  # the last of them, while it grows
        self._texts: list[str] = []  # of the open block
        self._delta_head = b""
        self._finish_reason = "stop"
        self._stop_reason: int | str | None = None

    # ---- streamed ----------------------------------------------------------------------------------------------

    def frames(self, deltas: list[Delta], record: Record) -> bytes:
        if not self._begun:
            self._begun = True
            self._say("message_start", message=self._message(_usage(record.prompt_tokens, record.cached_tokens, 0)))
        for delta in deltas:
            self._take(events_of(delta))
            if delta.finish_reason is not None:
                self._finish(delta.finish_reason, delta.stop_reason)
        frames = b"".join(self._frames)
        self._frames.clear()
        return frames

    def end(self, total: Usage, record: Record) -> bytes:
        self._say("message_delta", delta=self._end(), usage=_usage_of(total))
        self._say("message_stop")
        return b"".join(self._frames)

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error.body("anthropic")

    # ---- whole -------------------------------------------------------------------------------------------------

    def whole(self, choices: list[Choice], prompts: list[PromptFacts], total: Usage) -> Json:
        (choice,) = choices
        for events, _ in choice.steps:
            self._take(events)
        self._finish(choice.finish_reason or "stop", choice.stop_reason)
        self._frames.clear()
        return self._message(_usage_of(total)) | {"content": self._blocks} | self._end()

    # ---- blocks ------------------------------------------------------------------------------------------------

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self._piece("text", event.text)
            elif isinstance(event, Reasoning):
                self._piece("thinking", event.text)
            elif isinstance(event, CallBegin):
                self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            elif isinstance(event, CallArguments):
                self._texts.append(event.text)
                self._delta(event.text)
            elif isinstance(event, CallEnd):
                self._close()

    def _piece(self, kind: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            if kind == "text" and not text.strip() and self._open is None and self._blocks:
                return  # line breaks between calls
            self._begin({"type": "text", "text": ""} if kind == "text" else {"type": kind, kind: "", "signature": ""})
        self._texts.append(text)
        self._delta(text)

    def _begin(self, block: Json) -> None:
        self._close()
        self._blocks.append(block)
        self._open, self._texts = block, []
        kind, index = block["type"], len(self._blocks) - 1
        self._say("content_block_start", index=index, content_block=block)
        name, field = {
            "text": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[kind]
        head = {"type": "content_block_delta", "index": index, "delta": {"type": name}}
        self._delta_head = b'event: content_block_delta\ndata: %b,"%b":' % (encode(head)[:-2], field.encode())

    def _delta(self, text: str) -> None:
        self._frames.append(b"%b%b}}\n\n" % (self._delta_head, encode(text)))

    def _close(self) -> None:
        block, self._open = self._open, None
        if block is None:
            return
        text, kind, index = "".join(self._texts), block["type"], len(self._blocks) - 1
        if kind == "tool_use":
            block["input"] = _object(text)
        else:
            block[kind] = text
        if kind == "thinking":
            block["signature"] = SIGNATURE
            self._say("content_block_delta", index=index, delta={"type": "signature_delta", "signature": SIGNATURE})
        self._say("content_block_stop", index=index)

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self._close()
        self._finish_reason, self._stop_reason = reason, stop_reason

    # ---- the message -------------------------------------------------------------------------------------------

    def _end(self) -> Json:
        stopped = isinstance(self._stop_reason, str)
        if self._finish_reason in ("length", "abort"):  # no other word says that an answer is cut off
            reason = "max_tokens"
        elif stopped:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if any(block["type"] == "tool_use" for block in self._blocks) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._stop_reason if stopped else None}

    def _message(self, usage: Json) -> Json:
        start = {"id": self._job.answer_id, "type": "message", "role": "assistant", "model": self._job.model}
        return {**start, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _say(self, name: str, **fields: Any) -> None:
        self._frames.append(b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields})))


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Json:
    """Anthropic counts what was cached apart."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def _usage_of(total: Usage) -> Json:
    return _usage(total.prompt_tokens, total.cached_tokens, total.completion_tokens)


def _object(text: str) -> Json:
    """{} where the arguments were cut."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
