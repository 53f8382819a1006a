"""The process of one rank: `python -m engine.rank_process --plan PLAN.json --rank R --runtime-dir DIR`.

In DIR: front.ipc (the front's socket, see engine/wire.py), bell-R.ipc (doorbells), loading-R and, once loaded, beat-R
(heartbeats), and what ep/table.py leaves there for the ranks to meet. Exit codes: 0 after a Shutdown message, or when a
Membership leaves this rank out; 3 an error; 4 another rank is lost and nobody has said who is left. Before 3 and 4 the
front is told.

Signals: SIGTERM and SIGINT are ignored, because a terminal sends them to all processes at once and the front is to end
the ranks in order (Shutdown). When the parent dies, the kernel kills this process.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from configs.engine import Plan
from configs.hosts import Network
from engine.build import build_rank
from engine.cores import keep_to_cores
from engine.device import own_device, use_device
from engine.heartbeat import Heartbeat
from engine.memory import keep_freed_memory
from engine.messages import Membership, Outputs, RankFailed
from engine.orphan import die_with_parent, life_of
from engine.progress import LoadProgress
from engine.settle import settle
from engine.team import Groups, Meet, Opening, OpeningThread
from engine.wire import RankSocket, ZmqDoorbell, sleep_until_called
from ep.protocol import PeerLost
from ep.remote import remote_groups
from ep.table import choose, make_groups

EXIT_ERROR = 3
EXIT_PEER_LOST = 4
THINKING_SECONDS = 0.001  # the most that the thread of the balancer keeps the interpreter from a step
SLEEP_SECONDS = 10.0  # an idle rank looks up this often, though nothing has called it


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.rank_process", description="one rank of a Moesaic server")
    parser.add_argument("--plan", type=Path, required=True, help="the resolved plan, as JSON")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, help="process id of the parent; a rank does not outlive it")
    parser.add_argument("--network", type=Path, help="how ranks of several machines reach each other, as JSON")
    parser.add_argument("--join", action="store_true", help="the others are at work: wait to be told when to join them")
    options = parser.parse_args()
    die_with_parent(options.parent)
    keep_freed_memory()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"rank {options.rank}: %(message)s")
    code = 0
    network = None
    if options.network is not None:
        network = msgspec.json.decode(options.network.read_bytes(), type=Network)
    socket = RankSocket(_front_of(network, options.rank, options.runtime_dir), options.rank)
    try:
        plan = msgspec.json.decode(options.plan.read_bytes(), type=Plan)
        _serve(plan, options.rank, options.runtime_dir, socket, network, options.join)
    except PeerLost as error:
        code = _report(socket, options.rank, error, EXIT_PEER_LOST)
    except Exception as error:
        code = _report(socket, options.rank, error, EXIT_ERROR)
    socket.close()
    sys.stderr.flush()
    # Not sys.exit: the device thread may still wait for a lost peer, and nothing here needs the interpreter's clean-up.
    os._exit(code)


def _is_remote(network: Network | None, rank: int) -> bool:
    """On another machine than the front."""
    return network is not None and network.addresses[rank] != network.head


def _front_of(network: Network | None, rank: int, runtime_dir: Path) -> str:
    return network.front if network is not None and _is_remote(network, rank) else f"ipc://{runtime_dir}/front.ipc"


def _serve(
    plan: Plan, rank_id: int, runtime_dir: Path, socket: RankSocket, network: Network | None, join: bool
) -> None:
    def bell_of(rank: int) -> str:
        return f"ipc://{runtime_dir}/bell-{rank}.ipc" if network is None else network.bell(rank)

    def bells(alive: Sequence[bool]) -> list[str]:
        return [bell_of(rank) for rank, lives in enumerate(alive) if lives]

    loading = Heartbeat(runtime_dir / f"loading-{rank_id}")
    if plan.pin_ranks:
        keep_to_cores(rank_id if network is None else network.place(rank_id), plan.threads_per_rank)
    bell = ZmqDoorbell(bells([True] * plan.data_parallel_size), rank_id)
    if plan.eplb is not None:
        sys.setswitchinterval(THINKING_SECONDS)
    # One bar is enough; every rank says in the end what it has read.
    progress = LoadProgress(f"rank {rank_id}", sys.stderr, leads=rank_id == 0)
    meet = _meet_in(plan, rank_id, runtime_dir) if network is None else _meet_at(plan, network, rank_id)
    rank = build_rank(plan, rank_id, meet, bell, progress, join)
    progress.finish(rank.ready.bytes_read)
    if plan.cudagraph_capture_sizes and not join and network is None:
        settle(rank, runtime_dir, rank_id, plan.data_parallel_size)
    gc.collect()
    gc.freeze()  # the model's objects are never garbage; do not look through them again
    heartbeat = Heartbeat(runtime_dir / f"beat-{rank_id}")
    loading.close()
    remote = _is_remote(network, rank_id)
    socket.send(structs.replace(rank.ready, process=life_of(os.getpid())) if remote else rank.ready)
    was_asleep = True
    while not rank.done:
        for message in socket.poll(0):
            if isinstance(message, Membership):
                bell.reach(bells(message.alive))
            rank.submit(message)
        outputs = rank.step()
        joined = rank.take_joined()
        if joined is not None:  # before the tokens of that epoch
            socket.send(joined)
        if outputs or rank.asleep != was_asleep:  # also when falling asleep: the front's gauges should not go stale
            socket.send(Outputs(rank_id, outputs, rank.stats, time.monotonic()))
        was_asleep = rank.asleep
        for news in rank.take_news():
            socket.send(news)
        pause = rank.pause(SLEEP_SECONDS)
        if pause > 0:
            sleep_until_called(socket, bell, 0.0 if rank.prepare() else pause)
    rank.close()
    heartbeat.close()
    bell.close()


def _meet_in(plan: Plan, own: int, runtime_dir: Path) -> Meet:
    """Ranks of one machine meet in a directory."""

    def meet(epoch: int, rank: int, size: int) -> Opening:
        # A server that began with one rank has grown.
        backend = choose("auto", size) if plan.all2all_backend == "local" else plan.all2all_backend

        def open_groups(stop: Callable[[], bool]) -> Groups:
            use_device(own_device(plan.device, own, plan.ranks_per_machine))
            return Groups(*make_groups(backend, runtime_dir, rank, size, plan.exchange_timeout, epoch, stop))

        return OpeningThread(open_groups)

    return meet


def _meet_at(plan: Plan, network: Network, rank_id: int) -> Meet:
    """Ranks of several machines meet in the head's store."""

    def meet(epoch: int, rank: int, size: int) -> Opening:
        def open_groups(stop: Callable[[], bool]) -> Groups:
            address = network.addresses[rank_id]
            return Groups(*remote_groups(network.store, address, rank, size, plan.exchange_timeout, epoch, stop))

        return OpeningThread(open_groups)

    return meet


def _report(socket: RankSocket, rank_id: int, error: Exception, code: int) -> int:
    if not isinstance(error, ValueError):  # that is bad input, and its text says it all
        traceback.print_exc(file=sys.stderr)
    first_line = (str(error).splitlines() or [""])[0]
    try:
        socket.send(RankFailed(rank_id, f"rank {rank_id}: {type(error).__name__}: {first_line}"))
    except ConnectionError as unheard:
        print(f"rank {rank_id}: {unheard}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
