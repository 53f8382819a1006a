"""What the chat encodings of DeepSeek-V3.2 and V4 have in common: their tags, and DSML, in which tools are called: one
invoke for each call, one parameter for each argument, strings as they are and all else as JSON.

A turn of the user ends with the tag of the assistant and <think> or </think>: with `thinking` (or `enable_thinking`)
among the template's arguments the model reasons first.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from front.text.chat_template import Conversation, Encoding

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, THOUGHT, DSML = "<think>", "</think>", "｜DSML｜"


class DsmlEncoding(Encoding):
    """Of a model whose checkpoints have no Jinja template."""

    def _text(self, given: Conversation) -> str:
        functions, messages, arguments = _functions_of(given.tools or []), given.messages, given.arguments
        if functions and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": ""}, *messages]
        thinking = bool(arguments.get("thinking", arguments.get("enable_thinking", False)))
        effort = arguments.get("reasoning_effort")
        return BEGIN + self._turns(messages, functions, thinking, given.add_generation_prompt, effort)

    @abstractmethod
    def _turns(
        self, messages: list[dict[str, Any]], functions: list[Any], thinking: bool, goes_on: bool, effort: object
    ) -> str:
        """functions: what the first message, a system, tells of. goes_on: the assistant's part follows. ValueError."""


def text_of(message: Mapping[str, Any]) -> str:
    """ValueError where its content is not text."""
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError("messages: content must be text, or a list of parts of type text")
    return "".join(part["text"] for part in parts)


def _functions_of(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """ValueError where a tool is no function."""
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
    found = [function for function in functions if isinstance(function, dict)]
    if len(found) < len(functions):
        raise ValueError("tools: each needs a function")
    return found


def schemas(functions: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)


def calls(given: Sequence[Any], block: str) -> str:
    """A block of calls; "": there are none. ValueError where one is no call."""
    if not given:
        return ""
    invokes = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("messages: each of tool_calls needs a function with a name")
        lines = "\n".join(
            f'<{DSML}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</{DSML}parameter>"
            for key, value in _arguments(function).items()
        )
        invokes.append(f'<{DSML}invoke name="{function["name"]}">\n{lines}\n</{DSML}invoke>')
    return f"\n\n<{DSML}{block}>\n" + "\n".join(invokes) + f"\n</{DSML}{block}>"


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("arguments", {})
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"messages: arguments of the call of {function['name']}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"messages: arguments of the call of {function['name']}: a JSON object is expected")
    return found
