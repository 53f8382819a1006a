"""What vLLM's servers take beside OpenAI's fields: /invocations, documents, flags for what answers show."""

from __future__ import annotations

import asyncio

from server_parts import MODEL, last_prompt, server, small_tokenizer, until

from configs.server import ServerConfig
from front.messages import AddRequest
from front.params import ReasoningBudget


def test_invocations_are_what_their_body_is() -> None:
    async def run() -> None:
        async with server() as s:
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
            assert (await s.post("/invocations", chat)).json()["object"] == "chat.completion"
            plain = {"model": MODEL, "prompt": 'He said "messages": no', "max_tokens": 3}
            assert (await s.post("/invocations", plain)).json()["object"] == "text_completion"

    asyncio.run(run())


def test_documents_go_to_the_template() -> None:
    async def run() -> None:
        async with server(ServerConfig(chat_template="{{ documents[0].text }}|{{ messages[0].content }}")) as s:
            await s.chat(documents=[{"text": "All foxes sleep."}], max_tokens=1)
            assert last_prompt(s) == "All foxes sleep.|Hello"

    asyncio.run(run())


def test_templates_may_get_parts() -> None:
    template = (
        "{% for m in messages %}{% for part in m.content %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    others = ["c", {"type": "refusal", "refusal": "no"}]

    async def run() -> None:
        async with server() as s:
            await s.chat(messages=[{"role": "user", "content": [*parts, *others]}], max_tokens=1)
            assert last_prompt(s) == "user: a\nb\nc\nno\nassistant:"
        async with server(ServerConfig(chat_template=template, content_parts=True)) as s:
            await s.chat(messages=[{"role": "assistant", "content": others}], max_tokens=1)
            assert last_prompt(s) == "[text:c][text:no]"
            await s.chat(
                messages=[{"role": "system", "content": "be"}, {"role": "user", "content": parts}], max_tokens=1
            )
            assert last_prompt(s) == "[text:be][text:a][text:b]"
            going = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}]
            await s.chat(messages=going, continue_final_message=True, add_generation_prompt=False, max_tokens=1)
            assert last_prompt(s) == "[text:a][text:so"
            picture = [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]
            refused = await s.post("/v1/chat/completions", {"model": MODEL, "messages": picture, "max_tokens": 1})
            assert refused.status_code == 400 and "messages[0].content[0].type" in refused.text

    asyncio.run(run())


