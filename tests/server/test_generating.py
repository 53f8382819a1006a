"""/v1/completions and /v1/chat/completions on a fake of the rank side: shapes, streams, usage, logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from server_parts import MODEL, STORY, last_prompt, server, small_tokenizer, story_tokens

from front.messages import AddRequest

MESSAGES = [{"role": "user", "content": "Hello"}]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


def test_a_completion() -> None:
    async def run() -> None:
        async with server() as s:
            body = await s.complete()
            assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
            assert body["model"] == MODEL and isinstance(body["created"], int)
            (choice,) = body["choices"]
            expected = {"index": 0, "text": STORY, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
            assert choice == expected | dict.fromkeys(("token_ids", "prompt_token_ids", "prompt_logprobs"))
            prompt = len(small_tokenizer().encode("Once"))
            output = len(story_tokens())
            assert body["usage"] == {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {
                    "accepted_prediction_tokens": 0,
                    "rejected_prediction_tokens": 0,
                    "reasoning_tokens": 0,
                },
            }
            short = await s.complete(max_tokens=None)
            assert short["usage"]["completion_tokens"] == 16 and short["choices"][0]["finish_reason"] == "length"

    asyncio.run(run())


def test_a_chat_completion() -> None:
    async def run() -> None:
        async with server() as s:
            body = await s.chat()
            assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
            (choice,) = body["choices"]
            assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == STORY
            assert choice["logprobs"] is None and choice["finish_reason"] == "stop"
            sent = next(message for message in s.ranks.sent if isinstance(message, AddRequest))
            assert small_tokenizer().decode(sent.token_ids) == "user: Hello\nassistant:"
            assert sent.params.max_tokens == 256 - len(sent.token_ids)  # the rest of the context
            assert (await s.chat(max_tokens=9, max_completion_tokens=3))["usage"]["completion_tokens"] == 3

    asyncio.run(run())


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_completion_is_the_whole_one(n: int) -> None:
    async def run() -> None:
        async with server() as s:
            events = await s.events("/v1/completions", n=n)
            texts = [""] * n
            for event in events:
                assert event["object"] == "text_completion" and event["id"] == events[0]["id"]
                assert "usage" not in event
                (choice,) = event["choices"]
                assert choice["logprobs"] is None and "finish_reason" in choice
                texts[choice["index"]] += choice["text"]
            assert texts == [STORY] * n
            assert all("\ufffd" not in event["choices"][0]["text"] for event in events)
            reasons = [event["choices"][0]["finish_reason"] for event in events]
            assert reasons[-n:] == ["stop"] * n and not any(reasons[:-n])

    asyncio.run(run())


@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_chat(n: int) -> None:
    async def run() -> None:
        async with server() as s:
            events = await s.events("/v1/chat/completions", n=n)
            texts = [""] * n
            opened: set[int] = set()
            for event in events:
                assert event["object"] == "chat.completion.chunk"
                (choice,) = event["choices"]
                assert {"index", "delta", "logprobs", "finish_reason"} <= choice.keys()
                if choice["index"] not in opened:
                    opened.add(choice["index"])
                    assert choice["delta"] == {"role": "assistant", "content": ""}
                    continue
                assert "role" not in choice["delta"]
                texts[choice["index"]] += choice["delta"].get("content", "")
            assert texts == [STORY] * n
            assert [event["choices"][0]["finish_reason"] for event in events][-n:] == ["stop"] * n

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_streams(path: str) -> None:
    async def run() -> None:
        async with server() as s:
            events = await s.events(path, stream_options={"include_usage": True})
            assert all(event["usage"] is None for event in events[:-1])
            assert events[-1]["choices"] == []
            assert events[-1]["usage"]["completion_tokens"] == len(story_tokens())
            assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
            events = await s.events(path, stream_options={"include_usage": True, "continuous_usage_stats": True})
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts) and counts[-1] == counts[-2] == len(story_tokens())

    asyncio.run(run())


def test_prompts_and_choices_are_prompt_major() -> None:
    async def run() -> None:
        async with server() as s:
            body = await s.complete(prompt=["Once", "upon a"], n=2, max_tokens=3, echo=True)
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
            starts = ["Once", "Once", "upon a", "upon a"]
            story = small_tokenizer().decode(story_tokens()[:3])
            assert [choice["text"] for choice in body["choices"]] == [start + story for start in starts]
            assert body["usage"]["completion_tokens"] == 12
            events = await s.events("/v1/completions", prompt=[[5, 6], [7, 8]], n=2, max_tokens=3)
            last = {event["choices"][0]["index"]: event["choices"][0]["finish_reason"] for event in events}
            assert last == dict.fromkeys(range(4), "length")
            tokens = await s.complete(prompt=[5, 6, 7], max_tokens=1)
            assert tokens["usage"]["prompt_tokens"] == 3

    asyncio.run(run())


def test_completion_logprobs_and_echo() -> None:
    async def run() -> None:
        async with server() as s:
            body = await s.complete(prompt="Once upon", logprobs=3, max_tokens=2, echo=True)
            (choice,) = body["choices"]
            logprobs = choice["logprobs"]
            prompt_ids = small_tokenizer().encode("Once upon")
            total = len(prompt_ids) + 2
            assert {len(values) for values in logprobs.values()} == {total}
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            assert logprobs["token_logprobs"][1:] == [-0.25] * (total - 1)
            for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
                assert token in top and min(top.values()) == -9999.0
            assert "".join(logprobs["tokens"][1:]) == choice["text"]  # the first is BOS
            lengths = [0, *(len(token) for token in logprobs["tokens"][1:])]
            assert logprobs["text_offset"] == [sum(lengths[:place]) for place in range(total)]
            for token, offset in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
                assert choice["text"].startswith(token, offset)

            scored = await s.complete(prompt="Once upon", logprobs=1, max_tokens=0, echo=True)
            assert scored["choices"][0]["text"] == "Once upon"
            assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(prompt_ids)
            assert scored["usage"]["completion_tokens"] == 0

            events = await s.events("/v1/completions", prompt="Once upon", logprobs=3, max_tokens=2, echo=True, n=2)
            for index in (0, 1):
                mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
                assert "".join(part["text"] for part in mine) == choice["text"]
                assert joined(part["logprobs"]["tokens"] for part in mine) == logprobs["tokens"]
                assert joined(part["logprobs"]["text_offset"] for part in mine) == logprobs["text_offset"]

            bare = await s.complete(logprobs=0, max_tokens=2, return_tokens_as_token_ids=True)
            ids = story_tokens()[:2]
            assert bare["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
            assert bare["choices"][0]["logprobs"]["top_logprobs"] == [{f"token_id:{token}": -0.25} for token in ids]

    asyncio.run(run())


def test_chat_logprobs_have_the_tokens_bytes() -> None:
    async def run() -> None:
        async with server() as s:
            body = await s.chat(logprobs=True, top_logprobs=2)
            content = body["choices"][0]["logprobs"]["content"]
            assert len(content) == len(story_tokens()) and body["choices"][0]["logprobs"]["refusal"] is None
            raw = bytes(joined(item["bytes"] for item in content))
            assert raw.decode().removesuffix("<|end|>") == STORY  # also of characters that are several tokens
            assert content[0]["top_logprobs"][0] == {key: content[0][key] for key in ("token", "logprob", "bytes")}
            assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
            plain = await s.chat(logprobs=True, max_tokens=1)
            assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
            events = await s.events("/v1/chat/completions", logprobs=True, top_logprobs=2)
            streamed = [event["choices"][0]["logprobs"] for event in events]
            assert joined(item["content"] for item in streamed if item) == content

    asyncio.run(run())


def test_token_ids_and_prompt_logprobs() -> None:
    async def run() -> None:
        async with server() as s:
            ids = story_tokens()[:3]
            prompt_ids = small_tokenizer().encode("Once")
            body = await s.complete(max_tokens=3, return_token_ids=True, prompt_logprobs=1)
            (choice,) = body["choices"]
            assert choice["token_ids"] == ids and choice["prompt_token_ids"] == prompt_ids
            assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(prompt_ids)
            entry = choice["prompt_logprobs"][1][str(prompt_ids[1])]
            token = small_tokenizer().token_str(prompt_ids[1])
            assert entry == {"logprob": -0.25, "rank": 1, "decoded_token": token}
            chat = await s.chat(max_tokens=3, return_token_ids=True, prompt_logprobs=0)
            assert chat["choices"][0]["token_ids"] == ids
            assert len(chat["prompt_token_ids"]) == len(chat["prompt_logprobs"])
            events = await s.events("/v1/completions", max_tokens=3, return_token_ids=True)
            assert joined(event["choices"][0]["token_ids"] for event in events) == ids
            assert [event["choices"][0].get("prompt_token_ids") for event in events] == [prompt_ids, None, None]
            events = await s.events("/v1/chat/completions", max_tokens=3, return_token_ids=True)
            assert events[0]["prompt_token_ids"] == chat["prompt_token_ids"]

    asyncio.run(run())


def test_stops_and_truncation() -> None:
    async def run() -> None:
        async with server() as s:
            body = await s.complete(stop=["fox"])
            assert body["choices"][0]["text"] == STORY[: STORY.index("fox")]
            assert body["choices"][0]["stop_reason"] == "fox" and body["choices"][0]["finish_reason"] == "stop"
            body = await s.complete(stop="fox", include_stop_str_in_output=True)
            assert body["choices"][0]["text"].endswith("fox")
            token = story_tokens()[4]
            body = await s.complete(stop_token_ids=[token])
            assert body["choices"][0]["stop_reason"] == token
            events = await s.events("/v1/completions", stop=["fox"])
            assert "".join(event["choices"][0]["text"] for event in events) == STORY[: STORY.index("fox")]
            assert events[-1]["choices"][0]["stop_reason"] == "fox"

            cut = await s.complete(prompt="Once upon a time", truncate_prompt_tokens=2, max_tokens=1, echo=True)
            kept = small_tokenizer().decode(small_tokenizer().encode("Once upon a time")[-2:])
            assert cut["usage"]["prompt_tokens"] == 2 and cut["choices"][0]["text"].startswith(kept)
            right = await s.complete(prompt=[5, 6, 7], truncate_prompt_tokens=2, truncation_side="right", max_tokens=1)
            assert right["usage"]["prompt_tokens"] == 2
            sent = [message for message in s.ranks.sent if isinstance(message, AddRequest)]
            assert sent[-1].token_ids == [5, 6]

    asyncio.run(run())


def test_parameters_reach_the_rank() -> None:
    async def run() -> None:
        async with server(scheduling_policy="priority") as s:
            await s.complete(
                temperature=0.5,
                top_p=0.9,
                top_k=-1,
                min_p=0.1,
                seed=-3,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                repetition_penalty=1.2,
                logit_bias={"7": 200, "8": -1.5},
                allowed_token_ids=[7, 8],
                min_tokens=2,
                ignore_eos=True,
                bad_words=["fox"],
                priority=-2,
                cache_salt="pepper",
                skip_special_tokens=False,
            )
            (sent,) = [message for message in s.ranks.sent if isinstance(message, AddRequest)]
            p = sent.params
            assert (p.temperature, p.top_p, p.top_k, p.min_p, p.min_tokens) == (0.5, 0.9, 0, 0.1, 2)
            assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.5, -0.5, 1.2)
            assert p.logit_bias == {7: 100.0, 8: -1.5} and p.allowed_token_ids == (7, 8)
            assert p.ignore_eos and p.bad_words_token_ids and not p.skip_special_tokens
            assert (sent.priority, sent.cache_salt, sent.seed) == (-2, "pepper", (-3) & (2**63 - 1))

    asyncio.run(run())


ODD: dict[str, Any] = {
    "user": "somebody",
    "vllm_xargs": None,
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": False,
    "no_such_field": [1, {"deep": None}],
}
NULLS = [
    "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "stream", "stream_options", "logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_p", "ignore_eos", "min_tokens",
    "stop_token_ids", "prompt_logprobs", "response_format", "priority", "cache_salt", "request_id", "echo", "bad_words",
    "allowed_token_ids", "truncate_prompt_tokens", "tools", "tool_choice", "top_logprobs", "max_completion_tokens",
    "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "suffix", "best_of", "structured_outputs",
]  # fmt: skip


def test_unknown_fields_are_ignored_and_null_is_absent() -> None:
    async def run() -> None:
        async with server() as s:
            for extra in (ODD, dict.fromkeys(NULLS)):
                extra = {**extra, "temperature": None}
                assert (await s.complete(**{**extra, "max_tokens": 400}))["choices"][0]["text"] == STORY
                assert (await s.chat(**extra))["choices"][0]["message"]["content"] == STORY
            assert (await s.chat(response_format={"type": "text"}, tool_choice="none"))["choices"]
            assert (await s.complete(model=None, max_tokens=1))["model"] == MODEL
            assert (await s.complete(model="fox/alias", max_tokens=1))["model"] == "fox/alias"

    asyncio.run(run())


def test_messages() -> None:
    async def run() -> None:
        async with server() as s:
            conversation = [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "7"},
            ]
            await s.chat(messages=conversation, max_tokens=1)
            wanted = "system: Be brief.\nuser: one\ntwo\nassistant: \ntool: 7\nassistant:"
            assert last_prompt(s) == wanted
            await s.chat(reasoning_effort="high", max_tokens=1)
            assert last_prompt(s) == "user: Hello\nassistant: think"
            await s.chat(reasoning_effort="none", max_tokens=1)
            assert last_prompt(s) == "user: Hello\nassistant:"
            await s.chat(chat_template_kwargs={"enable_thinking": True}, max_tokens=1)
            assert last_prompt(s) == "user: Hello\nassistant: think"
            await s.chat(add_generation_prompt=False, max_tokens=1)
            assert last_prompt(s) == "user: Hello\n"
            half = [*MESSAGES, {"role": "assistant", "content": "Well"}]
            body = await s.chat(messages=half, continue_final_message=True, echo=True, max_tokens=1)
            assert last_prompt(s) == "user: Hello\nassistant: Well"
            assert body["choices"][0]["message"]["content"].startswith("Well")

    asyncio.run(run())


def test_a_prediction_reaches_the_rank_as_tokens() -> None:
    async def run() -> None:
        async with server() as s:
            for content in (STORY, [{"type": "text", "text": STORY}]):
                await s.chat(prediction={"type": "content", "content": content})
                sent = [message for message in s.ranks.sent if isinstance(message, AddRequest)][-1]
                assert list(sent.params.prediction_token_ids) == small_tokenizer().encode(STORY, False)
            prediction = {"type": "content", "content": [{"type": "image_url"}]}
            body = {"model": MODEL, "messages": MESSAGES, "prediction": prediction}
            wrong = await s.post("/v1/chat/completions", body)
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "prediction.content[0].type"

    asyncio.run(run())


def test_what_is_ignored_is_named() -> None:
    async def run() -> None:
        async with server() as s:
            answer = await s.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **ODD, "bünt": 1})
            assert answer.headers["x-ignored-fields"] == "no_such_field, b?nt"
            body = {"messages": MESSAGES, "max_tokens": 1, "stream": True, "reasoning_format": "none"}
            streamed = await s.post("/v1/chat/completions", body)
            assert streamed.headers["x-ignored-fields"] == "reasoning_format"
            large = {"prompt": "a " * 50, "max_tokens": 1, "user": "x" * 20_000, "mode": "fast"}
            assert (await s.post("/v1/completions", large)).headers["x-ignored-fields"] == "mode"
            refused = await s.post("/v1/completions", {**large, "json_schema": "{}"})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "json_schema"
            assert "x-ignored-fields" not in (await s.post("/v1/completions", {"prompt": "a", "user": "b"})).headers

    asyncio.run(run())


def test_usage_while_it_streams() -> None:
    """As vLLM counts: nothing when the role is said, and no usage unless include_usage asks for it."""

    async def run() -> None:
        async with server() as s:
            both = {"include_usage": True, "continuous_usage_stats": True}
            events = await s.events("/v1/chat/completions", stream_options=both)
            assert [event["usage"]["completion_tokens"] for event in events[:2]] == [0, 1]
            assert events[-1]["choices"] == []
            off = {"include_usage": False, "continuous_usage_stats": True}
            for path in ("/v1/chat/completions", "/v1/completions"):
                assert not any("usage" in event for event in await s.events(path, stream_options=off))

    asyncio.run(run())


def test_any_role_goes_to_the_template_and_what_was_not_asked_for_is_null() -> None:
    async def run() -> None:
        async with server() as s:
            body = await s.chat(messages=[{"role": "wizard", "content": "Abra"}], max_tokens=1)
            assert last_prompt(s).startswith("wizard: Abra")
            assert body["prompt_logprobs"] is None and body["prompt_token_ids"] is None
            (choice,) = (await s.complete(max_tokens=1))["choices"]
            assert choice["prompt_logprobs"] is None and choice["token_ids"] is None

    asyncio.run(run())
