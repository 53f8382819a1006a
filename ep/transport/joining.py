"""How ranks meet in a store, and how gloo connects each with every other.

Connecting may fail by nature: a connection attempt runs into a time-out on a busy machine, or is closed by the network.
gloo tries no connection twice, and a failure that one rank sees may be a complete mesh to another. So every rank writes
into the store how its try went and reads what the others wrote. Unless all of them are connected, all try again, in a
part of the store that no earlier try has used.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import dbo.alive as alive
from ep.protocol import PeerLost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
# The longest that each try may take, as shares of the time allowed. The last takes what is left.
TRIES = (1 / 8, 1 / 8, 1 / 4, 1.0)
_GLOO_FACTOR = 5  # gloo waits so many times its time-out for a connection from the other side
_LEAST_SECONDS = 1.0  # gloo's time-out in a try, however short the time allowed: a busy machine needs as much
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02  # seconds between two looks into the store
_SHOWN_SECONDS = 0.25  # a wait that is longer shows for whom


def rendezvous(
    open_store: Callable[[], Store],
    name: str,
    rank: int,
    size: int,
    timeout: float,
    stop: Callable[[], bool] | None = None,
) -> Store:
    """The part `name` of a store, when every rank has signed in there.

    timeout: seconds; stop: asked between two looks, True ends the waiting. Raises PeerLost naming those that did not
    come.
    """
    deadline = time.monotonic() + timeout
    try:
        store: Store = dist.PrefixStore(name, open_store())  # type: ignore[attr-defined]
        store.set(f"here/{rank}", "")
        _await_keys(store, "here", rank, size, deadline, f"in {name}", stop)
    except PeerLost:
        raise
    except RuntimeError as error:
        raise PeerLost((), f"rank {rank} cannot meet the others in {name}: {_first_line(error)}") from error
    return store


def connect(
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    what: str,
    threads: int,
    address: str = LOOPBACK,
    stop: Callable[[], bool] | None = None,
) -> ProcessGroupGloo:
    """The connections of this rank. All ranks are about to call this with the same store, a part of it that is unused.

    timeout: seconds, the bound of joining (a try that has begun may end up to 5 s later) and of every later
    exchange; what: names the group in errors; threads: exchanges under way at once; address: of this machine,
    where the others reach it (it chooses the network interface); stop: as in rendezvous. Raises PeerLost: naming
    ranks that do not answer, or with the addresses and what went wrong at each.
    """
    deadline = time.monotonic() + timeout
    story = ""
    try:
        for number, share in enumerate(TRIES):
            part = dist.PrefixStore(f"try-{number}", store)  # type: ignore[attr-defined]
            left = deadline - time.monotonic()
            mesh, reason = _try(part, rank, size, min(share * timeout, left), threads, address)
            part.set(f"went/{rank}", f"{address} {reason}")
            _await_keys(part, "went", rank, size, deadline, f"in try {number + 1} to join {what}", stop)
            went = [part.get(f"went/{peer}").decode().partition(" ") for peer in range(size)]
            if mesh is not None and not any(wrong for _, _, wrong in went):
                mesh._set_default_timeout(datetime.timedelta(seconds=timeout))
                return mesh
            story = "; ".join(f"rank {peer} at {at}: {wrong or 'ok'}" for peer, (at, _, wrong) in enumerate(went))
            del mesh  # its connections close
    except PeerLost:
        raise
    except RuntimeError as error:  # of the store
        raise PeerLost((), f"rank {rank} could not join {what}: {_first_line(error)}") from error
    raise PeerLost((), f"rank {rank} could not join {what} in {len(TRIES)} tries, the last of which ended so: {story}")


def _await_keys(
    store: Store, key: str, rank: int, size: int, deadline: float, where: str, stop: Callable[[], bool] | None
) -> None:
    """Return when every rank has set its own `key` in the store. Raises PeerLost naming those that have not."""
    began, pause = time.monotonic(), _FIRST_PAUSE
    while not store.check([f"{key}/{peer}" for peer in range(size)]):
        told = stop is not None and stop()
        if told or time.monotonic() > deadline:
            absent = tuple(peer for peer in range(size) if not store.check([f"{key}/{peer}"]))
            if not absent:
                return
            waited = "was told not to wait" if told else f"waited {time.monotonic() - began:.1f} s"
            raise PeerLost(absent, f"rank {rank} {waited} for them {where}")
        if time.monotonic() - began > _SHOWN_SECONDS:
            missing = alive.mask(peer for peer in range(size) if not store.check([f"{key}/{peer}"]))
            alive.waits(alive.AGREEING, began, missing)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _try(
    part: Store, rank: int, size: int, timeout: float, threads: int, address: str
) -> tuple[ProcessGroupGloo | None, str]:
    """(the connections, "") or (None, what went wrong)."""
    if timeout <= 0:
        return None, "no time was left"
    bound = max(_LEAST_SECONDS, timeout / _GLOO_FACTOR)
    mine_G, met_G, each = torch.full((size,), rank), torch.empty(size, dtype=torch.int64), [1] * size
    mesh: Any = None
    try:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = datetime.timedelta(seconds=bound)
        options._threads = threads
        mesh = dist.ProcessGroupGloo(part, rank, size, options)
        # To gloo a connection stands as soon as it has been accepted, by whomever.
        mesh.alltoall_base(met_G, mine_G, each, each).wait()
    except RuntimeError as error:
        del mesh  # before the tensors: gloo knows only their addresses
        return None, _first_line(error)
    met = met_G.tolist()
    return (mesh, "") if met == list(range(size)) else (None, f"met ranks {met}")


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
