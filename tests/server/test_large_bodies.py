"""Large bodies: taken by a process of their own, refused before they cost, bounded all together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from server_parts import MAX_MODEL_LEN, MODEL, STORY, plan, server, small_tokenizer, story_tokens, until
from test_front_process import front
from test_front_process import until as wait_until

from configs.server import ServerConfig
from server import intake_process, service
from server.intake import Intake
from server.intake_process import IntakeProcess
from server.taken import Answered, Kind, Prompts, Refused, Taken, unpack

pytestmark = pytest.mark.attacks

VOCAB = 320
TOO_LONG = {"prompt": "a" * 2_000_000}


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        async def all_of_it() -> None:
            await test(*given, **named)

        asyncio.run(all_of_it())

    return run


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]  # type: ignore[no-any-return]


def children(pid: int) -> list[int]:
    """Processes that take large bodies for it."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if b"server.intake_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


# ---- the front goes on --------------------------------------------------------------------------------------------


def test_streams_go_on_while_large_bodies_are_looked_at(tmp_path: Path) -> None:
    """The process that looks at them stands still here, so whatever the front did itself would show."""
    with front(tmp_path) as served, httpx.Client(base_url=served.url, timeout=30.0) as http:
        error_of(http.post("/v1/completions", json=TOO_LONG), 400)  # starts that process
        (helper,) = children(served.process.pid)
        os.kill(helper, signal.SIGSTOP)
        answers: list[httpx.Response] = []
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", TOO_LONG),
            ("/v1/completions", {"prompt": [7] * 500_000}),
            ("/v1/completions", {"prompt": [[7]] * 100_000}),
            ("/v1/completions", {"prompt": ["a b"] * 100_000}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 50_000}),
            ("/tokenize", {"prompt": "a b " * 250_000}),
            ("/detokenize", {"tokens": [7] * 250_000}),
        ]

        def post(path: str, body: dict[str, Any]) -> None:
            answers.append(httpx.post(f"{served.url}{path}", json=body, timeout=60.0))

        threads = [threading.Thread(target=post, args=body, daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        for _ in range(5):
            assert http.get("/health").status_code == 200
            whole = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 400})
            assert whole.json()["choices"][0]["text"] == STORY
        assert not answers
        os.kill(helper, signal.SIGCONT)
        for thread in threads:
            thread.join(60.0)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 400, 400, 400, 400, 400]
        served.process.kill()
        wait_until(lambda: not Path(f"/proc/{helper}").exists(), "no process outlives the front", 10.0)


def test_a_text_is_tokenized_without_holding_the_interpreter() -> None:
    thread = threading.Thread(target=small_tokenizer().encode, args=("a" * 2_000_000,))
    turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 3, "this thread had to wait for the other one"


# ---- the process --------------------------------------------------------------------------------------------------

SAME: list[tuple[Kind, dict[str, Any]]] = [
    ("completion", {"prompt": ["Once upon", "a time"], "echo": True, "max_tokens": 3, "logit_bias": {"5": 1.0}}),
    ("completion", {"prompt": [[5, 6], [7]], "echo": True, "stop": ["x"], "truncate_prompt_tokens": 1}),
    ("completion", {"prompt": [5, 999]}),
    ("completion", {"prompt": "a" * 100_000}),
    ("completion", {"prompt": "a", "model": "other"}),
    ("completion", {"prompt": "a", "n": 10_000}),
    ("chat", {"messages": [{"role": "user", "content": "ü🎉"}], "chat_template_kwargs": {"enable_thinking": True}}),
    ("chat", {"messages": [{"role": "assistant", "content": "so"}], "echo": True, "add_generation_prompt": False}),
    ("chat", {"messages": []}),
    ("tokenize", {"prompt": STORY, "return_token_strs": True}),
    ("detokenize", {"tokens": story_tokens()}),
    ("detokenize", {"tokens": "7"}),
]


@awaited
async def test_the_process_answers_as_the_front_does() -> None:
    decided, config = plan(), ServerConfig()
    inside = Intake(small_tokenizer(), decided, config)
    outside = IntakeProcess(small_tokenizer(), decided, config)
    try:
        for kind, fields in SAME:
            for serving in (True, False):
                body = json.dumps(fields).encode()
                expected = inside.take(kind, body, VOCAB, serving)
                assert await outside.take(kind, body, VOCAB, serving) == expected, (kind, fields)
    finally:
        outside.close()
    assert outside.pid is None


@awaited
async def test_a_lost_process_is_started_again() -> None:
    outside = IntakeProcess(small_tokenizer(), plan(), ServerConfig())
    body = json.dumps({"tokens": story_tokens()}).encode()
    try:
        assert isinstance(await outside.take("detokenize", body, VOCAB, True), Answered)
        pid = outside.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(outside.take("detokenize", body, VOCAB, True))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await waiting, Answered)
        assert outside.pid not in (None, pid)
    finally:
        outside.close()


