"""Answers that are written as they come, and not made of a type: as far as /openapi.json describes them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Json = dict[str, Any]


class ResponseObject(msgspec.Struct, kw_only=True):
    """Of /v1/responses; items of the output are OpenAI's."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[Json]
    usage: Json | None
    error: Json | None
    incomplete_details: Json | None
    previous_response_id: str | None
    metadata: Json


class MessageObject(msgspec.Struct, kw_only=True):
    """Of /v1/messages; blocks of the content are Anthropic's."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Json


class MessagesModel(msgspec.Struct, kw_only=True):
    """A model as Anthropic's clients read it. created_at: RFC 3339. Limits are in tokens."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class MessagesModelList(msgspec.Struct, kw_only=True):
    """All of them are on one page."""

    data: list[MessagesModel]
    has_more: bool = False
    first_id: str
    last_id: str


class Counted(msgspec.Struct, kw_only=True):
    input_tokens: int


class InputItems(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LoadReport(msgspec.Struct, kw_only=True):
    server_load: int
    kv_cache_usage_perc: float
    num_requests_waiting: float
    num_requests_running: float


class VersionReport(msgspec.Struct, kw_only=True):
    version: str


class StateReport(msgspec.Struct, kw_only=True):
    status: str
