"""`moesaic launch ssh`, its connections replaced by a shell of this machine: nodes of unequal numbers of ranks on one
address, of IPv4 and of IPv6, and a head that is lost and comes back."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import READY, Streams, complete, gone, kill, ranks, servers, wait_code, wait_mode
from ports import free_port, free_ports
from served import descendants, until

from moesaic import LLM, SamplingParams

pytestmark = [pytest.mark.launchers, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


def has(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


@contextmanager
def launched(tmp_path: Path, address: str, *words: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The server's URL, and the process of the script."""
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/bash\nexec bash -c "$2"\n')  # a host, and a line for its shell
    shell.chmod(0o755)
    port = free_port()
    command = [sys.executable, "-m", "moesaic", "launch", "ssh", "--print", "--nodes", "2", "--host", address]
    command += ["--hosts", f"{address},{address}", "--port", str(port), "--rpc-port", str(free_ports(8))]
    command += ["--startup-timeout", "120", *words, "--", "--dtype", "float32", "--num-gpu-blocks-override", "512"]
    script = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    log = tmp_path / "launch.log"
    with log.open("wb") as output:
        line = ["env", f"SSH={shell}", "bash", "-c", script]
        process = subprocess.Popen(line, stdout=output, stderr=output, cwd=ROOT, start_new_session=True)
    try:
        yield (f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"), process
    finally:
        below = descendants(process.pid)
        process.kill()
        process.wait(10)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        gone(below)
        sys.stderr.write(log.read_text())


def alone(count: int, tokens: int) -> list[list[int]]:
    """What one rank in this process says."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    with LLM(dtype="float32") as llm:
        outputs = llm.generate([f"Once upon a time there were {number} foxes" for number in range(count)], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_two_and_one_ranks_on_one_address(tmp_path: Path, address: str) -> None:
    if not has(address):
        pytest.skip(f"this machine has no {address}")
    with launched(tmp_path, address, "--ranks-per-node", "2,1") as (url, process):
        wait_mode(url, "full")
        found = {node: sorted(ranks(server)) for node, server in servers(process.pid).items()}
        assert found == {0: [0, 1], 1: [2]}
        expected = Streams(url).finish()
        assert expected == alone(4, 200)

        running = Streams(url)
        kill(ranks(servers(process.pid)[0])[1], ranks(servers(process.pid)[1])[2])  # one on each
        assert running.finish() == expected
        wait_mode(url, "full")

        before = servers(process.pid)
        kill(before[0])  # the head: the other one waits for it, and meets it again
        until(lambda: servers(process.pid).get(0, before[0]) != before[0], READY, "it was started again")
        wait_mode(url, "full")
        assert {node: sorted(ranks(server)) for node, server in servers(process.pid).items()} == found
        assert complete(url) == expected[0]

        running = Streams(url)
        process.send_signal(signal.SIGTERM)
        assert running.finish() == expected
        assert wait_code(process, 60) == 0
