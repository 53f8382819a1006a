"""The messages of a chat request, as text for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from front.text.tokenizer import Tokenizer
from server.api.openai import ChatMessage, ChatRequest, ContentPart, Prediction, TokenizeRequest, ToolCall
from server.api.params import either
from server.errors import bad_request

# A request may not set these through chat_template_kwargs: they have fields of their own.
RESERVED = frozenset({"self", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"})


def template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """chat_template_kwargs, and what documents and reasoning_effort mean to templates that know them."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        kwargs.setdefault("documents", body.documents)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    return kwargs


def chat_of(body: TokenizeRequest) -> ChatRequest:
    """The chat request whose prompt is counted."""
    return ChatRequest(
        messages=body.messages or [],
        tools=body.tools,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
    )


def render_messages(
    tokenizer: Tokenizer,
    chat_template: str | None,
    messages: Sequence[ChatMessage],
    *,
    content_parts: bool,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The prompt's text. ApiError 400. chat_template: replaces the model's. content_parts: as `message_dict`.
    add_generation_prompt: true unless said otherwise or the last message goes on."""
    goes_on = either(continue_final_message, False)
    if goes_on and add_generation_prompt:
        field = "continue_final_message"
        raise bad_request("continue_final_message and add_generation_prompt cannot both be true", field)
    reserved = RESERVED & kwargs.keys()
    if reserved:
        field = "chat_template_kwargs"
        raise bad_request(f"chat_template_kwargs may not hold {', '.join(sorted(reserved))}", field)
    plain = [message_dict(message, index, content_parts) for index, message in enumerate(messages)]
    try:
        return tokenizer.apply_chat_template(
            plain,
            add_generation_prompt=either(add_generation_prompt, not goes_on),
            continue_final_message=goes_on,
            chat_template=chat_template,
            tools=list(tools) or None,
            **kwargs,
        )
    except (ValueError, TypeError) as error:
        raise bad_request(f"messages: {error}", "messages", "invalid_value") from None


def message_dict(message: ChatMessage, index: int, content_parts: bool = False) -> dict[str, Any]:
    """As chat templates want it: content is a text, or a list of parts as the API has it (content_parts); absent fields
    are absent, arguments of tool calls are objects."""
    if not message.role:
        raise bad_request(f"messages[{index}].role must not be empty", f"messages[{index}].role", "invalid_value")
    role = "system" if message.role == "developer" else message.role
    texts = texts_of(message, index)
    content: object = "\n".join(texts)
    if content_parts:
        content = [{"type": "text", "text": text} for text in texts]
    result: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call, index, place) for place, call in enumerate(message.tool_calls)]
    reasoning = either(message.reasoning, message.reasoning_content)
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    return result


def text_of(message: ChatMessage, index: int) -> str:
    """Parts are joined by line breaks, as vLLM does."""
    return "\n".join(texts_of(message, index))


def texts_of(message: ChatMessage, index: int) -> list[str]:
    """Of its parts. Only an assistant that calls tools may have no content."""
    content = message.content
    where = f"messages[{index}].content"
    if content is None and message.role != "assistant":
        raise bad_request(f"{where} is missing", where, "invalid_value")
    return [content] if isinstance(content, str) else _texts(content or (), where)


def conversation_cuts(messages: Sequence[ChatMessage]) -> list[int]:
    """How many messages behind the instructions may be left out: none, or all before a user's."""
    begin = _num_instructions(messages)
    places = range(begin + 1, len(messages))
    return [0, *(place - begin for place in places if messages[place].role == "user")]


def without(messages: Sequence[ChatMessage], count: int) -> list[ChatMessage]:
    """Without the first `count` behind the instructions."""
    begin = _num_instructions(messages)
    return [*messages[:begin], *messages[begin + count :]]


def _num_instructions(messages: Sequence[ChatMessage]) -> int:
    roles = [message.role in ("system", "developer") for message in messages]
    return roles.index(False) if False in roles else len(roles)


def predicted_text(prediction: Prediction) -> str:
    content = prediction.content
    return content if isinstance(content, str) else "\n".join(_texts(content, "prediction.content"))


def _texts(content: Sequence[ContentPart | str], where: str) -> list[str]:
    texts = []
    for place, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            field = f"{where}[{place}].type"
            raise bad_request(f"{field}: {part.type[:40]!r} is not supported, only text is", field, "invalid_value")
        name = "refusal" if part.type == "refusal" else "text"
        text: str | None = getattr(part, name)
        if text is None:
            field = f"{where}[{place}].{name}"
            raise bad_request(f"{field} is missing", field, "invalid_value")
        texts.append(text)
    return texts


def _tool_call(call: ToolCall, index: int, place: int) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            field = f"messages[{index}].tool_calls[{place}].function.arguments"
            raise bad_request(f"{field} must be a JSON object", field, "invalid_value") from None
    function = {"name": call.function.name, "arguments": arguments or {}}
    return {"id": call.id, "type": call.type or "function", "function": function}