@awaited
async def test_small_bodies_first_and_a_bound_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = IntakeProcess(small_tokenizer(), plan(), ServerConfig())
    done: list[int] = []

    async def take(size: int) -> Taken:
        found = await outside.take("tokenize", json.dumps({"prompt": "a" * size}).encode(), VOCAB, True)
        done.append(size)
        return found

    try:
        await take(1)
        assert outside.pid is not None
        os.kill(outside.pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(take(size)) for size in (50, 4000, 300, 2000)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.sleep(0)
        os.kill(outside.pid, signal.SIGCONT)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert done == [1, 50, 2000, 4000]
        monkeypatch.setattr(intake_process, "WAIT_SECONDS", 0.2)
        os.kill(outside.pid, signal.SIGSTOP)
        late = await asyncio.gather(take(5), take(6), return_exceptions=True)
        assert all(getattr(error, "status", None) == 503 for error in late), late
        monkeypatch.setattr(intake_process, "WAIT_SECONDS", 30.0)
        assert isinstance(await take(7), Answered)
        monkeypatch.setattr(intake_process, "IDLE_SECONDS", 0.0)
        await take(8)
        await until(lambda: outside.pid is None, "an idle process gives its memory back")
    finally:
        outside.close()


# ---- refused in time ----------------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    class Untouched:
        """Stands in the place of the library's tokenizer: whoever asks it fails."""

    tokenizer = small_tokenizer()
    library, tokenizer._tokenizer = tokenizer._tokenizer, Untouched()
    try:
        intake = Intake(tokenizer, plan(), ServerConfig())
        for prompt in ("a" * 100_000, ["a", "ü" * 50_000]):
            found = intake.take("completion", json.dumps({"prompt": prompt}).encode(), VOCAB, True)
            assert isinstance(found, Refused) and (found.status, found.param) == (400, "prompt")
            assert found.code == "context_length_exceeded" and f"is {MAX_MODEL_LEN} tokens" in found.message
        messages = [{"role": "user", "content": "a" * 100_000}]
        found = intake.take("chat", json.dumps({"messages": messages}).encode(), VOCAB, True)
        assert isinstance(found, Refused) and found.param == "messages" and "at least" in found.message
    finally:
        tokenizer._tokenizer = library
    cut = {"prompt": "a" * 100_000, "truncate_prompt_tokens": 4}  # fits, once it is cut
    found = intake.take("completion", json.dumps(cut).encode(), VOCAB, True)
    assert isinstance(found, Prompts) and found.token_ids is not None and len(unpack(found.token_ids[0])) == 4


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("stop_token_ids", [7] * 2000, "1024"),
        ("logit_bias", {str(token): 1 for token in range(2000)}, "1024"),
        ("allowed_token_ids", [7] * 2000, str(VOCAB)),
    ],
)
def test_lists_of_token_ids_are_bounded(field: str, value: object, limit: str) -> None:
    """They go on to the ranks; 4 million of them once stopped every stream for 1.7 s."""
    body = msgspec.json.encode({"prompt": "a", field: value})
    found = Intake(small_tokenizer(), plan(), ServerConfig()).take("completion", body, VOCAB, True)
    assert (
        isinstance(found, Refused) and found.param == field and f"at most {limit}" in found.message.replace("the ", "")
    )


def test_an_answer_about_tokens_is_bounded() -> None:
    intake = Intake(small_tokenizer(), plan(), ServerConfig(max_body_bytes=1000))
    body = msgspec.json.encode({"tokens": [small_tokenizer().encode("Once", False)[0]] * 20_000})
    found = intake.take("detokenize", body, VOCAB, True)
    assert isinstance(found, Refused) and found.code == "answer_too_large" and "8000" in found.message


@awaited
async def test_routes_without_prompts_take_small_bodies_only() -> None:
    config = ServerConfig(admin_key_digests=("9" * 64,))
    async with server(config) as s:
        found = error_of(await s.post("/abort_requests", {"request_ids": ["x" * 10] * 200_000}), 401)
        assert found["code"] == "invalid_api_key"  # before anything is read
    assert ServerConfig().max_body_bytes > service.ADMIN_BYTES


# ---- all together -------------------------------------------------------------------------------------------------


def test_bodies_in_flight_are_bounded_and_small_ones_go_on(tmp_path: Path) -> None:
    limit = 1 << 20
    with front(tmp_path, max_body_bytes=limit, max_inflight_bytes=limit) as served:
        host, _, port = served.url.removeprefix("http://").partition(":")
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        with httpx.Client(base_url=served.url, timeout=30.0) as http:
            with socket.create_connection((host, int(port)), timeout=10.0) as slow:
                slow.sendall(head % limit + b" " * (limit - 1000))  # and then nothing

                def refused() -> bool:
                    """What a request hears whose large body is yet to come; False: nothing, it is waited for."""
                    with socket.create_connection((host, int(port)), timeout=0.2) as other:
                        other.sendall(head % limit)
                        try:
                            answer = other.recv(4096)
                        except TimeoutError:
                            return False
                    assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer
                    return b"max_inflight_bytes (%d)" % limit in answer

                wait_until(refused, "a second large body has no room")
                for _ in range(3):
                    small = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 400})
                    assert small.json()["choices"][0]["text"] == STORY
            wait_until(
                lambda: http.post("/v1/completions", json={"prompt": "a" * 300_000}).status_code == 400,
                "there is room again",
            )


def test_a_bound_below_one_body_is_refused() -> None:
    with pytest.raises(ValueError, match="max_inflight_bytes must be at least max_request_bytes"):
        ServerConfig(max_inflight_bytes=1000)


@awaited
async def test_the_engine_gets_what_a_large_body_says() -> None:
    async with server(max_model_len=8192) as s:
        prompt = [5, 6, 7] * 2000
        answer = await s.complete(prompt=prompt, max_tokens=2, request_id="large")
        assert answer["usage"]["prompt_tokens"] == 6000 and answer["model"] == MODEL
        text = "Once upon a time " * 1200
        answer = await s.complete(prompt=text, max_tokens=2, truncate_prompt_tokens=100, echo=True)
        assert answer["usage"]["prompt_tokens"] == 100
