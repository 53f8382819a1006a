"""The front as a process of its own: real HTTP, real signals, the real wire; the ranks are a fake in a thread."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from openai import NotFoundError, OpenAI
from ports import free_port
from server_parts import (
    MODEL,
    STORY,
    parse_events,
    plan,
    rank_ready,
    say,
    small_tokenizer,
    story_tokens,
    write_tokenizer,
)

from configs.engine import Plan
from configs.server import ServerConfig
from front.messages import Abort, AddRequest, NoneLeft, Outputs, RankFailed, RankStats, Shutdown
from front.wire import RankSocket, Reporter

STARTUP = 30.0


@dataclass
class FakeRank(threading.Thread):
    """A fake of engine.process.rank_process for one rank, on the real wire: tells the story, a token every `pace` seconds.

    hold_at: it stops there, for each sequence, until hold_at is 0.
    """

    endpoint: str
    rank: int
    pace: float = 0.002
    script: list[int] = field(default_factory=story_tokens)
    hold_at: int = 0
    num_added: int = 0
    temperatures: list[float] = field(default_factory=list)
    num_finished: int = 0
    shut_down: bool = False
    aborted: list[int] = field(default_factory=list)
    failure: str | None = None
    leave: bool = False

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        socket = RankSocket(self.endpoint, self.rank)
        socket.send(rank_ready(self.rank, small_tokenizer().vocab_size))
        running: dict[int, tuple[AddRequest, int]] = {}
        while not self.shut_down and not self.leave:
            for message in socket.poll(self.pace):
                if isinstance(message, AddRequest):
                    self.num_added += 1
                    self.temperatures.append(message.params.temperature)
                    running[message.request_id] = (message, 0)
                elif isinstance(message, Abort):
                    self.aborted += message.request_ids
                    for number in message.request_ids:
                        running.pop(number, None)
                elif isinstance(message, Shutdown):
                    self.shut_down = True
            if self.failure is not None:
                socket.send(RankFailed(self.rank, self.failure))
                break
            outputs = []
            for number, (message, said) in list(running.items()):
                if said == self.hold_at > 0:
                    continue
                output = say(message, self.script, said, 1)
                outputs.append(output)
                running[number] = (message, said + 1)
                if output.finish_reason is not None:
                    del running[number]
                    self.num_finished += 1
            if outputs:
                socket.send(Outputs(self.rank, outputs, RankStats(running=len(running)), time.monotonic()))
        socket.close()


@dataclass
class Front:
    process: subprocess.Popen[str]
    url: str
    ranks: list[FakeRank]
    directory: Path

    def wait(self, timeout: float = 10.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def ready_file(self) -> bool:
        path = self.directory / "ready"
        return path.exists() and bool(self.ready_text())

    def ready_text(self) -> str:
        return (self.directory / "ready").read_text().rstrip("\0")


def until(condition: Any, what: str, timeout: float = STARTUP) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout} s: {what}")


def command(directory: Path, decided: Plan, config: ServerConfig) -> list[str]:
    (directory / "plan.json").write_bytes(msgspec.json.encode(decided))
    (directory / "server.json").write_bytes(msgspec.json.encode(config))
    options = ["--plan", str(directory / "plan.json"), "--server", str(directory / "server.json")]
    return [sys.executable, "-m", "server.process", *options, "--runtime-dir", str(directory)]


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/live", timeout=1.0).status_code == 200
    return False


@contextlib.contextmanager
def front(tmp_path: Path, *, ready: bool = True, **settings: Any) -> Iterator[Front]:
    """ready: False leaves the ranks to be started by the test."""
    write_tokenizer(tmp_path / "model")
    config = ServerConfig(**{"port": free_port(), **settings})
    decided = plan(model_path=str(tmp_path / "model"))
    process = subprocess.Popen(
        command(tmp_path, decided, config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ranks = [FakeRank(f"ipc://{tmp_path}/front.ipc", rank) for rank in range(2)]
    found = Front(process, f"http://127.0.0.1:{config.port}", ranks, tmp_path)
    try:
        if ready:
            for rank in ranks:
                rank.start()
            until(found.ready_file, "the front is ready")
        yield found
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        for rank in ranks:
            rank.leave = True
            if rank.is_alive():
                rank.join(5.0)


def test_the_openai_client_then_a_drain(tmp_path: Path) -> None:
    with front(tmp_path) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            assert api.models.list().data[0].id == MODEL and api.models.retrieve(MODEL).id == MODEL
            messages: Any = [{"role": "user", "content": "Hello"}]
            chat = api.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=2)
            assert chat.choices[0].message.content == STORY and chat.choices[0].logprobs is not None
            done = api.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=5, n=2, logprobs=1)
            assert [choice.finish_reason for choice in done.choices] == ["length"] * 4
            with pytest.raises(NotFoundError, match="gpt-9") as refused:
                api.completions.create(model="gpt-9", prompt="a")
            assert refused.value.type == "NotFoundError" and refused.value.param == "model"
            for rank in server.ranks:
                rank.hold_at = 9
            stream = api.chat.completions.create(
                model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [next(iter(stream))]
            server.process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, "not ready any more")
            late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
            assert late.status_code == 503 and late.headers["connection"] == "close" and late.headers["retry-after"]
            for rank in server.ranks:
                rank.hold_at = 0
            chunks += list(stream)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == STORY and chunks[-1].usage is not None
        code, out, err = server.wait()
        assert code == 0, err
        assert not out and "Traceback" not in err
        assert err.count("moesaic.requests") >= 4 and not server.ready_file()
        until(lambda: all(rank.shut_down for rank in server.ranks), "the ranks are told to leave", 5.0)


@contextlib.contextmanager
def held_stream(server: Front) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun, and stops at the ninth token."""
    for rank in server.ranks:
        rank.hold_at = 9
    body = {"prompt": "a", "stream": True, "max_tokens": 200}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        next(lines)
        yield lines


