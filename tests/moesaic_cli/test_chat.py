"""`moesaic chat` against a small server: the conversation outlives a full context, Ctrl-C, errors; keys of a terminal; TLS."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import ssl
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from moesaic.chat.conversation import Conversation
from moesaic.http_client import unreached

ROOM = 60  # characters of all messages together
SECONDS = 60.0
READS = b"\x1b[?2004h"  # what the editor writes when it begins to read keys


class ChatServer(ThreadingHTTPServer):
    """Answers with what it was told, in capital letters; to "forever" without an end; to "break" with an error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is what these tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "echo"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        last = body["messages"][-1]["content"]
        if sum(len(message["content"]) for message in body["messages"]) > ROOM:
            self.reply(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
            return
        if last == "break":
            self.reply(503, {"error": {"message": "no ranks", "code": "short"}})
            return
        self.send_response(200)
        self.end_headers()
        self.event({"content": last.upper()})
        while last == "forever":
            self.event({"content": " on"})
            time.sleep(0.01)
        self.event({}, "stop")
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, delta: dict[str, str], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        self.wfile.write(b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode())


@pytest.fixture
def echo() -> Iterator[ChatServer]:
    with ChatServer() as server:
        yield server
        server.shutdown()


def command(echo: ChatServer, *words: str) -> list[str]:
    return [sys.executable, "-m", "moesaic", "chat", "--url", f"http://127.0.0.1:{echo.server_port}", *words]


def talk(echo: ChatServer, lines: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(echo, *words), input="\n".join(lines), capture_output=True, text=True, timeout=SECONDS
    )


def contents(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["messages"]]


def test_a_full_context_forgets_the_oldest_turns(echo: ChatServer) -> None:
    done = talk(echo, ["a" * 15, "b" * 15, "c" * 15, "d" * 70, "e"], "--system", "Be brief")
    assert done.returncode == 0, done.stderr
    assert "C" * 15 in done.stdout and "the context is full: the oldest 1 turn(s) are forgotten" in done.stderr
    assert "HTTP 400: too long; the message was not answered" in done.stderr
    assert contents(echo.asked[-1])[0] == "Be brief" and contents(echo.asked[-1])[-1] == "e"
    assert "a" * 15 not in contents(echo.asked[-1])


def test_commands_and_an_error_that_passes(echo: ChatServer, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    lines = ["/params temperature=0.5 seed=7", "/params seed=x", "hello", "break", f"/save {kept}", "//x", "/nonsense"]
    done = talk(echo, [*lines, "/reset", "/system Speak", "bye", "/exit", "never"])
    assert done.returncode == 0 and "no ranks; the message was not answered" in done.stderr
    assert "seed must be an integer, not 'x'" in done.stderr and "/nonsense is unknown" in done.stderr
    assert [message["content"] for message in json.loads(kept.read_text())["messages"]] == ["hello", "HELLO"]
    assert contents(echo.asked[2]) == ["hello", "HELLO", "/x"]
    assert contents(echo.asked[-1]) == ["Speak", "bye"]
    assert echo.asked[0]["temperature"] == 0.5 and echo.asked[0]["seed"] == 7


def test_one_message_and_out(echo: ChatServer) -> None:
    done = talk(echo, [], "hello")
    assert (done.returncode, done.stdout) == (0, "HELLO\n")
    done = talk(echo, [], "hello", "--url", f"http://127.0.0.1:{echo.server_port}/v1")
    assert (done.returncode, done.stdout) == (0, "HELLO\n")
    done = talk(echo, [], "break")
    assert done.returncode == 2 and "no ranks" in done.stderr


def hear_ctrl_c() -> None:
    """What a shell starts in the background ignores it, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_stops_the_answer_and_no_more(echo: ChatServer) -> None:
    process = subprocess.Popen(
        command(echo), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=hear_ctrl_c,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("forever\n")
    process.stdin.flush()
    assert process.stdout.read(10) == "> FOREVER "
    process.send_signal(signal.SIGINT)
    out, said = process.communicate("next\n", timeout=SECONDS)
    assert process.returncode == 0, said
    assert "stopped" in said and "NEXT" in out
    asked = contents(echo.asked[-1])
    assert asked[0] == "forever" and asked[1].startswith("FOREVER") and asked[2] == "next"


def test_arrow_keys_new_lines_pasting_and_another_size(echo: ChatServer) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = subprocess.Popen(
        command(echo), stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    os.close(theirs)
    shown = b""

    def until(text: bytes, times: int = 1) -> None:
        nonlocal shown
        deadline = time.monotonic() + SECONDS
        while shown.count(text) < times:
            assert time.monotonic() < deadline, shown
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 4096)

    until(READS)
    os.write(ours, b"ab\x1b[DX\x1b[C\x1b\rcd\r")  # left, X, right, Alt-Enter
    until(b"AXB")
    until(READS, 2)
    os.write(ours, b"\x1b[A\r")  # what was said before
    until(READS, 3)
    os.write(ours, b"\x1b[200~p\rq\r\n/r\x1b[201~s")  # pasted, as terminals send it
    until(b"/rs")
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 9, 30, 0, 0))
    process.send_signal(signal.SIGWINCH)  # it has no terminal of its own that would say so
    os.write(ours, b"t\r")
    until(READS, 4)
    deadline = time.monotonic() + SECONDS
    while process.poll() is None:  # before the terminal is raw again the kernel takes a Ctrl-D for itself
        assert time.monotonic() < deadline, shown
        os.write(ours, b"\x04")
        if select.select([ours], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # it has ended
                os.read(ours, 4096)
    assert process.returncode == 0
    os.close(ours)
    assert contents(echo.asked[0]) == ["aXb\ncd"] and contents(echo.asked[1])[-1] == "aXb\ncd"
    assert contents(echo.asked[-1])[-1] == "p\nq\n/rst"


def test_over_tls(echo: ChatServer, tmp_path: Path) -> None:
    made = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    try:
        done = subprocess.run(
            [*words.split(), "-keyout", made[0], "-out", made[1]], capture_output=True, timeout=SECONDS
        )
    except FileNotFoundError:
        pytest.skip("there is no openssl (apt-get install openssl)")
    assert done.returncode == 0, done.stderr
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made[1], made[0])
    echo.socket = context.wrap_socket(echo.socket, server_side=True)
    words = [word.replace("http:", "https:") for word in command(echo, "hello")]
    trusting = {**os.environ, "SSL_CERT_FILE": str(made[1])}
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=trusting)
    assert (done.returncode, done.stdout) == (0, "HELLO\n"), done.stderr
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2 and "certificate verify failed" in done.stderr


def test_what_a_conversation_keeps() -> None:
    talk = Conversation("m", None, {"temperature": None, "top_p": 0.5})
    for text in ("a", "b", "c"):
        talk.say("user", text)
        talk.say("assistant", text.upper())
    assert talk.drop_oldest() and contents(talk.request()) == ["b", "B", "c", "C"]
    assert talk.drop_oldest() and not talk.drop_oldest()
    assert talk.request()["top_p"] == 0.5 and "temperature" not in talk.request()
    assert talk.command("/params top_p=") == "the server's defaults"
    with pytest.raises(ValueError, match="NAME=VALUE"):
        talk.command("/params colour=red")
    with pytest.raises(ValueError, match="No such file"):
        talk.command("/save /no/such/folder/x")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionRefusedError(111, "Connect call failed"), "no server listens there"),
        (ConnectionResetError(104, "Connection reset by peer"), "closed the connection before the end"),
        (BrokenPipeError(32, "Broken pipe"), "closed the connection before the end"),
        (OSError("too far away"), "too far away"),
    ],
)
def test_what_is_said_of_a_server_that_went_away(error: OSError, told: str) -> None:
    said = str(unreached("http://there", error))
    assert said.startswith("http://there: ") and told in said and "Errno" not in said
