"""What a request to /v1/responses is as a chat request (docs/apis.md). Source: OpenAI's API reference.

An answer's reasoning comes back in the next request, as text or, where a client keeps no more than that, as
`encrypted_content`, which here is that text in base64.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from server.api.openai import ChatRequest, GenerationRequest
from server.errors import bad_request

SEALED = "moesaic:"  # encrypted_content of ours begins so
Json = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
CHAT_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
_CUSTOM_PARAMETER = "input"
_SUM_UP = (
    "Sum up the conversation so far for an assistant who will go on with it and sees nothing else of it. Keep what was "
    "asked, decided and found out, names, numbers and files as they were written, and what is still to be done. Answer "
    "with the summary only."
)
_SUMMARY_TOKENS = 2048


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: Json | None = None
    verbosity: str | None = None


class ResponsesRequest(GenerationRequest, kw_only=True):
    """input: a text or items. What GenerationRequest has beyond OpenAI's fields is taken too."""

    input: str | list[Json] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: Json | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    generate: bool | None = None  # over WebSockets, false: the prompt is computed, and nothing is said
    enable_response_messages: bool | None = None  # vLLM's: what the model read and wrote is in the response
    # Refused: they name what only OpenAI keeps.
    conversation: Any = None
    prompt: Any = None

    @property
    def custom_names(self) -> frozenset[str]:
        """Of tools whose input is a text."""
        return frozenset(str(tool.get("name")) for tool in self.tools or () if tool.get("type") == "custom")

    @property
    def forced_custom(self) -> str | None:
        """The custom tool with a grammar that must be called: the whole output is its input."""
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "custom":
            return None
        return next((str(tool["name"]) for tool in self.tools or () if _grammar_of(tool, choice.get("name"))), None)

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def wants_sealed(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())


def to_chat(body: ResponsesRequest, earlier: Sequence[Json]) -> tuple[ChatRequest, list[Json]]:
    """And the items of the conversation so far. earlier: those of the response that this one continues. ApiError
    400."""
    _check(body)
    given = body.input or []
    if not given and not earlier and (body.generate is not False or not body.instructions):
        raise bad_request("input must not be empty", "input", "invalid_value")
    items = [*earlier, *([_user(given)] if isinstance(given, str) else given)]
    fields: Json = {
        "messages": _messages(items or [_user("")], body.instructions, len(earlier)),
        "max_completion_tokens": body.max_output_tokens,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "logprobs": body.wants_logprobs or None,
        "top_logprobs": (body.top_logprobs or 0) if body.wants_logprobs else None,
        **_tools(body),
        **_format(body),
    }
    try:
        chat = msgspec.convert({name: value for name, value in fields.items() if value is not None}, ChatRequest)
    except msgspec.ValidationError as error:
        raise bad_request(str(error), None, "invalid_value") from None
    for name in GenerationRequest.__struct_fields__:
        value = getattr(body, name)
        if value is not None and name not in fields:
            setattr(chat, name, value)
    return chat, items


def compacting(body: ResponsesRequest, has_earlier: bool) -> ResponsesRequest:
    """The request that sums up what this one holds. has_earlier: it continues a response. ApiError 400."""
    if not body.model:
        raise bad_request("model is missing", "model", "invalid_value")
    if not body.input and not has_earlier:
        raise bad_request("input must not be empty", "input", "invalid_value")
    if body.stream or body.background:
        field = "stream" if body.stream else "background"
        raise bad_request(f"a compaction cannot be had with {field}", field, "unsupported_parameter")
    given = body.input or []
    items = [_user(given)] if isinstance(given, str) else given
    tokens = body.max_output_tokens or _SUMMARY_TOKENS
    return msgspec.structs.replace(
        body, input=[*items, _user(_SUM_UP)], tools=None, tool_choice=None, text=None, max_output_tokens=tokens
    )


def _user(text: str) -> Json:
    return {"type": "message", "role": "user", "content": text}


def _check(body: ResponsesRequest) -> None:
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
    if body.n is not None and body.n != 1:
        raise bad_request("n must be 1", "n", "invalid_value")
    if body.background and body.store is False:
        raise bad_request("background can only be used when `store` is true", "background", "invalid_value")


# ---- items --------------------------------------------------------------------------------------------------------


