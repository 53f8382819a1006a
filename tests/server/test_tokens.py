"""Token ids in and out: what /render makes of a request, /inference/v1/generate goes on with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server_parts import server

GENERATE = "/inference/v1/generate"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 6, "n": 2}
COMPLETION: dict[str, Any] = {"prompt": ["Once", "a dog"], "max_tokens": 5, "logit_bias": {"3": 2}, "stop": "zebra"}


def test_what_is_rendered_is_gone_on_with() -> None:
    async def run() -> None:
        async with server() as s:
            rendered = (await s.post("/v1/chat/completions/render", {**CHAT, "temperature": 0.25})).json()
            sent = len(s.ranks.sent)
            assert rendered["request_id"].startswith("chatcmpl-") and rendered["sampling_params"]["temperature"] == 0.25
            whole = (await s.post("/v1/chat/completions", {**CHAT, "return_token_ids": True})).json()
            assert len(s.ranks.sent) > sent and rendered["token_ids"] == whole["prompt_token_ids"]
            again = (await s.post(GENERATE, rendered)).json()
            assert [one["token_ids"] for one in again["choices"]] == [one["token_ids"] for one in whole["choices"]]
            assert again["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]

            bodies = (await s.post("/v1/completions/render", COMPLETION)).json()
            assert len(bodies) == 2 and bodies[0]["request_id"].startswith("cmpl-")
            texts = (await s.post("/v1/completions", {**COMPLETION, "return_token_ids": True})).json()["choices"]
            for body, choice in zip(bodies, texts, strict=True):
                assert body["token_ids"] == choice["prompt_token_ids"]
                [found] = (await s.post(GENERATE, body)).json()["choices"]
                assert (found["token_ids"], found["finish_reason"]) == (choice["token_ids"], choice["finish_reason"])
            message = {"max_tokens": 4, "messages": CHAT["messages"]}
            assert (await s.post("/v1/messages/render", message)).json()["token_ids"] == rendered["token_ids"]

    asyncio.run(run())


def test_streams_and_log_probabilities() -> None:
    async def run() -> None:
        async with server() as s:
            asked: dict[str, Any] = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 4, "logprobs": 2}}
            whole = (await s.post(GENERATE, asked)).json()["choices"][0]
            events = await s.events(GENERATE, **asked, stream_options={"include_usage": True})
            pieces = [event["choices"][0] for event in events if event["choices"]]
            assert [token for piece in pieces for token in piece["token_ids"]] == whole["token_ids"]
            content = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
            assert content == whole["logprobs"]["content"] and pieces[-1]["finish_reason"] == "length"
            assert [entry["token_id"] for entry in content] == whole["token_ids"]
            assert all(entry["top_logprobs"][0]["token_id"] == entry["token_id"] for entry in content)
            assert events[-1]["usage"]["completion_tokens"] == 4

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": [3], "sampling_params": {"beam_width": 3}}, "sampling_params.beam_width"),
        ({"token_ids": [3], "sampling_params": {"grammar": {}}}, "sampling_params.grammar"),
        ({"token_ids": [3], "sampling_params": {"top_p": "x"}}, "sampling_params"),
        ({"token_ids": [3], "sampling_params": {"top_p": 3}}, "top_p"),
        ({"token_ids": [3], "output_mode": "text"}, "output_mode"),
        ({"token_ids": [3], "features": {"mm_hashes": {}}}, "features"),
    ],
)
def test_what_it_refuses(body: dict[str, Any], field: str) -> None:
    async def run() -> None:
        async with server() as s:
            answer = await s.post(GENERATE, body)
            assert answer.status_code == 400, answer.text
            assert field in (answer.json()["error"]["param"] or ""), answer.text

    asyncio.run(run())
