"""The process of one rank: `python -m engine.process.rank_process --plan PLAN.json --rank R --runtime-dir DIR --memory
FILE`.

In DIR or FILE (engine/process/places.py): front.ipc (the front's socket, see front/wire.py), bell-R.ipc (doorbells),
loading-R and, once loaded, beat-R (heartbeats), and what ep/transport/shm_rendezvous.py writes for the ranks to meet.
Exit codes: 0 after a Shutdown message, or when a Membership leaves this rank out; 3 an error; 4 another rank is lost
and the front has not said who is left; 5 it was started again, and its weights are away or are not those of the start.
Before 3, 4 and 5 the front is told.

Signals: SIGTERM and SIGINT are ignored, because a terminal sends them to all processes at once and the front is to end
the ranks in order (Shutdown). When the parent dies, the kernel kills this process.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.process.console import drain_console, guard_console
from engine.process.malloc import tune_malloc
from engine.process.orphan import die_with_parent

LOOP = "engine.process.rank_loop"
STORE = "engine.process.rank_store"


def main(begun: object = None) -> None:
    """begun: what `begin` or `get_ready` gave."""
    options = _parsed(sys.argv[1:])
    guard_console()
    die_with_parent(options.parent)
    tune_malloc()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_loop()
    code = importlib.import_module(LOOP).run(options, begun)
    drain_console()
    # Not sys.exit: the device thread may still wait for a lost peer, and nothing here needs the interpreter's clean-up.
    os._exit(code)


def begin(words: Sequence[str]) -> object:
    """Do ahead, in the process that is going to be this rank, what needs no torch. words: its command line."""
    options = _parsed(words)
    return importlib.import_module(STORE).begin(options.plan, options.runtime_dir, options.memory)


def get_ready(architecture: str, words: Sequence[str]) -> object:
    """Do ahead what can be done before a rank of this model is asked for (engine/process/standby_process.py). words:
    its command line, but for the rank."""
    import_loop(architecture)
    return importlib.import_module(LOOP).rehearse(_parsed(words))


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.process.rank_process", description="one rank of a Moesaic server")
    parser.add_argument("--plan", type=Path, required=True, help="the resolved plan, as JSON")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--memory", type=Path, help="what the server's processes share in memory, as JSON")
    parser.add_argument("--parent", type=int, help="process id of the parent; a rank does not outlive it")
    parser.add_argument("--network", type=Path, help="how ranks of several machines reach each other, as JSON")
    parser.add_argument("--join", action="store_true", help="the others are at work: wait to be told when to join them")
    parser.add_argument(
        "--front", help="where the front of another machine is, as tcp://HOST:PORT; default: the one here"
    )
    return parser.parse_args(words)


def import_loop(architecture: str = "") -> None:
    """Import what a rank needs, once per process; also a model's modules, where its architecture is named. What comes
    of it is never garbage: it is not looked through while it grows, nor later."""
    gc.disable()
    try:
        loop = importlib.import_module(LOOP)
        if architecture:
            loop.prepare(architecture)
    finally:
        gc.enable()
    gc.freeze()


if __name__ == "__main__":
    main()