def _messages(items: Sequence[Json], instructions: str | None, num_earlier: int) -> list[Json]:
    """What systems and developers say first becomes one message, as many templates take no more."""
    kept = (item for item in items if isinstance(item.get("id"), str) and item.get("type") != "item_reference")
    known = {item["id"]: item for item in kept}
    messages: list[Json] = []
    for index, item in enumerate(items):
        where = f"input[{index - num_earlier}]"
        if item.get("type") == "item_reference":
            found = known.get(item.get("id"))
            if found is None:
                raise bad_request(f"{where}: the item {item.get('id')!r:.80} is not stored", where, "invalid_value")
            item = found
        if num_earlier and str(item.get("type")).endswith("_call_output"):
            _check_called(item, items[:index], where)
        _add(messages, item, where)
    first = [instructions] if instructions else []
    while messages and messages[0]["role"] in ("system", "developer"):
        first.append(messages.pop(0)["content"])
    if not messages and first:
        raise bad_request("input holds no message but instructions", "input", "invalid_value")
    return [{"role": "system", "content": "\n\n".join(first)}, *messages] if first else messages


def _check_called(output: Json, items: Sequence[Json], where: str) -> None:
    """ApiError 400 where no call before it is this output's."""
    name = output.get("call_id")
    if not any(item.get("call_id") == name and str(item.get("type")).endswith("_call") for item in items):
        field = f"{where}.call_id"
        raise bad_request(f"{field}: the conversation has no call {name!r:.80}", field, "invalid_value")


def _add(messages: list[Json], item: Json, where: str) -> None:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role, text = _named(item, "role", where), text_of(item.get("content"), f"{where}.content")
        if role != "assistant":
            messages.append({"role": role, "content": text})
        elif messages and messages[-1].get("reasoning") and not messages[-1]["content"] and _calls(messages) == 0:
            messages[-1]["content"] = text
        else:
            messages.append({"role": "assistant", "content": text})
    elif kind == "reasoning":
        text = _reasoning(item, where)
        if text:
            messages.append({"role": "assistant", "content": "", "reasoning": text})
    elif kind == "compaction":
        messages.append(
            {"role": "system", "content": f"The conversation so far, summed up:\n\n{_summary(item, where)}"}
        )
    elif kind == "function_call":
        _call(messages, item, _arguments(item, f"{where}.arguments"), where)
    elif kind == "custom_tool_call":
        _call(messages, item, _encoded({_CUSTOM_PARAMETER: item.get("input") or ""}), where)
    elif isinstance(kind, str) and kind.endswith("_call_output"):
        output = item.get("output")
        text = output if isinstance(output, str) else text_of(output, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _named(item, "call_id", where), "content": text})
    elif isinstance(kind, str) and kind.endswith("_call") and item.get("call_id"):
        rest = {name: value for name, value in item.items() if name not in ("type", "id", "call_id", "status")}
        _call(messages, {**item, "name": kind.removesuffix("_call")}, _encoded(rest), where)
    else:
        field, said = f"{where}.type", "is missing" if kind is None else f"{kind!r:.40} is not supported"
        raise bad_request(f"{field}: {said}", field, "invalid_value")


def _named(item: Json, name: str, where: str) -> str:
    field, value = f"{where}.{name}", item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{field} {'is missing' if value is None else 'must be a text'}", field, "invalid_value")
    return value


def _calls(messages: list[Json]) -> int:
    return len(messages[-1].get("tool_calls", ()))


def _call(messages: list[Json], item: Json, arguments: str, where: str) -> None:
    if not isinstance(item.get("name"), str) or not isinstance(item.get("call_id"), str):
        raise bad_request(f"{where} needs name and call_id", where, "invalid_value")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item["name"], "arguments": arguments}
    messages[-1].setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _arguments(item: Json, where: str) -> str:
    given = item.get("arguments") or "{}"
    try:
        msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.DecodeError, TypeError, RecursionError):
        raise bad_request(f"{where} must be a JSON object, as a text", where, "invalid_value") from None
    return str(given)


def _reasoning(item: Json, where: str) -> str:
    for field in ("content", "summary"):
        if item.get(field):
            return text_of(item[field], f"{where}.{field}")
    return opened(item.get("encrypted_content"))


def _summary(item: Json, where: str) -> str:
    text = item.get("encrypted_content")
    if not isinstance(text, str) or not text.startswith(SEALED):
        field = f"{where}.encrypted_content"
        raise bad_request(f"{field} was not made by this server: it cannot be read", field, "invalid_value")
    return opened(text)


