"""Several hosts on one machine: Linux network namespaces on a switch, each with an address and a limited bandwidth.

    .venv/bin/python benchmarks/hosts.py --hosts 2 --mbit 400 -- COMMAND ...

runs COMMAND on every host at once, prefixes its lines with the host, and ends when all have ended or one has failed. In
COMMAND {host} stands for the host's number, {address} for its address and {head} for that of host 0.

The hosts share disks, memory and host name with this machine and with each other; nothing else reaches them. Needs root
and iproute2. Processes on a host are killed when this process ends, however it ends; namespaces that a killed process has
left are removed by the next start (their names carry its process id).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

NAME = re.compile(r"moesaic-(\d+)-(?:net|\d+)")
SEGMENT_BYTES = (
    64 << 10
)  # of TCP, before the device cuts it into packets: as cards do, which costs the processor little
BURST_BYTES = 80 << 10  # what may leave at once after a pause: little more than one of these with its headers
QUEUE_SECONDS = 0.3  # a queue so long that nothing is dropped: the limit is all that is to be measured
KILL_SECONDS = 5.0


def why_not() -> str | None:
    """Why this machine cannot make hosts; None: it can."""
    for tool in ("ip", "tc", "setpriv"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"moesaic-{os.getpid()}-net"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _remove(probe)
    return None


def namespaces() -> list[str]:
    """Those that this file makes, of every process."""
    listed = _run("ip", "netns", "list").split("\n")
    return [name for line in listed if line and NAME.fullmatch(name := line.split()[0])]


def remove_leftovers() -> list[str]:
    """Remove the namespaces of processes that are no more; their names."""
    removed = []
    for name in namespaces():
        match = NAME.fullmatch(name)
        assert match is not None
        if not Path(f"/proc/{match[1]}").exists():
            _remove(name)
            removed.append(name)
    return removed


class Hosts:
    """A context manager. Hosts are numbered from 0; one process makes at most one set at a time.

    mbit: megabits per second that a host can send (and receive, when there are more than two); None: no limit.
    """

    def __init__(self, num_hosts: int = 2, mbit: float | None = None) -> None:
        if not 1 <= num_hosts <= 200:
            raise ValueError(f"hosts must be 1 to 200, not {num_hosts}")
        reason = why_not()
        if reason is not None:
            raise ValueError(f"cannot make hosts: {reason}")
        remove_leftovers()
        self._switch = f"moesaic-{os.getpid()}-net"
        self._names = [f"moesaic-{os.getpid()}-{host}" for host in range(num_hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(num_hosts)]
        try:
            self._make()
            self.limit(mbit)
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "name", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for host, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            peer = ["peer", "name", f"port{host}", "netns", self._switch]
            _run("ip", "link", "add", "name", "eth0", "netns", name, "type", "veth", *peer)
            _run("ip", "-n", self._switch, "link", "set", f"port{host}", "master", "switch", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "eth0", "gso_max_size", str(SEGMENT_BYTES), "up")

    def limit(self, mbit: float | None) -> None:
        """From now on."""
        devices = [(name, "eth0") for name in self._names]
        if len(self._names) > 2:
            devices += [(self._switch, f"port{host}") for host in range(len(self._names))]
        for name, device in devices:
            if mbit is None:
                subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", device, "root"], capture_output=True)
                continue
            limit = ["rate", f"{mbit}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_SECONDS * 1000:g}ms"]
            _run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "handle", "1:", "tbf", *limit)

    def cut(self, host: int) -> None:
        """Its network is gone, without a word: nothing that it sends arrives, and nothing reaches it."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def mute(self, host: int) -> None:
        """What it sends is dropped, without a word; what is sent to it comes. Until `limit`."""
        limit = ["rate", "8bit", "burst", "1", "limit", "1"]  # no packet is so short
        _run("tc", "-n", self._names[host], "qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "tbf", *limit)

    def mend(self, host: int) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "master", "switch")

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """As subprocess.Popen. Call it in the main thread: the process is killed when the thread that started it ends."""
        whole = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._names[host], *command]
        return subprocess.Popen(whole, **options)

    def run(self, host: int, command: Sequence[str], timeout: float = 60.0) -> str:
        """Its output. RuntimeError with what it said when it fails."""
        process = self.start(host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode:
            raise RuntimeError(f"host {host}: {' '.join(command)}: {err.strip()}")
        return str(out)

    def kill(self, host: int) -> None:
        """Every process on it, as when the machine loses power but for its kernel, which says goodbye."""
        _kill(self._names[host])

    def close(self) -> None:
        """Kill what runs on the hosts and remove them. Calling it again does nothing."""
        present = set(namespaces())
        for name in (*self._names, self._switch):
            if name in present:
                _remove(name)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _remove(name: str) -> None:
    _kill(name)
    # Its interfaces, their other ends and the limits on them go with it.
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _kill(name: str) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        pids = [int(word) for word in listed.stdout.split()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


# ---- the script ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=float, help="megabits per second of each host; default: no limit")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")
    options = parser.parse_args()
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        parser.error("no command is given")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        with Hosts(options.hosts, options.mbit) as hosts:
            sys.exit(_run_everywhere(hosts, words))
    except ValueError as error:
        print(f"hosts: {error}", file=sys.stderr)
        sys.exit(2)


def _leave(number: int, frame: FrameType | None) -> None:
    """Through every `finally`."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _run_everywhere(hosts: Hosts, words: Sequence[str]) -> int:
    """The first exit code that is not 0; the others are ended then."""
    running = []
    for host, address in enumerate(hosts.addresses):
        fill = {"{host}": str(host), "{address}": address, "{head}": hosts.addresses[0]}
        command = [re.sub(r"\{(?:host|address|head)\}", lambda match: fill[match[0]], word) for word in words]  # noqa: B023
        process = hosts.start(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        reader = threading.Thread(target=_print_lines, args=(host, process), daemon=True)
        reader.start()
        running.append((process, reader))
    code = 0
    while running and not code:
        time.sleep(0.05)
        code = next((process.returncode for process, _ in running if process.poll()), 0)
        running = [(process, reader) for process, reader in running if process.poll() is None or reader.is_alive()]
    return code if code >= 0 else 128 - code


def _print_lines(host: int, process: subprocess.Popen[Any]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"host {host}: {line}", end="", flush=True)


if __name__ == "__main__":
    main()
