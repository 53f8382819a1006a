"""TCP ports that a test may give to a server which binds them later: below those that the kernel itself gives out, so
that no connection of another test has taken one by then."""

import random
import socket
from contextlib import ExitStack

FIRST, LAST = 12000, 31000
_random = random.SystemRandom()  # not the one that tests seed: their ports would be the same in all processes


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` neighbours that are free on 127.0.0.1 now."""
    for _ in range(1000):
        first = _random.randrange(FIRST, LAST - count)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first
    raise OSError(f"no {count} free ports in a row from {FIRST} to {LAST}")
