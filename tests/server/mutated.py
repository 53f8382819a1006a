"""Bodies of every generating route with something wrong in some place: a value of another kind, a name, a lack."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

Json = dict[str, Any]

_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}},
    "required": ["a"],
    "additionalProperties": False,
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 5},
        "b": {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 2},
        "c": {"anyOf": [{"type": "string", "pattern": "^a+$", "maxLength": 4}, {"$ref": "#/$defs/q"}]},
    },
    "required": ["a"],
    "$defs": {"q": {"type": "null"}},
}
_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "a"},
            {
                "type": "or",
                "elements": [{"type": "regex", "pattern": "b"}, {"type": "grammar", "grammar": "start: /a/"}],
            },
            {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": _SCHEMA}, "end": "</f>"}],
                "at_least_one": True,
            },
            {
                "type": "tags_with_separator",
                "tags": [{"begin": "<q>", "content": {"type": "any_text"}, "end": ["</q>"]}],
                "separator": ",",
            },
        ],
    },
}
_USER = {"role": "user", "content": "Hi"}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_FUNCTION = {"name": "f", "description": "d", "strict": True, "parameters": _PARAMETERS}
_ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}

BODIES: list[tuple[str, Json]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
                {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ],
            "max_tokens": 2,
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": _ALLOWED},
            "logprobs": True,
            "top_logprobs": 2,
            "stop": ["q"],
            "logit_bias": {"5": 1},
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [_USER],
            "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}},
            "chat_template_kwargs": {"enable_thinking": True},
            "reasoning_effort": "low",
            "bad_words": ["a"],
            "allowed_token_ids": [1, 2, 3],
            "documents": [{"title": "a", "text": "b"}],
        },
    ),
    ("/v1/chat/completions", {"messages": [_USER], "max_tokens": 2, "response_format": _TAG}),
    (
        "/v1/completions",
        {
            "prompt": ["a", [1, 2]],
            "max_tokens": 2,
            "echo": True,
            "logprobs": 1,
            "structured_outputs": {"json": _SCHEMA, "disable_any_whitespace": True},
            "truncate_prompt_tokens": 5,
        },
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "guided_choice": ["a", "b"], "stream": True}),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]},
                {"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
                {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
                {"type": "local_shell_call", "call_id": "e", "action": {"type": "exec"}},
            ],
            "instructions": "i",
            "max_output_tokens": 2,
            "tools": [{"type": "function", "name": "f", "parameters": _PARAMETERS}, {"type": "web_search"}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/responses",
        {
            "input": "x",
            "max_output_tokens": 2,
            "tools": [
                {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
            ],
            "tool_choice": {"type": "custom", "name": "g"},
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 2,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "title": "t", "source": {"type": "text", "data": "x"}},
                        {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "q"}]},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": "x"}]},
                    ],
                },
            ],
            "tools": [{"name": "f", "input_schema": _PARAMETERS, "strict": True}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "stop_sequences": ["q"],
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
        },
    ),
    ("/v1/messages/count_tokens", {"system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ("/tokenize", {"messages": [_USER], "return_token_strs": True, "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "stop": ["a"]}}),
]  # fmt: skip
_VALUES: list[Any] = [
    None, True, False, 0, -1, 2, 3.5, 1e308, 2**63, -(2**63) - 1, "", "a", " ", "\n", "\x00", "\U0001f600", "{", "[]", "{}",
    "<f", "<tool_call>", "start: /a/", "(", "(?=a)", "a" * 3000, [], [[]], [None], ["a"], [1], [{}], {}, {"a": None},
    {"type": None}, {"type": "text"}, {"type": "text", "text": None}, {"type": "function"}, {"type": []}, {"$ref": "#"},
]  # fmt: skip
_NAMES = ["x", "type", "", "\x00", "a b", "a\r\nset-cookie: b=c", "ü"]


def mutated_bodies(count: int, seed: int) -> Iterator[tuple[str, Json]]:
    """A route and its body, mutated in one place to three."""
    random = Random(seed)
    for number in range(count):
        route, body = BODIES[number % len(BODIES)]
        body = copy.deepcopy(body)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            holder, place = random.choice([*_places(body)])
            _mutate(random, holder, place)
            if not body:
                break
        yield route, body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, inside in pairs:
        yield value, place
        yield from _places(inside)


def _mutate(random: Random, holder: Any, place: Any) -> None:
    way = random.random()
    if way < 0.15:
        del holder[place]
    elif way < 0.25 and isinstance(holder, dict):
        holder[random.choice(_NAMES)] = holder.pop(place)
    elif way < 0.3 and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[place]))
    else:
        holder[place] = copy.deepcopy(random.choice(_VALUES))
