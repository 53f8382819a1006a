"""Prompts and conversations in the forms that a caller may give them in, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Given = Mapping[str, Any]  # a prompt in vLLM's form: {"prompt": text}, {"prompt_token_ids": [...]}, or both
Prompts = str | Given | Sequence[str | Given] | Sequence[int] | Sequence[Sequence[int] | Given]
Conversation = Sequence[Mapping[str, Any]]

_PROMPTS = "one text, texts, one list of token ids, lists of token ids, or mappings with prompt or prompt_token_ids"


def read_prompts(prompts: Prompts) -> tuple[list[str | None], list[Sequence[int] | None]]:
    """The text of each prompt that has one, and its token ids where they are given. ValueError."""
    whole: Sequence[object] = [prompts] if isinstance(prompts, str | Mapping) else prompts
    if not _is_list(whole):
        raise ValueError(f"prompts must be {_PROMPTS}, not {type(prompts).__name__}")
    if whole and all(map(_is_token_id, whole)):
        whole = [whole]
    read = list(map(_read, whole))
    return [text for text, _ in read], [ids for _, ids in read]


def read_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation is a list of mappings; several are a list of such lists."""
    single: list[Mapping[str, Any]] = []
    several: list[Conversation] = []
    for item in messages:
        if isinstance(item, Mapping):
            single.append(item)
        else:
            several.append(item)
    if single and several:
        raise ValueError("messages must be one conversation or a list of conversations")
    return [single] if single else several


def parameter_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of the parameters, by name."""
    functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
    found = {
        function["name"]: dict(function.get("parameters") or {})
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }
    if len(found) < len(functions):
        raise ValueError("tools must hold functions, each with a name of its own")
    return found


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(prompt: object) -> tuple[str | None, Sequence[int] | None]:
    """The text of one prompt, if it has one; its token ids, if they are given."""
    text: Any = prompt if isinstance(prompt, str) else None
    token_ids: Any = None if isinstance(prompt, str) else prompt
    if isinstance(prompt, Mapping):
        unknown = [name for name in prompt if name not in ("prompt", "prompt_token_ids")]
        if unknown or not prompt:
            what = f"the unknown field {unknown[0]!r:.100}" if unknown else "neither"
            raise ValueError(f"a prompt has prompt, prompt_token_ids, or both; one has {what}")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    given = _is_list(token_ids) and not isinstance(token_ids, str)
    if not (text is None or isinstance(text, str)) or not (given or (token_ids is None and text is not None)):
        raise ValueError(f"prompts must be {_PROMPTS}; they hold {prompt!r:.100}")
    return text, token_ids
