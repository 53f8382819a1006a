"""What tests of launched servers share: requests over HTTP, processes by what they are, waits with a bound."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from served import descendants, until

READY = 120.0  # seconds; generous, because CI may share its cores
TOKENS = 200
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy this machine has


def get(url: str, timeout: float = 5.0) -> tuple[int, dict[str, Any]]:
    """Status and body; 0 and nothing where no server of ours answers."""
    try:
        with OPENER.open(url, timeout=timeout) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error, contextlib.suppress(ValueError):
            return error.code, json.loads(error.read())
    except (OSError, ValueError):
        pass
    return 0, {}


def mode(url: str) -> str:
    return str(get(f"{url}/ready")[1].get("mode"))


def wait_mode(url: str, wanted: str) -> None:
    until(lambda: mode(url) == wanted, READY, f"{url} is {wanted}")


def complete(url: str, number: int = 0, max_tokens: int = TOKENS) -> list[int]:
    """The token ids of one greedy request."""
    body = {
        "prompt": f"Once upon a time there were {number} foxes",
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with OPENER.open(request, timeout=120) as answer:
        return list(json.loads(answer.read())["choices"][0]["token_ids"])


class Streams:
    """Requests that run while something happens."""

    def __init__(self, url: str, count: int = 4, max_tokens: int = TOKENS) -> None:
        self.answers: dict[int, list[int] | Exception] = {}
        self._url, self._max_tokens = url, max_tokens
        self._threads = [threading.Thread(target=self._one, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()
        until(lambda: self._running() > 0, 30, "requests run")

    def _running(self) -> int:
        if len(self.answers) == len(self._threads):
            return 1  # all done already
        with OPENER.open(f"{self._url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")))

    def _one(self, number: int) -> None:
        try:
            self.answers[number] = complete(self._url, number, self._max_tokens)
        except Exception as error:
            self.answers[number] = error

    def finish(self) -> list[list[int] | Exception]:
        for thread in self._threads:
            thread.join(120)
        return [self.answers[number] for number in range(len(self._threads))]


def command_lines(top: int) -> dict[int, list[str]]:
    found = {}
    for pid in descendants(top):
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
    return found


def servers(top: int) -> dict[int, int]:
    """node -> process of `moesaic serve` below a process, by what --node-rank says or the environment that it has."""
    found = {}
    for pid, words in command_lines(top).items():
        if "serve" in words and "moesaic" in words and "node" not in words:
            found[node_of(pid, words)] = pid
    return found


def node_of(pid: int, words: list[str]) -> int:
    if "--node-rank" in words:
        return int(words[words.index("--node-rank") + 1])
    variables = dict(part.split("=", 1) for part in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in part)
    return int(variables.get("SLURM_NODEID") or variables["RANK"])


def ranks(server: int) -> dict[int, int]:
    """rank -> process, below a `moesaic serve`."""
    found = {}
    for pid, words in command_lines(server).items():
        if "engine.process.rank_process" in words:
            found[int(words[words.index("--rank") + 1])] = pid
    return found


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def gone(pids: list[int], timeout: float = 30.0) -> None:
    until(lambda: not [pid for pid in pids if alive(pid)], timeout, f"{pids} have ended")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_code(process: Any, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is not None, f"still running after {timeout} s"
    return int(process.returncode)
