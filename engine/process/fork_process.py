"""A process that others are forked from: `python -m engine.process.fork_process --module=MODULE --architecture NAME
--parent PID`.

It imports once what ranks of this model need, and then forks the processes of a server that need it: ranks, and those
that wait to become one (launch/forks.py asks for them). It runs one thread, so that nothing is lost by forking, holds
no weights, and computes nothing. What it forks is its parent's child, not its own: the process between them ends at
once, and the parent takes what is left behind (PR_SET_CHILD_SUBREAPER). So its own end costs nothing.

Its standard input is a socket of messages. It says `READY` there. Each request is the module and the words of a command
line, with two descriptors: a socket on which the new process says its process id, and waits for `GO` before it begins,
and its standard input.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from engine.process.console import say
from engine.process.deferred import OF_TORCH, defer
from engine.process.orphan import die_with_parent
from engine.process.standby_process import show_command

READY, GO = b"r", b"g"
MOST_BYTES = 1 << 16  # of a request
NUM_DESCRIPTORS = 2
ROOM = " " * 2048  # the last word of its command line, where the kernel finds those of the processes it becomes
ORPHAN_SECONDS = 5.0
LOOK_SECONDS = 0.0005


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.process.fork_process", description="ranks are forked from it")
    parser.add_argument("--module", required=True, help="what ranks run: like rank_process.py")
    parser.add_argument("--architecture", required=True, help="of the model")
    parser.add_argument("--room", help="for the command lines of its forks")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    options = parser.parse_args()
    die_with_parent(options.parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # as a rank does
    defer(OF_TORCH)
    importlib.import_module(options.module).import_loop(options.architecture)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:  # of a library: only one of them would go on in a fork
        say("no_forks", threads=threads)
        return
    asked = _serve(options.parent)
    if asked is not None:
        module, words = asked
        sys.argv[1:] = words
        show_command([sys.executable, "-P", "-m", module, *words])
        importlib.import_module(module).main()


def _serve(parent: int) -> tuple[str, list[str]] | None:
    """Fork at each request. Returns in the forks, with what was asked for, and at the end: None."""
    with socket.socket(fileno=os.dup(0)) as supervisor:
        _take_input(os.open(os.devnull, os.O_RDONLY))
        supervisor.send(READY)
        while True:
            request, files, _, _ = socket.recv_fds(supervisor, MOST_BYTES, NUM_DESCRIPTORS)
            if not request:
                return None
            between = os.fork()
            if between:
                for file in files:
                    os.close(file)
                os.waitpid(between, 0)
                continue
            if os.fork():
                os._exit(0)
            break
    module, *words = json.loads(request)
    os.setpgid(0, 0)  # as launch/processes.py starts them
    answers, stdin = files
    _take_input(stdin)
    return (module, words) if _begin(answers, parent) else None


def _begin(answers: int, parent: int) -> bool:
    """Whether this process is wanted."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    with socket.socket(fileno=answers) as asking, contextlib.suppress(OSError):
        asking.settimeout(ORPHAN_SECONDS)
        asking.send(b"%d" % os.getpid())
        return asking.recv(len(GO)) == GO
    return False


def _take_input(file: int) -> None:
    os.dup2(file, 0)
    os.close(file)


if __name__ == "__main__":
    main()