def test_a_drain_that_takes_too_long_aborts(tmp_path: Path) -> None:
    with front(tmp_path, shutdown_timeout=0.3) as server:
        with held_stream(server) as lines:
            server.process.send_signal(signal.SIGINT)
            data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]" and json.loads(data[-2])["choices"][0]["finish_reason"] == "abort"
        code, _, err = server.wait()
        assert code == 0 and "1 requests aborted" in err


def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    with front(tmp_path) as server, held_stream(server):
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, "draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait()[0] == 1


def test_the_last_rank_s_failure_ends_the_front_with_its_name(tmp_path: Path) -> None:
    with front(tmp_path) as server:
        with held_stream(server) as lines:
            server.ranks[0].failure = "ValueError: no luck"
            until(lambda: httpx.get(f"{server.url}/ready").json().get("mode") == "degraded", "one rank is lost")
            server.ranks[1].failure = "ValueError: a wire was cut"
            until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, "none serves")
            reporter = Reporter(server.ranks[1].endpoint)
            reporter.send(NoneLeft("rank 1: ValueError: a wire was cut"))
            data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]" and json.loads(data[-2])["error"]["code"] == "engine_failed"
        reporter.close()
        code, _, err = server.wait()
        assert code == 3
        said = [line for line in err.splitlines() if line.startswith("moesaic:")]
        assert len(said) == 1 and "rank 1" in said[0] and "a wire was cut" in said[0]


def test_http_answers_while_ranks_load_and_odd_clients_do_no_harm(tmp_path: Path) -> None:
    with front(tmp_path, ready=False, max_header_bytes=4096, max_body_bytes=50_000) as server:
        until(lambda: answers(server.url), "it answers")
        assert httpx.get(f"{server.url}/ready").json()["error"]["code"] == "loading"
        assert not server.ready_file()
        for rank in server.ranks:
            rank.start()
        until(server.ready_file, "ready")
        assert server.ready_text() == server.url

        big = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a" * 5_000_000})
        assert big.status_code == 413 and big.json()["error"]["code"] == "body_too_large"

        def pieces() -> Iterator[bytes]:
            for _ in range(100):
                yield b" " * 1000

        headers = {"content-type": "application/json"}
        assert httpx.post(f"{server.url}/v1/completions", content=pieces(), headers=headers).status_code == 413
        for raw, status in (
            (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, b"431"),
            (b"GET /" + b"a" * 100_000, b"431"),
            (b"nonsense\r\n\r\n", b"400"),
            (b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"400"),
        ):
            answer = ask(server, raw)
            assert answer.split()[1] == status
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"]
        assert httpx.get(f"{server.url}/ready").status_code == 200


