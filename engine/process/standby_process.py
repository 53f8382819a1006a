"""A process that waits to become a rank: `python -m engine.process.standby_process --module=MODULE
--architecture NAME --words JSON --parent PID`.

It has imported whatever a rank imports, and has rehearsed: what takes long before a rank serves is over, where weights
lie in a store. It maps that store and holds no cache. Its standard input is a socket: it says `READY` there, and then
waits for one line, the command line of a rank as JSON. From then on it is that rank, also in what `ps` shows. When the
socket ends first, so does it. It gets ready on a thread of low priority, so that the ranks keep their cores; what the
thread has loaded is the process's, whose main thread has the usual priority.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.process.orphan import die_with_parent

READY = b"r"
MOST_BYTES = 1 << 16  # of a command line
NICENESS = 5  # the ranks come first, but another loss may be near: with 10 it is not ready again in time


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.process.standby_process", description="waits to become a rank")
    parser.add_argument("--module", required=True, help="what it becomes: like rank_process.py")
    parser.add_argument("--architecture", required=True, help="of the model")
    parser.add_argument("--parent", type=int, help="process id of the parent; this process does not outlive it")
    parser.add_argument("--words", required=True, type=json.loads, help="a rank's command line as it may be, as JSON")
    options = parser.parse_args()
    die_with_parent(options.parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # as a rank does
    module = importlib.import_module(options.module)
    ready = _ready(module.get_ready, options.architecture, options.words)
    if not ready:
        sys.exit(1)
    with socket.socket(fileno=os.dup(0)) as supervisor:
        supervisor.sendall(READY)
        line = _line(supervisor)
    if not line:
        return
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    words = json.loads(line)
    show_command([sys.executable, "-P", "-m", options.module, *words])
    sys.argv[1:] = words
    module.main(ready[0])


def _ready(get_ready: Callable[[str, Sequence[str]], object], architecture: str, words: Sequence[str]) -> list[object]:
    """What `main` goes on with. Empty: there was an error, whose traceback has been written."""
    done: list[object] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)  # on Linux of this thread
        done.append(get_ready(architecture, words))

    thread = threading.Thread(target=run, name="getting ready")
    thread.start()
    thread.join()
    return done


def _line(supervisor: socket.socket) -> bytes:
    """Empty: the socket has ended."""
    line = b""
    while not line.endswith(b"\n"):
        piece = supervisor.recv(MOST_BYTES)
        if not piece:
            return b""
        line += piece
    return line


def show_command(words: list[str]) -> None:
    """Have /proc/PID/cmdline say these words, as far as there is room: it reads them where the kernel has put those
    that the process was started with (proc_pid_stat(5), arg_start and arg_end)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if not 0 < start < end:
        return
    text = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
