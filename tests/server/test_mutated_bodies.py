"""Whatever a body holds, it is answered: with 200, or with an error of its API that says what is wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from mutated import mutated_bodies
from server_parts import server

from configs.server import ServerConfig

BODIES = 600
PRINTABLE = frozenset(map(chr, range(32, 127)))
CALLS: dict[str, Any] = {"tool_call_parser": "hermes"}


def check(route: str, body: dict[str, Any], answer: httpx.Response) -> None:
    said = f"{route} {json.dumps(body)[:2000]}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code in (200, 400, 404, 413), said
    assert all(set(value) <= PRINTABLE for value in answer.headers.values()), said
    if answer.status_code != 200:
        found = answer.json()
        assert found["error"]["message"] and len(answer.text) < 3000, said
        assert ("type" in found) == route.startswith("/v1/messages"), said
    else:
        assert '"error":{' not in answer.text, said


@pytest.mark.parametrize("seed", range(2))
def test_mutated_bodies_are_answered(seed: int) -> None:
    async def run() -> None:
        async with server(ServerConfig(**CALLS), max_model_len=1024) as s:
            for route, body in mutated_bodies(BODIES // 2, seed):
                check(route, body, await s.post(route, body))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": []}], "max_tokens": 2}, "messages[0].content"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "tool_choice": {"type": "any"}}, "tool_choice"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "modalities": ["text", "audio"]}, "modalities"),
        ("/v1/responses", {"input": "a", "tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "custom", "name": "f", "description": [1], "format": {"type": "grammar"}}]}, "tools[0].description"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 5}}, "tool_choice"),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{bad"}]}, "input[0].arguments"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(route: str, body: dict[str, Any], field: str) -> None:
    async def run() -> None:
        async with server(ServerConfig(**CALLS)) as s:
            answer = await s.post(route, body)
            assert answer.status_code == 400 and field in answer.json()["error"]["message"], answer.text

    asyncio.run(run())


def test_names_of_unknown_fields_are_fit_for_a_header() -> None:
    async def run() -> None:
        async with server() as s:
            answer = await s.post(
                "/v1/completions", {"prompt": "a", "max_tokens": 1, "x\r\nset-cookie: a=b": 1, "\x00ü": 2}
            )
            assert answer.status_code == 200
            assert answer.headers["x-ignored-fields"] == "x??set-cookie: a=b, ??"
            assert "set-cookie" not in answer.headers

    asyncio.run(run())
