"""A process that others are forked from, or that becomes one: `python -m engine.process.fork_process --parent PID`.

It imports once what ranks of a model need, and then forks the processes of a server that need it: ranks, and those
that wait to become one (launch/forks.py asks for them). It runs one thread, so that nothing is lost by forking, holds
no weights, and computes nothing. What it forks is its parent's child, not its own: the process between them ends at
once, and the parent takes what is left behind (PR_SET_CHILD_SUBREAPER). So its own end costs nothing.

Its standard input is a socket of messages. The first one that comes is a `Told`, as JSON: until then it loads
torch's libraries, and imports what ranks of any model need; where those have read another environment than that which
it is told of, it begins anew. If what it is told has a command line, this process runs it from then on, and forks
nothing. Else it says `READY` there. Each request is the module and the words of a command line, with two descriptors: a
socket on which the new process says its process id, and waits for `GO` before it begins, and its standard input.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from configs.env import BEFORE_PLAN, OF_RANKS, fits_before_plan, read_env, set_variables, take_environment
from engine.process.code_ahead import CodeAhead
from engine.process.console import say
from engine.process.orphan import die_with_parent
from engine.process.standby_process import show_command
from engine.process.torch_ahead import defer_modules, import_beside

READY, GO = b"r", b"g"
MOST_BYTES = 1 << 18  # of a message
NUM_DESCRIPTORS = 2
ORPHAN_SECONDS = 5.0
JOINED_SECONDS = 0.5
LOOK_SECONDS = 0.0005


class Told(NamedTuple):
    """module: what ranks run, like rank_process.py; architecture: of the model; environment: variables; words: the
    command line of the one rank that this process becomes, None: it forks them."""

    module: str
    architecture: str
    environment: dict[str, str]
    words: list[str] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.process.fork_process", description="ranks are forked from it")
    parser.add_argument("--room", help="for the command lines of its forks")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--told", type=_told, help="what it had been told when it began anew, without variables")
    parser.add_argument("--plainly", action="store_true", help="import torch whole, and beside nothing")
    options = parser.parse_args()
    die_with_parent(options.parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # as a rank does
    with socket.socket(fileno=os.dup(0)) as supervisor:
        _take_input(os.open(os.devnull, os.O_RDONLY))
        told, begun = _import_all(supervisor, options.told, options.plainly)
        if told is None:
            return
        asked = _serve(supervisor, options.parent) if told.words is None else (told.module, told.words)
    if asked is not None:
        module, words = asked
        sys.argv[1:] = words
        show_command([sys.executable, "-P", "-m", module, *words])
        main = importlib.import_module(module).main
        main() if begun is None else main(begun)


def _import_all(supervisor: socket.socket, known: Told | None, plainly: bool) -> tuple[Told | None, object]:
    """Also what has been begun of the rank that this process becomes. None: it is not wanted any more. known: what it
    has been told; None: it is still to come. plainly: all is imported, and nothing beside anything else."""
    if plainly:
        assert known is not None
        importlib.import_module(known.module).import_loop(known.architecture)
        return known, None
    gc.disable()  # import_loop enables it
    set_variables(BEFORE_PLAN if known is None else OF_RANKS)
    defer_modules()
    ahead = CodeAhead(read_env().cache_root)
    with ahead.used():
        import_beside(ahead.read)
        told = _hear(supervisor) if known is None else known
        if told is None:
            return None, None
        module = importlib.import_module(told.module)
        begun = None if told.words is None else module.begin(told.words)
        try:
            module.import_loop(told.architecture)
        except Exception as error:
            say("imports_begin_anew", error=repr(error))
            _begin_anew(supervisor, told, "--plainly")
    ahead.keep()
    return told, begun


def _hear(supervisor: socket.socket) -> Told | None:
    message = supervisor.recv(MOST_BYTES)
    if not message:
        return None
    told = Told(*json.loads(message))
    take_environment(told.environment)
    if not fits_before_plan(told.environment):
        _begin_anew(supervisor, told)
    return told


def _begin_anew(supervisor: socket.socket, told: Told, *options: str) -> None:
    """This process from its beginning, in the environment that it has been told of, and has taken over."""
    os.dup2(supervisor.fileno(), 0)
    words = [*sys.argv[1:], *options]
    if "--told" not in words:
        words += ["--told", json.dumps(told._replace(environment={}))]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "engine.process.fork_process", *words])


def _told(text: str) -> Told:
    return Told(*json.loads(text))


def _num_threads() -> int:
    """One that has been joined is a thread of the system's for a moment more."""
    deadline = time.monotonic() + JOINED_SECONDS
    while (threads := len(list(Path("/proc/self/task").iterdir()))) > 1 and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return threads


def _serve(supervisor: socket.socket, parent: int) -> tuple[str, list[str]] | None:
    """Fork at each request. Returns in the forks, with what was asked for, and at the end: None."""
    threads = _num_threads()
    if threads > 1:  # of a library: only one of them would go on in a fork
        say("no_forks", threads=threads)
        return None
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
