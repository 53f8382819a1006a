"""What a request to /v1/messages is as a chat request (docs/apis.md). Source: Anthropic's API reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from server.api.openai import ChatRequest
from server.errors import bad_request

Json = dict[str, Any]
UNSTABLE = "x-anthropic-"  # clients put a line that begins so, and changes, in front of the system text
MIN_BUDGET = 1024
CHAT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}
_SAMPLING = ("temperature", "top_p", "top_k", "stream", "seed", "min_p", "cache_salt", "priority", "ignore_eos")


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Json | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class MessagesRequest(msgspec.Struct, kw_only=True):
    """max_tokens may be absent only where tokens are counted. Fields that mean something to Anthropic's own service
    alone (metadata, cache_control, service_tier, container, mcp_servers, context_management) are not looked at."""

    model: str | None = None
    messages: list[InputMessage]
    max_tokens: int | None = None
    system: str | list[Json] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Json | None = None
    # ours and vLLM's
    seed: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    chat_template_kwargs: Json | None = None


def to_chat(body: MessagesRequest, counts: bool = False) -> ChatRequest:
    """counts: no answer is wanted. ApiError 400."""
    if body.max_tokens is None and not counts:
        raise bad_request("max_tokens is missing", "max_tokens", "invalid_value")
    if not body.messages:
        raise bad_request("messages must not be empty", "messages", "invalid_value")
    messages: list[Json] = []
    system = _system(body.system)
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        _add(messages, message, f"messages[{index}]")
    last = messages[-1]
    prefilled = last["role"] == "assistant" and not last.get("tool_calls") and bool(last["content"])
    kwargs = dict(body.chat_template_kwargs or {})
    kwargs.setdefault("enable_thinking", _thinks(body))
    kwargs.setdefault("thinking", _thinks(body))
    config = body.output_config or OutputConfig()
    form = config.format or body.output_format
    fields: Json = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "continue_final_message": True if prefilled else None,
        "thinking_token_budget": body.thinking.budget_tokens if _thinks(body) and body.thinking else None,
        "chat_template_kwargs": kwargs,
        "response_format": _format(form) if form else None,
        **{name: getattr(body, name) for name in _SAMPLING},
        **_tools(body),
    }
    if config.effort is not None and kwargs["enable_thinking"]:
        kwargs.setdefault("reasoning_effort", config.effort)
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, ChatRequest)
    except msgspec.ValidationError as error:
        raise bad_request(str(error), None, "invalid_value") from None


def _thinks(body: MessagesRequest) -> bool:
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled":
        return False
    budget = thinking.budget_tokens
    if budget is not None and not MIN_BUDGET <= budget < (body.max_tokens or budget + 1):
        message = f"thinking.budget_tokens must be at least {MIN_BUDGET} and below max_tokens, got {budget}"
        raise bad_request(message, "thinking.budget_tokens", "invalid_value")
    if thinking.type == "enabled" and budget is None:
        raise bad_request("thinking.budget_tokens is missing", "thinking.budget_tokens", "invalid_value")
    return True


def _system(given: str | Sequence[Json] | None) -> str:
    """Without what changes with every request: it would keep the prefix out of the cache."""
    if given is None:
        return ""
    if isinstance(given, str):
        first, _, rest = given.partition("\n")
        return rest.lstrip("\n") if first.startswith(UNSTABLE) else given
    texts = [_text(block, f"system[{place}]") for place, block in enumerate(given)]
    return "\n\n".join(text for text in texts if not text.startswith(UNSTABLE))


def _add(messages: list[Json], message: InputMessage, where: str) -> None:
    blocks = message.content
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    if message.role == "assistant":
        messages.append(_assistant(blocks, where))
        return
    if not blocks:
        raise bad_request(f"{where}.content must not be empty", f"{where}.content", "invalid_value")
    texts = []
    for place, block in enumerate(blocks):
        at = f"{where}.content[{place}]"
        if block.get("type") == "tool_result":
            content = block.get("content") or ""
            if not isinstance(block.get("tool_use_id"), str):
                raise bad_request(f"{at}.tool_use_id is missing", f"{at}.tool_use_id", "invalid_value")
            text = content if isinstance(content, str) else _joined(content, f"{at}.content")
            if block.get("is_error"):
                text = f"Error: {text}"
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        else:
            texts.append(_text(block, at))
    if texts:  # a system's in the middle of a conversation is the user's to most templates
        messages.append({"role": "user", "content": "\n".join(texts)})


def _assistant(blocks: Sequence[Json], where: str) -> Json:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        kind, at = block.get("type"), f"{where}.content[{place}]"
        if kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("id"), str):
                raise bad_request(f"{at} needs id and name", at, "invalid_value")
            if not isinstance(block.get("input") or {}, dict):
                raise bad_request(f"{at}.input must be an object", f"{at}.input", "invalid_value")
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text(block, at))
    result: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        result["reasoning"] = "\n".join(thoughts)
    if calls:
        result["tool_calls"] = calls
    return result


def _joined(blocks: object, where: str) -> str:
    if not isinstance(blocks, list):
        raise bad_request(f"{where} must be a text or a list of blocks", where, "invalid_value")
    return "\n".join(_text(block, f"{where}[{place}]") for place, block in enumerate(blocks))


def _text(block: Json, where: str) -> str:
    """Of a block that is text, whatever it is called."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        if not isinstance(block.get("text"), str):
            raise bad_request(f"{where}.text must be a text", f"{where}.text", "invalid_value")
        return str(block["text"])
    if kind == "document" and isinstance(block.get("source"), dict) and block["source"].get("type") == "text":
        return "\n".join(filter(None, (str(block.get("title") or ""), str(block["source"].get("data", "")))))
    if kind == "search_result":
        title = f"{block.get('title', '')} ({block.get('source', '')})"
        return "\n".join([title, _joined(block.get("content"), f"{where}.content")])
    raise bad_request(f"{where}.type: {kind!r:.40} is not supported, only text is", f"{where}.type", "invalid_value")


def _tools(body: MessagesRequest) -> Json:
    tools = []
    for place, tool in enumerate(body.tools or ()):
        where = f"tools[{place}]"
        if tool.get("type") not in (None, "custom"):
            message = f"{where}.type: {tool['type']!r:.40} is not supported, only tools of the client are"
            raise bad_request(message, f"{where}.type", "unsupported_parameter")
        if not isinstance(tool.get("name"), str):
            raise bad_request(f"{where}.name is missing", f"{where}.name", "invalid_value")
        if not isinstance(tool.get("input_schema"), dict):
            field = f"{where}.input_schema"
            raise bad_request(f"{field} must be a JSON schema, which is an object", field, "invalid_value")
        function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
        tools.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    given = body.tool_choice or {"type": "auto"}
    kind = given.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise bad_request(f"tool_choice.type: {kind!r:.40} is not one of auto, any, tool, none", "tool_choice")
    if not tools:
        if kind in ("any", "tool"):
            raise bad_request("tool_choice needs tools", "tool_choice", "invalid_value")
        return {}
    choice: Any = {"auto": "auto", "any": "required", "none": "none"}.get(str(kind))
    if kind == "tool":
        choice = {"type": "function", "function": {"name": given.get("name")}}
    parallel = False if given.get("disable_parallel_tool_use") else None
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}


def _format(form: Json) -> Json:
    if form.get("type") != "json_schema":
        raise bad_request(f"output_config.format: {form.get('type')!r:.40} is not json_schema", "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema"), "strict": True}}
