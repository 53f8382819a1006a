"""Chat templates, which front/chat/sandbox.py compiles, and other ways to write a conversation.

Semantics follow transformers' `apply_chat_template` (checked against it in tests/engine/test_chat_template.py):
keys whose value is None are dropped from messages, `reasoning`/`thinking`/`reasoning_content` are aliases,
`continue_final_message` cuts everything after the last message's text.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Renderer = Callable[[Mapping[str, Any]], str]  # of variables

_END_MARK = "MOESAIC-END-OF-FINAL-MESSAGE "  # the trailing space shows whether the template trims
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class Conversation(NamedTuple):
    """What is rendered, in JSON's types. arguments: seen by the template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    add_generation_prompt: bool
    arguments: Mapping[str, Any]


class Encoding(ABC):
    """What makes a prompt of a conversation."""

    source = ""  # of a template
    marks: str  # holds what marks the model's formats of calls and of reasoning

    def compile(self) -> None:
        """Before it is first used, where a request is not to wait for that. ValueError, on one line: it does not
        parse."""
        return

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **kwargs: Any,
    ) -> str:
        """The text of the conversation. kwargs are seen by the template (enable_thinking, documents, ...).

        ValueError, on one line: the template refuses the messages, or cannot continue the final one.
        """
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message cannot both be true")
        if not messages:
            raise ValueError("messages must hold at least one message")
        plain = [_plain_message(message) for message in messages]
        if continue_final_message:
            plain[-1] = _marked_end(plain[-1])
        plain_tools = _plain_value(tools, "tools") if tools is not None else None
        text = self._text(Conversation(plain, plain_tools, add_generation_prompt, kwargs))
        return _cut_at_end(text) if continue_final_message else text

    @abstractmethod
    def _text(self, given: Conversation) -> str:
        """ValueError, on one line."""


class ChatTemplate(Encoding):
    """A Jinja template, compiled when it is first used; what no conversation is rendered in never imports jinja2."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """variables: what every rendering sees, e.g. bos_token."""
        self.source = self.marks = source
        self._variables = dict(variables)
        self._compiled: Renderer | None = None

    def compile(self) -> None:
        self._render()

    def _text(self, given: Conversation) -> str:
        variables = {"documents": None, **self._variables, **given.arguments}
        variables.update(messages=given.messages, tools=given.tools, add_generation_prompt=given.add_generation_prompt)
        return self._render()(variables)

    def _render(self) -> Renderer:
        if self._compiled is None:
            self._compiled = importlib.import_module("front.chat.sandbox").compiled(self.source)
        return self._compiled


def _plain_value(value: Any, where: str) -> Any:
    """JSON types only: the sandbox cannot know what methods of other objects do."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {key: _plain_value(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(item, where) for item in value]
    raise ValueError(f"{where} must hold JSON values only, not {type(value).__name__}")


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """With a role, without keys that are null; reasoning under all its names."""
    if not isinstance(message, Mapping):
        raise ValueError(f"messages must hold mappings with a role, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise ValueError("messages: each message needs a role")
    plain = {key: _plain_value(value, "messages") for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _marked_end(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a mark after its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _END_MARK}
    if isinstance(content, list):
        for place in range(len(content) - 1, -1, -1):
            part = content[place]
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                parts = list(content)
                parts[place] = {**part, "text": part["text"] + _END_MARK}
                return {**message, "content": parts}
    raise ValueError("continue_final_message: the last message has no text to continue")


def _cut_at_end(text: str) -> str:
    """Without what follows the mark."""
    at = text.rfind(_END_MARK.strip())
    if at < 0:
        raise ValueError("continue_final_message: the chat template leaves out the last message's text")
    if text.startswith(_END_MARK, at):
        return text[:at]
    return text[:at].rstrip()  # the template trims messages, so the end of this one is trimmed too