def test_defaults_of_a_server_for_what_answers_show() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    config = ServerConfig(
        chat_template="{{ tools | length if tools else 0 }}",
        tool_call_parser="hermes",
        exclude_tools_when_tool_choice_none=True,
        enable_force_include_usage=True,
        return_tokens_as_token_ids=True,
    )

    async def run() -> None:
        async with server(config) as s:
            events = await s.events("/v1/completions", max_tokens=2)
            assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 2
            assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 2]  # in each piece too
            logprobs = (await s.complete(max_tokens=1, logprobs=0))["choices"][0]["logprobs"]
            assert logprobs["tokens"][0].startswith("token_id:")
            shown = await s.complete(max_tokens=1, logprobs=0, return_tokens_as_token_ids=False)
            assert not shown["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
            for choice, prompt in (("none", "0"), ("auto", "1")):
                await s.chat(tools=[tool], tool_choice=choice, max_tokens=1)
                assert last_prompt(s) == prompt

    asyncio.run(run())


def test_usage_without_details() -> None:
    """Of completions and chats; /v1/responses must have them."""

    async def run() -> None:
        async with server(ServerConfig(enable_prompt_tokens_details=False)) as s:
            events = await s.events("/v1/completions", max_tokens=2, stream_options={"include_usage": True})
            for usage in (
                (await s.complete(max_tokens=2))["usage"],
                (await s.chat(max_tokens=2))["usage"],
                events[-1]["usage"],
            ):
                assert {name for name, value in usage.items() if value is not None} == {
                    "prompt_tokens", "completion_tokens", "total_tokens"
                }  # fmt: skip
            answer = await s.post("/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 2})
            assert answer.json()["usage"]["input_tokens_details"]["cached_tokens"] == 4

    asyncio.run(run())


def test_what_logits_processors_are_told() -> None:
    """Without any, it is refused (test_refusals.py)."""

    async def run() -> None:
        async with server(logits_processors=("own:Processor",)) as s:
            told = {"no_repeat": 2, "words": ["a", "b"]}
            await s.complete(max_tokens=1, vllm_xargs=told)
            await s.chat(max_tokens=1, vllm_xargs=told)
            assert [sent.params.extra_args for sent in s.ranks.sent if isinstance(sent, AddRequest)] == [told, told]
            answer = await s.post("/v1/completions", {"prompt": "a", "vllm_xargs": {str(i): i for i in range(17)}})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "vllm_xargs"

    asyncio.run(run())


def test_the_budget_of_reasoning_reaches_the_ranks() -> None:
    """As chat's and completions' field, and as /v1/messages has it; refused where no reasoning is known, but for
    clients of /v1/messages, which ask every model to think."""
    begin, end = (tuple(small_tokenizer().encode(tag, False)) for tag in ("<think>", "</think>"))
    message = {"role": "user", "content": "Hello"}
    asked = {"max_tokens": 200, "messages": [message], "thinking": {"type": "enabled", "budget_tokens": 1024}}

    async def run() -> None:
        async with server(ServerConfig(reasoning_parser="qwen3"), max_model_len=2048) as s:
            await s.chat(max_tokens=1, thinking_token_budget=3)
            await s.complete(max_tokens=1, thinking_token_budget="4", prompt="Well <think>")
            assert (await s.post("/v1/messages", {"model": MODEL, **asked, "max_tokens": 1025})).status_code == 200
            await s.chat(max_tokens=1, thinking_token_budget=-1)
            sampling = {"max_tokens": 1, "thinking_token_budget": 5}
            tokens = {"token_ids": [3, *begin], "sampling_params": sampling}
            assert (await s.post("/inference/v1/generate", tokens)).status_code == 200
            found = [sent.params.reasoning for sent in s.ranks.sent if isinstance(sent, AddRequest)]
            expected = [(3, begin), (4, ()), (1024, begin), None, (5, ())]
            assert found == [one and ReasoningBudget(*one, (end,)) for one in expected]
            rendered = await s.post("/v1/chat/completions/render", {"messages": [message], "thinking_token_budget": 3})
            assert rendered.json()["sampling_params"]["thinking_token_budget"] == 3
            answer = await s.post("/v1/chat/completions", {"messages": [message], "thinking_token_budget": -2})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"
        async with server(ServerConfig(reasoning_parser="")) as s:
            answer = await s.post("/v1/chat/completions", {"messages": [message], "thinking_token_budget": 3})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"
        async with server(ServerConfig(reasoning_parser=""), max_model_len=2048) as s:
            assert (await s.post("/v1/messages", {"model": MODEL, **asked, "max_tokens": 1025})).status_code == 200

    asyncio.run(run())


def test_a_beam_search_is_one_request() -> None:
    """A server that is shutting down waits for it, and it can be aborted; new ones are refused then."""
    asked = {"model": MODEL, "prompt": ["Once", "Twice"], "use_beam_search": True, "n": 2, "max_tokens": 12}

    async def run() -> None:
        async with server() as s:
            s.ranks.pause_at = 4
            running = asyncio.create_task(s.post("/v1/completions", {**asked, "request_id": "beams"}))
            await until(lambda: s.ranks.paused, "it is under way")
            draining = asyncio.create_task(s.service.engine.drain(30.0))
            await until(lambda: s.service.engine.draining, "the server drains")
            assert (await s.post("/v1/completions", asked)).status_code == 503
            s.ranks.resume()
            body = (await running).json()
            assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 4
            assert body["usage"]["completion_tokens"] == 48 and await draining == 0
            assert not s.service.metrics._ended and not len(s.service.in_flight)
        async with server() as s:
            s.ranks.pause_at = 4
            running = asyncio.create_task(s.post("/v1/completions", {**asked, "request_id": "beams"}))
            await until(lambda: s.ranks.paused, "it is under way")
            names = s.service.in_flight.prompt_ids(["beams"])
            aborted = [s.service.engine.abort(name) for name in names]
            assert len(names) == 4 and any(aborted)
            s.ranks.resume()
            body = (await running).json()
            assert {choice["finish_reason"] for choice in body["choices"]} == {"abort"}

    asyncio.run(run())


def test_a_header_names_the_rank() -> None:
    async def run() -> None:
        async with server(data_parallel_size=3) as s:
            for text in ("3", "-1", "one", "9" * 5000, ""):
                refused = await s.post("/v1/completions", {"prompt": "a"}, headers={"X-data-parallel-rank": text})
                assert refused.status_code == 400 and "from 0 to 2" in refused.json()["error"]["message"]
            s.ranks.paused = True
            message = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
            front = s.service.engine.front
            for path in ("/v1/chat/completions", "/v1/messages"):
                running = asyncio.create_task(s.post(path, message, headers={"x-data-parallel-rank": "2"}))
                await until(lambda: front.num_requests, "it is under way")
                assert [request.rank for request in front._requests.values()] == [2]
                s.ranks.resume()
                assert (await running).status_code == 200
                s.ranks.paused = True

    asyncio.run(run())


def test_numbers_and_flags_may_be_texts() -> None:
    """As pydantic reads them, with which vLLM's servers do."""

    async def run() -> None:
        async with server() as s:
            choice = (await s.chat(max_tokens="3", temperature="0", logprobs="true", top_logprobs=2.0))["choices"][0]
            assert len(choice["logprobs"]["content"]) == 3
            (sent,) = (sent for sent in s.ranks.sent if isinstance(sent, AddRequest))
            assert (sent.params.max_tokens, sent.params.temperature, sent.params.logprobs) == (3, 0.0, 2)
            for field, value in (("temperature", "nan"), ("max_tokens", "2.5"), ("logit_bias", {"5": "nan"})):
                answer = await s.post("/v1/completions", {"prompt": "a", field: value})
                assert answer.status_code == 400 and answer.json()["error"]["param"].split(".")[0] == field

    asyncio.run(run())


def test_what_clients_look_for_where_there_is_nothing() -> None:
    async def run() -> None:
        async with server() as s:
            chat, plain = await s.chat(max_tokens=1), await s.complete(max_tokens=1)
            for field in ("service_tier", "system_fingerprint", "kv_transfer_params"):
                assert chat[field] is None and plain[field] is None
            message = chat["choices"][0]["message"]
            for field in ("reasoning", "reasoning_content", "annotations", "audio", "function_call"):
                assert message[field] is None

    asyncio.run(run())


def test_named_alternatives_and_the_token_that_was_drawn() -> None:
    async def run() -> None:
        async with server() as s:
            asked = {"logprobs": True, "logprob_token_ids": [5, 6], "return_tokens_as_token_ids": True, "max_tokens": 1}
            (entry,) = (await s.chat(**asked))["choices"][0]["logprobs"]["content"]
            assert entry["token"] in [top["token"] for top in entry["top_logprobs"]]

    asyncio.run(run())


def test_several_conversations_at_once() -> None:
    async def run() -> None:
        async with server() as s:
            talks = [[{"role": "user", "content": text}] for text in ("Hello", "Bye")]
            talks[1].append({"role": "assistant", "content": "So"})
            path = "/v1/chat/completions/batch"
            goes_on = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
            body = {"messages": [talks[1], talks[1]], "max_tokens": 2, "logprobs": True, "return_token_ids": True}
            answer = (await s.post(path, {**body, **goes_on})).json()
            assert [choice["index"] for choice in answer["choices"]] == [0, 1]
            for choice in answer["choices"]:
                assert choice["message"]["content"].startswith("So") and len(choice["token_ids"]) == 2
            assert answer["usage"]["completion_tokens"] == 4
            await s.post(path, {"messages": talks, "max_tokens": 1})
            sent = [message.token_ids for message in s.ranks.sent if isinstance(message, AddRequest)][-2:]
            told = {small_tokenizer().decode(token_ids) for token_ids in sent}
            assert told == {"user: Hello\nassistant:", "user: Bye\nassistant: So\nassistant:"}
            for field, value in (
                ("stream", True), ("n", 2), ("tools", [{"type": "function", "function": {"name": "f"}}]),
                ("prompt_logprobs", 1), ("messages", []), ("messages", [[]]), ("messages", talks[0]),
            ):  # fmt: skip
                refused = await s.post(path, {"messages": talks, field: value})
                assert refused.status_code == 400 and refused.json()["error"]["param"].startswith(field), refused.text

    asyncio.run(run())
