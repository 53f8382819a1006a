"""The command line: what it imports, what it prints, how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moesaic", *arguments], capture_output=True, text=True, input=text, timeout=120
    )


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import moesaic", "import moesaic.cli", "import moesaic.serve", "import server.process"]
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    """--help and the front start at once because torch, transformers and numpy come later or never."""
    assert not {"torch", "transformers"} & modules_after(statement)


def test_import_costs_next_to_nothing() -> None:
    assert not {"torch", "numpy", "msgspec", "click", "zmq"} & modules_after("import moesaic")


@pytest.mark.parametrize(
    "arguments", [[], ["serve"], ["generate"], ["chat"], ["bench"], ["bench", "serve"], ["explain"], ["ranks"]]
)
def test_help(arguments: list[str]) -> None:
    done = run(*arguments, "--help")
    assert done.returncode == 0
    assert "Usage: moesaic" in done.stdout


def test_explain_gives_a_reason_for_every_choice() -> None:
    done = run("explain", "--json", "--data-parallel-size", "2")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["plan"]["slots_per_rank"] * 2 >= 16
    assert answer["reasons"]["all2all_backend"]
    table = run("explain")
    assert "threads_per_rank" in table.stdout


def test_generate_continues_a_story() -> None:
    done = run("generate", "--prompt", "Once upon a time", "--max-tokens", "12", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt"] == "Once upon a time"
    assert answer["text"].strip()


def test_bench_prints_json() -> None:
    done = run("bench", "latency", "--input-len", "8", "--output-len", "4", "--num-iters", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tpot_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "/no/such/model"], "is not a directory"),
        (["generate", "--prompt", "x", "--top-p", "2"], "top_p"),
        (["chat", "--url", "http://127.0.0.1:9", "hello"], "127.0.0.1:9"),
        (["explain", "--kv-cache-memory-bytes", "lots"], "not a number of bytes"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
