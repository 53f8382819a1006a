"""Hosts made of network namespaces: they reach each other at the speed that was asked for, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from host_servers import need_hosts
from hosts import Hosts, namespaces
from served import descendants, until

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "hosts.py"
SEND = "import socket; s = socket.create_connection(('{head}', 5000), 10); s.sendall(bytes({size})); s.shutdown(1); s.recv(1)"
TAKE = """
import socket, time
listener = socket.create_server(("", 5000))
print("listening", flush=True)
connection, _ = listener.accept()
began, size = time.perf_counter(), 0
while piece := connection.recv(1 << 16):
    size += len(piece)
print(size, time.perf_counter() - began)
"""


def test_hosts_reach_each_other_at_the_speed_of_their_network() -> None:
    need_hosts()
    size = 4 << 20
    with Hosts(2, mbit=200) as hosts:
        taker = hosts.start(0, [sys.executable, "-c", TAKE], stdout=subprocess.PIPE, text=True)
        assert taker.stdout is not None and taker.stdout.readline() == "listening\n"
        hosts.run(1, [sys.executable, "-c", SEND.format(head=hosts.addresses[0], size=size)])
        took, seconds = taker.communicate(timeout=20)[0].split()
        assert int(took) == size
        assert float(seconds) > 0.7 * size * 8 / 200e6  # a burst goes free
        names = {name for name in namespaces() if f"-{os.getpid()}-" in name}
        assert len(names) == 3
        with pytest.raises(RuntimeError, match="host 1: false"):
            hosts.run(1, ["false"])
    assert not names & set(namespaces())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_stays_when_it_is_interrupted(number: signal.Signals) -> None:
    need_hosts()
    command = [
        sys.executable,
        str(SCRIPT),
        "--mbit",
        "100",
        "--",
        "sh",
        "-c",
        "echo {host} at {address}; sleep 60; true",
    ]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    lines = sorted(script.stdout.readline() for _ in range(2))
    assert lines == ["host 0: 0 at 10.77.0.1\n", "host 1: 1 at 10.77.0.2\n"]
    below = descendants(script.pid)
    script.send_signal(number)
    assert script.wait(10) == (-number if number == signal.SIGKILL else 128 + number)
    script.stdout.close()
    mine = f"moesaic-{script.pid}-"
    if number == signal.SIGKILL:
        assert any(name.startswith(mine) for name in namespaces())
        Hosts(1).close()  # the next start cleans up
    assert not [name for name in namespaces() if name.startswith(mine)]
    if number != signal.SIGKILL:
        assert not [pid for pid in below if Path(f"/proc/{pid}/exe").exists()]
    until(lambda: not [pid for pid in below if is_alive(pid)], 5, "its processes have ended")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_script_ends_with_the_first_failure() -> None:
    need_hosts()
    began = time.monotonic()
    command = [sys.executable, str(SCRIPT), "--", "sh", "-c", "test {host} = 0 && exit 7; sleep 60"]
    assert subprocess.run(command, timeout=30).returncode == 7
    assert time.monotonic() - began < 20
    refused = subprocess.run(
        [sys.executable, str(SCRIPT), "--hosts", "0", "--", "true"], capture_output=True, text=True
    )
    assert refused.returncode == 2 and refused.stderr == "hosts: hosts must be 1 to 200, not 0\n"
