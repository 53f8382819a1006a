"""A job of two nodes in a real Slurm, from the script that `moesaic launch slurm` prints."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cluster import READY, alive, kill
from host_servers import need_hosts
from served import descendants, until
from slurm_farm import Farm, slurm_farm

pytestmark = [pytest.mark.launchers, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
STREAMS, TOKENS = 4, 400


def of_node(farm: Farm, node: int, word: str) -> dict[int, list[str]]:
    """Processes below a node's slurmd, and of its steps, whose command line has this word."""
    listed = subprocess.run(
        ["ip", "netns", "pids", f"moesaic-{os.getpid()}-{node + 1}"], capture_output=True, text=True
    ).stdout.split()
    found = {}
    for pid in map(int, listed):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if word in words and alive(pid):
                found[pid] = words
    return found


def ask(farm: Farm, path: str, body: dict[str, object] | None = None) -> object:
    """On the head's own host, where it answers on loopback."""
    command = ["curl", "-s", "--noproxy", "*", "-m", "100", f"http://127.0.0.1:8000{path}"]
    if body is not None:
        command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    try:
        return json.loads(farm.hosts.run(1, command, 120.0))
    except (RuntimeError, ValueError):  # it does not answer yet
        return {}


class Streams:
    """Requests that run while something happens; `finish` waits for what they said."""

    def __init__(self, farm: Farm) -> None:
        self._found: dict[int, list[int]] = {}
        self._farm = farm
        self._threads = [threading.Thread(target=self._one, args=(number,)) for number in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _one(self, number: int) -> None:
        body = {
            "prompt": f"Once upon a time there were {number} foxes", "max_tokens": TOKENS, "temperature": 0.0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answer = ask(self._farm, "/v1/completions", body)
        if isinstance(answer, dict) and "choices" in answer:
            self._found[number] = answer["choices"][0]["token_ids"]

    def running(self) -> Streams:
        self._farm_is_at_work()
        return self

    def _farm_is_at_work(self) -> None:
        def look() -> bool:
            text = self._farm.hosts.run(1, ["curl", "-s", "--noproxy", "*", "http://127.0.0.1:8000/metrics"])
            lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
            return sum(float(line.split()[-1]) for line in lines) > 0 or len(self._found) == STREAMS

        until(look, 30, "requests run")

    def finish(self) -> list[list[int]]:
        for thread in self._threads:
            thread.join(150)
        return [self._found.get(number, []) for number in range(STREAMS)]


def wait_mode(farm: Farm, wanted: str) -> None:
    def look() -> bool:
        answer = ask(farm, "/ready")
        return isinstance(answer, dict) and answer.get("mode") == wanted

    until(look, READY, f"the server is {wanted}: {farm.logs()}")


def script_of(*words: str) -> str:
    command = [sys.executable, "-m", "moesaic", "launch", "slurm", "--print", "--startup-timeout", "120", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_a_job_of_two_nodes_serves_survives_and_drains() -> None:
    need_hosts()
    with slurm_farm(2) as farm:
        text = script_of("--nodes", "2", "--ranks-per-node", "1", "--", "--dtype", "float32")
        output = farm.root / "job.log"
        options = ["--chdir", str(ROOT), "--output", str(output)]
        job = farm.run("sbatch", "--parsable", *options, text=text).strip()
        wait_mode(farm, "full")
        assert (
            "node 1 of 2 (SLURM_NODEID, SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST), ranks 1 to 1" in output.read_text()
        )
        expected = Streams(farm).finish()

        running = Streams(farm).running()  # the ranks of one node
        kill(*of_node(farm, 1, "engine.process.rank_process"))
        assert running.finish() == expected
        wait_mode(farm, "full")

        before = of_node(farm, 1, "serve")
        running = Streams(farm).running()  # all of the server on one node, but for the process that Slurm has started
        [node] = of_node(farm, 1, "node")
        kill(*descendants(node))
        assert running.finish() == expected
        until(lambda: of_node(farm, 1, "serve").keys() - before.keys(), READY, "it was started again")
        wait_mode(farm, "full")
        assert Streams(farm).finish() == expected

        running = Streams(farm).running()  # a whole node, Slurm's daemons too
        farm.hosts.kill(2)
        assert running.finish() == expected
        wait_mode(farm, "degraded")

        assert Streams(farm).finish() == expected
        farm.run("scancel", job)
        until(lambda: not of_node(farm, 0, "moesaic"), 60, "the job has ended")
        assert "Traceback" not in output.read_text()


def test_scancel_drains_both_nodes() -> None:
    need_hosts()
    with slurm_farm(2) as farm:
        text = script_of("--nodes", "2", "--ranks-per-node", "1", "--", "--dtype", "float32")
        output = farm.root / "job.log"
        job = farm.run("sbatch", "--parsable", "--chdir", str(ROOT), "--output", str(output), text=text).strip()
        wait_mode(farm, "full")
        running = Streams(farm).running()
        farm.run("scancel", job)
        answers = running.finish()
        assert [len(answer) for answer in answers] == [TOKENS] * STREAMS
        until(lambda: not of_node(farm, 0, "moesaic") and not of_node(farm, 1, "moesaic"), 60, "the job has ended")
        assert "event=host_lost" not in output.read_text(), output.read_text()
