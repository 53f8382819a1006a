"""What /v1/responses answers: output items, made of a choice's events, and the server-sent events that tell of them in
OpenAI's order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from front.chat.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from front.outputs import Delta, PositionLogprobs
from server.api.endpoint import encode
from server.api.generate import Choice, Job, PromptFacts, events_of
from server.api.logprobs import chat_logprobs
from server.api.openai import Usage
from server.api.responses import ResponsesRequest, custom_input, sealed
from server.errors import ApiError
from server.logs import Record

Json = dict[str, Any]


class ResponsesWriter:
    """For one request. decode: tokens to text, special ones too. on_end: gets the whole response, once."""

    def __init__(
        self, job: Job, source: ResponsesRequest, decode: Callable[[list[int]], str], on_end: Callable[[Json], None]
    ) -> None:
        self._job = job
        self._decode = decode
        self._token_ids: list[int] = []
        self._source = source
        self._on_end = on_end
        self._custom = source.custom_names
        self._forced = source.forced_custom
        self._serial = 0
        self._begun = self._runs = False
        self._frames: list[bytes] = []
        self._items: list[Json] = []
        self._open: Json | None = None  # the last of them, while it grows
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[Any] = []
        self._delta_head = b""
        self._reason = "stop"

    # ---- streamed ----------------------------------------------------------------------------------------------

    def queued(self) -> bytes:
        """The first events of a response that waits in the background: its client learns its id at once."""
        self._begun = True
        for name in ("created", "queued"):
            self._say(f"response.{name}", response=self.response("queued"))
        return self._told()

    def frames(self, deltas: list[Delta], record: Record) -> bytes:
        if not self._begun:
            self._begun = True
            self._say("response.created", response=self.response("in_progress"))
        if not self._runs:
            self._runs = True
            self._say("response.in_progress", response=self.response("in_progress"))
        for delta in deltas:
            self._token_ids += delta.token_ids
            self._take(events_of(delta), delta.logprobs)
            if delta.finish_reason is not None:
                self._finish(delta.finish_reason)
        return self._told()

    def _told(self) -> bytes:
        frames = b"".join(self._frames)
        self._frames.clear()
        return frames

    def end(self, total: Usage, record: Record) -> bytes:
        response = self._ended(total)
        self._say(f"response.{response['status']}", response=response)
        return self._frames.pop()

    def failed(self, error: ApiError) -> bytes:
        """The last words of an answer that has begun."""
        response = self.response("failed", error={"code": "server_error", "message": error.message})
        self._on_end(response)
        return self.gone(response)

    def gone(self, response: Json) -> bytes:
        """The event that says that it will not be completed: it has failed or was cancelled."""
        self._say("response.failed", response=response)
        return self._frames.pop()

    # ---- whole -------------------------------------------------------------------------------------------------

    def whole(self, choices: list[Choice], prompts: list[PromptFacts], total: Usage) -> Json:
        (choice,) = choices
        self._token_ids = choice.token_ids
        for events, logprobs in choice.steps:
            self._take(events, logprobs)
        self._finish(choice.finish_reason or "stop")
        self._frames.clear()
        return self._ended(total)

    # ---- items -------------------------------------------------------------------------------------------------

    def _take(self, events: list[Event], logprobs: list[PositionLogprobs] | None) -> None:
        """logprobs: of the tokens that these events came from; they are shown with content."""
        if logprobs and self._job.logprobs and any(isinstance(event, Content) for event in events):
            self._logprobs += chat_logprobs(logprobs, self._job.tokens_as_ids).content
        for event in events:
            if isinstance(event, Content):
                if self._forced is not None:
                    self._forced_text(event.text)
                else:
                    self._text("message", event.text)
            elif isinstance(event, Reasoning):
                self._text("reasoning", event.text)
            elif isinstance(event, CallBegin):
                self._close("completed")
                self._begin_call(event.id, event.name, event.name in self._custom)
            elif isinstance(event, CallArguments):
                self._arguments(event.text)
            elif isinstance(event, CallEnd):
                self._close("completed" if event.complete else "incomplete")

    def _text(self, kind: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            if text.isspace() and self._items:
                return  # line breaks between items
            self._close("completed")
            if kind == "message":
                item: Json = {"id": self._name("msg"), "type": "message", "role": "assistant"}
                part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                self._begin({**item, "status": "in_progress", "content": []})
            else:
                part = {"type": "reasoning_text", "text": ""}
                self._begin({"id": self._name("rs"), "type": kind, "status": "in_progress", "summary": []})
            self._say("response.content_part.added", **self._place, content_index=0, part=part)
            name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
            fields = {"type": name, **self._place, "content_index": 0}
            self._delta_head = b'event: %b\ndata: %b,"delta":' % (name.encode(), encode(fields)[:-1])
        self._texts.append(text)
        shown = b""
        if kind == "message":
            shown = b',"logprobs":%b' % (encode(self._logprobs) if self._logprobs else b"[]")
            if self._logprobs and self._open is not None:
                self._open.setdefault("logprobs", []).extend(self._logprobs)
                self._logprobs = []
        self._frames.append(b'%b%b%b,"sequence_number":%d}\n\n' % (self._delta_head, encode(text), shown, self._next()))

    def _forced_text(self, text: str) -> None:
        if self._open is None:
            assert self._forced is not None
            self._begin_call(self._name("call"), self._forced, custom=True)
        self._texts.append(text)

    def _begin_call(self, call_id: str, name: str, custom: bool) -> None:
        kind, field = ("custom_tool_call", "input") if custom else ("function_call", "arguments")
        item = {"id": self._name("ctc" if custom else "fc"), "type": kind, "call_id": call_id, "name": name, field: ""}
        self._begin(item | {"status": "in_progress"})

    def _arguments(self, text: str) -> None:
        self._texts.append(text)
        if self._open is not None and self._open["type"] == "function_call":
            self._say("response.function_call_arguments.delta", **self._place, delta=text)

    def _begin(self, item: Json) -> None:
        self._items.append(item)
        self._open = item
        self._texts = []
        self._say("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        text, kind = "".join(self._texts), item["type"]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        item["status"] = status
        if kind == "message":
            logprobs = item.pop("logprobs", [])
            part: Json = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
            self._say("response.output_text.done", **place, content_index=0, text=text, logprobs=logprobs)
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": text}
            self._say("response.reasoning_text.done", **place, content_index=0, text=text)
            if self._source.wants_sealed:
                item["encrypted_content"] = sealed(text)
        elif kind == "function_call":
            item["arguments"] = text
            self._say("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            item["input"] = text if self._forced is not None else custom_input(text)
            self._say("response.custom_tool_call_input.delta", **place, delta=item["input"])
            self._say("response.custom_tool_call_input.done", **place, input=item["input"])
        if kind in ("message", "reasoning"):
            item["content"] = [part]
            self._say("response.content_part.done", **place, content_index=0, part=part)
        self._say("response.output_item.done", output_index=place["output_index"], item=item)

    def _finish(self, reason: str) -> None:
        self._reason = reason
        if not self._items and reason == "stop":
            self._text("message", "")
        self._close("completed" if reason in ("stop", "tool_calls") else "incomplete")

    # ---- the response ------------------------------------------------------------------------------------------

    def _ended(self, total: Usage) -> Json:
        usage = _usage(total)
        if self._reason == "length":
            response = self.response("incomplete", usage, incomplete_details={"reason": "max_output_tokens"})
        elif self._reason == "abort":
            response = self.response("failed", usage, error={"code": "server_error", "message": "aborted"})
        else:
            response = self.response("completed", usage)
        if self._source.enable_response_messages:
            response["input_messages"] = [self._raw(self._job.prompts[0].token_ids)]
            response["output_messages"] = [self._raw(self._token_ids)]
        self._on_end(response)
        return response

    def _raw(self, token_ids: list[int]) -> Json:
        return {"type": "raw_message_tokens", "message": self._decode(token_ids), "tokens": token_ids}

    def response(self, status: str, usage: Json | None = None, **more: Any) -> Json:
        """As it is now."""
        job, source = self._job, self._source
        params = job.prompts[0].params
        reasoning, text = source.reasoning, source.text
        return {
            "id": job.answer_id,
            "object": "response",
            "created_at": job.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": bool(source.background),
            "error": None,
            "incomplete_details": None,
            "instructions": source.instructions,
            "max_output_tokens": source.max_output_tokens,
            "max_tool_calls": source.max_tool_calls,
            "model": job.model,
            "output": list(self._items),
            "parallel_tool_calls": source.parallel_tool_calls is not False,
            "previous_response_id": source.previous_response_id,
            "prompt_cache_key": source.prompt_cache_key,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "safety_identifier": source.safety_identifier,
            "service_tier": "default",
            "store": source.store is not False,
            "temperature": params.temperature,
            "text": {"format": (text.format if text else None) or {"type": "text"}},
            "tool_choice": source.tool_choice or "auto",
            "tools": [_shown(tool) for tool in source.tools or ()],
            "top_logprobs": source.top_logprobs or 0,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "truncation": source.truncation or "disabled",
            "usage": usage,
            "user": source.user,
            "metadata": source.metadata or {},
            **more,
        }

    # ---- events ------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _name(self, kind: str) -> str:
        return f"{kind}_{self._job.answer_id.removeprefix('resp_')}{len(self._items):02x}"

    def _next(self) -> int:
        self._serial += 1
        return self._serial - 1

    def _say(self, name: str, /, **fields: Any) -> None:
        fields = {"type": name, "sequence_number": self._next(), **fields}
        self._frames.append(b"event: %b\ndata: %b\n\n" % (name.encode(), encode(fields)))


class WarmWriter(ResponsesWriter):
    """Of a prompt that is computed and not answered."""

    def _finish(self, reason: str) -> None:
        self._reason = "stop" if reason == "length" else reason


class CompactionWriter(ResponsesWriter):
    """Of an answer that sums the conversation up: the text, sealed, is all that it shows."""

    def whole(self, choices: list[Choice], prompts: list[PromptFacts], total: Usage) -> Json:
        (choice,) = choices
        text = choice.message.content.strip() or choice.message.reasoning  # the latter where the answer was cut
        item = {"id": self._name("cmp"), "type": "compaction", "encrypted_content": sealed(text)}
        return {
            "id": self._job.answer_id,
            "object": "response.compaction",
            "created_at": self._job.created,
            "output": [item],
            "usage": _usage(total),
        }


def _usage(total: Usage) -> Json:
    return {
        "input_tokens": total.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": total.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": total.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": total.reasoning_tokens},
        "total_tokens": total.total_tokens,
    }


def _shown(tool: Json) -> Json:
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}
