"""Where the ranks of several machines meet: `python -m engine.process.store_process --host ADDRESS --port PORT`.

A TCPStore in a process of its own on the head, because any rank may be lost. It holds a few bytes for each rank and
epoch.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.process.console import guard_console, say_text
from engine.process.orphan import die_with_parent

EXIT_BAD_INPUT = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="engine.process.store_process", description="the meeting place of a server's ranks"
    )
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent", type=int, help="process id of the parent; this process does not outlive it")
    options = parser.parse_args()
    guard_console()
    die_with_parent(options.parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the supervisor ends its processes in order
    try:
        # Left to itself the store would listen on every interface of the machine.
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        say_text(f"cannot listen on {options.host}:{options.port}: {error.strerror}")
        sys.exit(EXIT_BAD_INPUT)
    store = TCPStore(
        options.host, options.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    while store is not None:  # killed by the supervisor
        signal.pause()


if __name__ == "__main__":
    main()