def ask(server: Front, raw: bytes) -> bytes:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(raw)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                answer += piece
    return answer


def test_a_client_that_leaves_aborts_within_a_step(tmp_path: Path) -> None:
    with front(tmp_path) as server:
        for rank in server.ranks:
            rank.hold_at = 9
        for stream in (True, False):
            body = json.dumps({"prompt": "a", "stream": stream, "max_tokens": 200}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            host, _, port = server.url.removeprefix("http://").partition(":")
            with socket.create_connection((host, int(port)), timeout=5.0) as connection:
                connection.sendall(head % len(body) + body)
                if stream:
                    assert connection.recv(100).startswith(b"HTTP/1.1 200")
                else:
                    until(lambda: sum(rank.num_added for rank in server.ranks) == 2, "it runs")
            wanted = 1 if stream else 2
            until(lambda wanted=wanted: sum(len(rank.aborted) for rank in server.ranks) == wanted, "aborted", 5.0)


def refused(tmp_path: Path, decided: Plan, config: ServerConfig) -> str:
    done = subprocess.run(command(tmp_path, decided, config), capture_output=True, text=True, timeout=STARTUP)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model")
    good = plan(model_path=str(tmp_path / "model"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(tmp_path, good, ServerConfig(port=port))
        assert f"127.0.0.1:{port}" in line and "in use" in line
    assert "tokenizer.json" in refused(tmp_path, replace(good, model_path=str(tmp_path)), ServerConfig(port=0))
    assert "log_format" in refused(tmp_path, good, ServerConfig(port=0, log_format="xml"))
    assert "cannot listen" in refused(tmp_path, good, ServerConfig(port=0, host="no.such.host.invalid"))


def test_a_client_that_reads_late_misses_nothing(tmp_path: Path) -> None:
    """More than sockets hold: pieces go straight to the connection until it is full, then the answer waits for the client."""
    choices, script = 128, story_tokens()[:-1] * 4
    body = {"prompt": "Once", "n": choices, "max_tokens": len(script), "logprobs": 20, "stream": True}
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)])
    with front(tmp_path, max_queued_requests=1000) as server, httpx.Client(transport=small, timeout=STARTUP) as api:
        for rank in server.ranks:
            rank.script = script
        with api.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            until(lambda: sum(rank.num_finished for rank in server.ranks) == choices, "the ranks have said everything")
            data = answer.read()
        assert len(data) > 5 << 20  # Linux lets 4 MiB wait in a connection
        found = [choice for event in parse_events(data.decode()) for choice in event["choices"]]
        texts = [""] * choices
        for choice in found:
            texts[choice["index"]] += choice["text"]
        assert texts == [STORY * 4] * choices
        assert [choice["finish_reason"] for choice in found].count("length") == choices


def test_https_and_defaults_of_sampling(tmp_path: Path) -> None:
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    try:
        subprocess.run(
            [*words.split(), "-keyout", key, "-out", certificate], capture_output=True, check=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("there is no openssl (apt-get install openssl)")
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    with front(tmp_path, **files, generation={"temperature": 0.25}) as server:
        url = server.url.replace("http:", "https:")
        assert server.ready_text() == url
        with httpx.Client(verify=ssl.create_default_context(cafile=certificate), base_url=url) as api:
            body = {"prompt": "a", "max_tokens": 3, "stream": True}
            answer = api.post("/v1/completions", json=body)
            assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert [temperature for rank in server.ranks for temperature in rank.temperatures] == [0.25]
