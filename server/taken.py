"""What the intake (server/intake.py) makes of a request's body, and the kinds of body that it knows. The process that
takes large bodies sends these back."""

from __future__ import annotations

import array
from typing import Literal

import msgspec

from front.chat.format import OutputFormat
from front.params import StructuredOutputsParams
from server.api.messages import MessagesRequest
from server.api.openai import ChatRequest, CompletionRequest
from server.api.responses import ResponsesRequest
from server.errors import ApiError

GeneratingKind = Literal["completion", "tokens", "chat", "batch", "responses", "compact", "messages"]
Kind = GeneratingKind | Literal["tokenize", "detokenize", "count_tokens", "input_tokens"]


class Prompts(msgspec.Struct, tag=True, kw_only=True):
    """A generating request. One of the two bodies, without its prompt or messages. token_ids: of each prompt, packed
    (`unpack`); None: not made, as no rank serves. texts: what echo shows of each, None: nothing.

    responses, messages: what became this chat request, without its input or messages; items: of the conversation so
    far, as JSON."""

    completion: CompletionRequest | None = None
    chat: ChatRequest | None = None
    responses: ResponsesRequest | None = None
    messages: MessagesRequest | None = None
    items: bytes = b""
    model: str
    token_ids: list[bytes] | None = None
    texts: list[str] | None = None
    format: OutputFormat | None = None
    named_tool: bool = False
    structured_outputs: StructuredOutputsParams | None = None  # that forces calls of tools
    prediction: bytes = b""  # packed too
    ignored: list[str] = []  # fields that are unknown


class Answered(msgspec.Struct, tag=True):
    """The JSON body of the answer."""

    body: bytes


class Refused(msgspec.Struct, tag=True):
    """An ApiError."""

    status: int
    message: str
    param: str | None
    code: str | None

    def error(self) -> ApiError:
        return ApiError(self.status, self.message, param=self.param, code=self.code)


Taken = Prompts | Answered | Refused


def unpack(token_ids: bytes) -> list[int]:
    return array.array("i", token_ids).tolist()


def pack(token_ids: list[int]) -> bytes:
    return array.array("i", token_ids).tobytes()
