"""The chat encoding of DeepSeek-V3.2, whose checkpoints have no Jinja template: what its model card describes, and the
fixed text about tools that the model was trained with.

A turn of the user ends with the tag of the assistant and <think> or </think>: with `thinking` (or `enable_thinking`)
among the template's arguments the model reasons first. Reasoning of earlier turns is left out; that of the turn at
hand, between calls of tools, is kept. Tool calls are DSML: one invoke for each call, one parameter for each argument,
strings as they are and all else as JSON; results come back together, in the order of the calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from front.chat_template import check_conversation, cut_at_end, marked_end, plain_message, plain_value

ENCODED_ARCHITECTURE = "DeepseekV32ForCausalLM"
_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_THINK, _THOUGHT, _DSML = "<think>", "</think>", "｜DSML｜"
_TOOLS = """## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<D function_calls>" block like the following as part of your reply to the user:
<D function_calls>
<D invoke name="$FUNCTION_NAME">
<D parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</D parameter>
...
</D invoke>
<D invoke name="$FUNCTION_NAME2">
...
</D invoke>
</D function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<D function_calls>
...
</D function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
""".replace("D ", _DSML)


class DeepseekV32Encoding:
    """Renders like a front.chat_template.ChatTemplate."""

    source = ""
    marks = f"<{_DSML}function_calls>{_THINK}{_THOUGHT}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **kwargs: Any,
    ) -> str:
        """The text of the conversation. ValueError, on one line, for messages that the encoding has no place for."""
        check_conversation(messages, add_generation_prompt, continue_final_message)
        plain = [plain_message(message) for message in messages]
        if continue_final_message:
            plain[-1] = marked_end(plain[-1])
        thinking = bool(kwargs.get("thinking", kwargs.get("enable_thinking", False)))
        schemas = plain_value(tools, "tools") or []
        if schemas and plain[0]["role"] != "system":
            plain.insert(0, {"role": "system", "content": ""})
        last_user = max([i for i, message in enumerate(plain) if message["role"] in ("user", "developer")], default=-1)
        parts = [_BEGIN]
        for index in range(len(plain)):
            now = index >= last_user and thinking
            opens = add_generation_prompt or index + 1 < len(plain) or continue_final_message
            parts.append(_message(plain, index, schemas if index == 0 else [], now, opens))
        text = "".join(parts)
        return cut_at_end(text) if continue_final_message else text


def _message(messages: Sequence[dict[str, Any]], index: int, tools: Sequence[Any], thinking: bool, opens: bool) -> str:
    """thinking: the assistant reasons in this turn. opens: the assistant's part follows."""
    message = messages[index]
    role, content = message["role"], _text_of(message)
    if role == "system":
        return f"{content}\n\n{_about(tools)}" if tools else content
    if role in ("user", "developer"):
        asked = content if role == "user" else f"\n\n# The user's message is: {content}"
        return f"{_USER}{asked}" + (_ASSISTANT + (_THINK if thinking else _THOUGHT) if opens else "")
    if role == "assistant":
        reasoning = f"{message.get('reasoning_content', '')}{_THOUGHT}" if thinking else ""
        return f"{reasoning}{content}{_calls(message.get('tool_calls') or [])}{_END}"
    if role == "tool":
        return _result(messages, index, content, thinking, opens)
    raise ValueError(f"messages: role {role!r} is unknown to DeepSeek-V3.2; it must be system, user, assistant or tool")


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError("messages: content must be text, or a list of parts of type text")
    return "".join(part["text"] for part in parts)


def _about(tools: Sequence[Any]) -> str:
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
    if not all(isinstance(function, dict) for function in functions):
        raise ValueError("tools: each needs a function")
    schemas = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return f"{_TOOLS}{schemas}\n</functions>\n"


def _calls(calls: Sequence[Any]) -> str:
    if not calls:
        return ""
    invokes = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("messages: each of tool_calls needs a function with a name")
        lines = "\n".join(
            f'<{_DSML}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</{_DSML}parameter>"
            for key, value in _arguments(function).items()
        )
        invokes.append(f'<{_DSML}invoke name="{function["name"]}">\n{lines}\n</{_DSML}invoke>')
    return f"\n\n<{_DSML}function_calls>\n" + "\n".join(invokes) + f"\n</{_DSML}function_calls>"


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("arguments", {})
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"messages: arguments of the call of {function['name']}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"messages: arguments of the call of {function['name']}: a JSON object is expected")
    return found


def _result(messages: Sequence[dict[str, Any]], index: int, content: str, thinking: bool, opens: bool) -> str:
    """Results of one message's calls stand together; the assistant goes on behind the last of them."""
    asking = index - 1
    while asking >= 0 and messages[asking]["role"] == "tool":
        asking -= 1
    calls = (
        (messages[asking].get("tool_calls") or []) if asking >= 0 and messages[asking]["role"] == "assistant" else []
    )
    order = index - asking
    if order > len(calls):
        raise ValueError("messages: a result of a tool must follow the assistant's message that called it")
    first = "\n\n<function_results>" if order == 1 else ""
    last = "\n</function_results>" if order == len(calls) else ""
    follows = f"\n\n{_THINK if thinking else _THOUGHT}" if last and opens else ""
    return f"{first}\n<result>{content}</result>{last}{follows}"