def text_of(content: object, where: str) -> str:
    """Of a text or of parts that are texts; they are joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a text or a list of parts", where, "invalid_value")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            field = f"{where}[{place}].type"
            raise bad_request(f"{field}: {kind!r:.40} is not supported, only text is", field, "invalid_value")
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            field = f"{where}[{place}].{name}"
            raise bad_request(f"{field} must be a text", field, "invalid_value")
        texts.append(part[name])
    return "\n".join(texts)


def sealed(text: str) -> str:
    return SEALED + base64.b64encode(text.encode()).decode()


def opened(given: object) -> str:
    """ "" for what is not ours."""
    if not isinstance(given, str) or not given.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(given.removeprefix(SEALED), validate=True).decode()
    except ValueError:
        return ""


def _encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


# ---- tools and formats --------------------------------------------------------------------------------------------


def _grammar_of(tool: Json, name: object) -> Json | None:
    form = tool.get("format")
    named = tool.get("type") == "custom" and tool.get("name") == name
    return form if named and isinstance(form, dict) and form.get("type") == "grammar" else None


def _tools(body: ResponsesRequest) -> Json:
    """The chat request's fields. Tools that OpenAI runs itself are left out: nothing here can run them."""
    tools = [tool for index, given in enumerate(body.tools or ()) if (tool := _tool(given, f"tools[{index}]"))]
    choice = body.tool_choice
    fields: Json = {}
    if isinstance(choice, dict):
        kind, name = choice.get("type"), choice.get("name")
        if kind == "allowed_tools":
            choice = {"type": kind, "mode": choice.get("mode"), "tools": choice.get("tools")}
        elif kind in ("function", "custom"):
            if not any(tool["function"]["name"] == name for tool in tools):
                raise bad_request(f"tool_choice: no tool is named {name!r:.80}", "tool_choice", "invalid_value")
            grammar = next((form for tool in body.tools or () if (form := _grammar_of(tool, name))), None)
            choice = {"type": "function", "function": {"name": name}}
            if grammar is not None:
                key = "regex" if grammar.get("syntax") == "regex" else "grammar"
                fields["structured_outputs"] = {key: grammar.get("definition")}
                choice = "none"
        else:
            raise bad_request(f"tool_choice: {kind!r:.40} is not supported", "tool_choice", "unsupported_parameter")
    if not tools:
        if choice not in (None, "auto", "none"):
            message = "tool_choice needs tools of type function or custom"
            raise bad_request(message, "tool_choice", "invalid_value")
        return {}
    return {**fields, "tools": tools, "tool_choice": choice, "parallel_tool_calls": body.parallel_tool_calls}


def _tool(given: Json, where: str) -> Json | None:
    kind, name = given.get("type"), given.get("name")
    if kind not in ("function", "custom"):
        return None
    if not isinstance(name, str):
        raise bad_request(f"{where}.name is missing", f"{where}.name", "invalid_value")
    if not isinstance(given.get("description"), str | None):
        raise bad_request(f"{where}.description must be a text", f"{where}.description", "invalid_value")
    function = {
        key: given[key] for key in ("name", "description", "parameters", "strict") if given.get(key) is not None
    }
    if kind == "custom":
        value: Json = {"type": "string"}
        grammar = _grammar_of(given, name)
        if grammar is not None:
            described = f"The input follows this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}"
            function["description"] = "\n\n".join(filter(None, (function.get("description"), described)))
        function["parameters"] = {"type": "object", "properties": {_CUSTOM_PARAMETER: value}, "required": ["input"]}
    return {"type": "function", "function": function}


def custom_input(arguments: str) -> str:
    """The text that a custom tool gets, from the arguments that the model wrote; as they are where these were cut."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = value.get(_CUSTOM_PARAMETER) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _format(body: ResponsesRequest) -> Json:
    form: Mapping[str, Any] | None = body.text.format if body.text else None
    if form is None or form.get("type") == "text":
        return {}
    if form.get("type") != "json_schema":
        return {"response_format": dict(form)}
    if not isinstance(form.get("schema"), dict | bool):
        field = "text.format.schema"
        raise bad_request(f"{field} must be a JSON schema, which is an object", field, "invalid_value")
    inner = {key: form[key] for key in ("name", "description", "schema", "strict") if form.get(key) is not None}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}
