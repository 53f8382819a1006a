"""The command line: what it imports, what it prints, how it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from moesaic_here import run_here

from moesaic.http_client import Client


def run(*arguments: str, text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moesaic", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, input=text, timeout=120, env=environment)


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import moesaic", "import moesaic.cli", "import moesaic.serving", "import server.process"]
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    """--help and the front start at once because torch, transformers and numpy come later or never."""
    assert not {"torch", "transformers"} & modules_after(statement)


def test_import_costs_next_to_nothing() -> None:
    assert not {"torch", "numpy", "msgspec", "click", "zmq"} & modules_after("import moesaic")


def test_a_wrong_option_of_a_server_is_said_before_it_is_imported() -> None:
    assert not {"engine.plan", "launch.supervisor"} & modules_after("import moesaic.serve")


@pytest.mark.parametrize(
    "arguments", [["serve"], ["generate"], ["chat"], ["bench"], ["bench", "serve"], ["explain"], ["ranks"]]
)
def test_help(arguments: list[str]) -> None:
    done = run_here(*arguments, "--help")
    assert done.returncode == 0
    assert "Usage: moesaic" in done.stdout


def test_help_of_a_process() -> None:
    done = run("--help")
    assert done.returncode == 0 and "Usage: moesaic" in done.stdout


def test_explain_gives_a_reason_for_every_choice() -> None:
    done = run("explain", "--json", "--data-parallel-size", "2")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["plan"]["slots_per_rank"] * 2 >= 16
    assert answer["reasons"]["all2all_backend"]
    table = run_here("explain")
    assert "threads_per_rank" in table.stdout
    alone = json.loads(run_here("explain", "--json").stdout)
    assert alone["plan"]["data_parallel_size"] == 2  # what `serve` starts without a model


def test_generate_continues_a_story() -> None:
    done = run("generate", "--prompt", "Once upon a time", "--max-tokens", "12", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt"] == "Once upon a time"
    assert answer["text"].strip()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed the connection before the end of its answer"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda", "closed the connection before the end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nda\r\n", "closed the connection before the end"),
        (None, "no answer for 0.2 s"),
    ],
    ids=["nothing", "no HTTP", "half a chunk", "no last chunk", "silence"],
)
def test_a_server_that_breaks_off_is_an_error_in_words(answer: bytes | None, message: str) -> None:
    async def run() -> None:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer or b"")
            if answer is None:
                await gone.wait()
            writer.close()
            await writer.wait_closed()
            ended.set()

        gone, ended = asyncio.Event(), asyncio.Event()
        async with await asyncio.start_server(speak, "127.0.0.1") as server:
            client = Client(
                f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=0.2 if answer is None else 5
            )
            with pytest.raises(OSError, match=message):
                async for _ in client.events("/v1/completions", {}):
                    pass
            gone.set()
            await asyncio.wait_for(ended.wait(), 5)

    asyncio.run(run())


def test_bench_prints_json() -> None:
    done = run("bench", "latency", "--input-len", "8", "--output-len", "4", "--num-iters", "1")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout)["tpot_ms"], float)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "x", "--top-p", "2"], "top_p"),
        (["chat", "--url", "http://127.0.0.1:9", "hello"], "127.0.0.1:9: no server listens there"),
        (["sevre"], "No such command 'sevre'. Did you mean 'serve'?"),
        (["nothing-like-it"], "No such command 'nothing-like-it'."),
        (["explain", "--kv-cache-memory-bytes", "lots"], "not a number of bytes"),
        (["serve", "--max-request-bytes", "0"], "'0' is not a number of bytes"),
        (["serve", "--request-timeout", "nan"], "'nan' is not a number"),
        (["serve", "--startup-timeout", "-1"], "-1.0 is not in the range 0<=x<=1000000.0."),
        (["ranks", "--url", "http://127.0.0.1:9"], "127.0.0.1:9: no server listens there"),
        (["bench", "serve", "--url", "unix:/no/such"], "unix:/no/such: no server listens there"),
        (["explain", "--enable-dbo=maybe"], "'maybe' is none of auto, on, off"),
        (["serve", ""], "MODEL is an empty text"),
        (["serve", "--max-num-queued-reqs", "-1"], "-1 is not in the range"),
        (["chat", "--url", "http://127.0.0.1:99999", "hello"], "has no port from 1 to 65535"),
        (["bench", "throughput", "--repeats", "0"], "0 is not in the range"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    check_refused(run_here(*arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "/no/such/model"], "is not a directory"),
        (["serve", "--api-key", ""], "must not be empty"),
        (["serve", "--logits-processors", "nowhere:Own"], "'nowhere:Own': ModuleNotFoundError"),
    ],
)
def test_bad_input_to_a_process(arguments: list[str], message: str) -> None:
    check_refused(run(*arguments), message)


def test_tables_where_no_width_is_known() -> None:
    """Some terminals and runners set COLUMNS=0."""
    assert "Plan for moesaic-tiny" in run("explain", COLUMNS="0").stdout


def check_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_ends_early_is_no_error() -> None:
    """As in `moesaic explain | head`."""
    command = [sys.executable, "-m", "moesaic", "explain", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 1
    with process.stderr as said:
        assert said.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_no_room_for_what_is_printed_is_said() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "moesaic", "explain", "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and done.stderr == "moesaic: error: what is printed: No space left on device\n"


def test_a_terminal_that_lacks_characters() -> None:
    """An answer has what the model says."""
    done = run("generate", "--prompt", "🎉 süß", "--max-tokens", "2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("? s??")
