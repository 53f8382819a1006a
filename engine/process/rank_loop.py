"""What the process of one rank does (engine/process/rank_process.py): it loads, practises, and turns its loop until it
is told to leave, or cannot go on."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec import Struct, structs

from configs.engine import Plan
from configs.hosts import Network
from dbo.alive import mark
from engine.build import build_rank
from engine.device import own_device, use_device
from engine.process.arrivals import Arrivals
from engine.process.console import say, say_line
from engine.process.cores import Cores
from engine.process.heartbeat import Heartbeat, LoopBeat, beat_once
from engine.process.orphan import life_of
from engine.process.phases import Phases
from engine.process.places import Places
from engine.process.progress import LoadProgress
from engine.process.rank_store import Begun, full_store, open_store, read_plan, start_mapping
from engine.process.warm_up import practise, warm_up
from engine.rank import Rank
from engine.recovery.reading import await_checkpoint
from engine.speculation.plan import planned_facts
from engine.structured.grammars import vocabulary_of
from engine.team import Groups, Meet, Opening, OpeningThread
from ep.protocol import PeerLost
from ep.table import choose, make_groups
from ep.transport.remote import remote_groups
from front.messages import EXIT_WEIGHTS, Membership, Outputs, RankFailed, RankReady, Waiting
from front.wire import RankSocket, ZmqDoorbell, sleep_until_called
from layers.identity import CheckpointError
from models.registry import model_class

log = logging.getLogger("moesaic.rank")

EXIT_ERROR = 3
EXIT_PEER_LOST = 4
THINKING_SECONDS = 0.001  # the most that the thread of the balancer keeps the interpreter from a step
# What the rank's last process has left of its cache is kept for so long: others take it over in their next step.
FORMER_SECONDS = 10.0
VOCABULARY_SECONDS = 30.0  # that a process waits before it reads one, if it is not a rank by then
SLEEP_SECONDS = 0.5  # an idle rank looks up this often, though nothing has called it: its heart beats with its loop
# For weights that are away to come back, when a rank is started again; then the monitor has its turn.
WEIGHTS_SECONDS = 20.0


def prepare(architecture: str) -> None:
    """Import what a rank of this model needs beyond this file; it holds no weights."""
    model_class(architecture)


def rehearse(options: argparse.Namespace) -> Begun | None:
    """Practise as a rank with these options would, and keep nothing of it but the store of weights, mapped. None: there
    is no full one. options: as engine/process/rank_process.py reads them."""
    plan = read_plan(options.plan)
    store = full_store(plan, Places(options.runtime_dir, options.memory))
    if store is None:
        return None
    rank = build_rank(plan, options.rank, join=True, store=store)
    practise(rank, alone=True)
    rank.close()
    start_mapping(store)
    reading = threading.Timer(VOCABULARY_SECONDS, _read_vocabulary, (plan,))
    reading.daemon = True
    reading.start()
    return Begun(store, reading)


def _read_vocabulary(plan: Plan) -> None:
    """Else the rank would, beside its first steps, which would wait for the interpreter."""
    with contextlib.suppress(ValueError):  # requests with grammars are told
        vocabulary_of(plan.model_path, plan.tokenizer_path, planned_facts(plan).vocab_size)


def run(options: argparse.Namespace, begun: Begun | None = None) -> int:
    """The exit code. options: as engine/process/rank_process.py reads them; begun: what `rehearse` gave, or `begin` of
    engine/process/rank_store.py."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"rank {options.rank}: %(message)s")
    code = 0
    if begun is not None and begun.reading is not None:
        begun.reading.cancel()
    network = None
    if options.network is not None:
        network = msgspec.json.decode(options.network.read_bytes(), type=Network)
    places = Places(options.runtime_dir, options.memory)
    socket = RankSocket(options.front or places.socket("front.ipc"), options.rank)
    try:
        plan = read_plan(options.plan)
        start = Start(plan, options.rank, places, network, bool(options.front), options.join, begun)
        _serve(start, socket)
    except CheckpointError as error:
        code = _report(socket, options.rank, error, EXIT_WEIGHTS if options.join else EXIT_ERROR)
    except PeerLost as error:
        code = _report(socket, options.rank, error, EXIT_PEER_LOST)
    except Exception as error:
        code = _report(socket, options.rank, error, EXIT_ERROR)
    socket.close()
    return code


class Start(Struct, frozen=True):
    """What a rank's process was started with. remote: on another machine than the front."""

    plan: Plan
    rank: int
    places: Places
    network: Network | None
    remote: bool
    join: bool
    begun: Begun | None = None

    @property
    def practised(self) -> bool:
        return self.begun is not None and self.begun.reading is not None

    def bells(self, alive: Sequence[bool]) -> list[str]:
        """Where the live ranks hear the doorbell."""
        return [self._bell(rank) for rank, lives in enumerate(alive) if lives]

    def _bell(self, rank: int) -> str:
        return self.places.socket(f"bell-{rank}.ipc") if self.network is None else self.network.bell(rank)


def _serve(start: Start, socket: RankSocket) -> None:
    plan, rank_id, places, network = start.plan, start.rank, start.places, start.network
    phases = Phases()
    loading = Heartbeat(places.file(f"loading-{rank_id}"))
    cores = _cores(start)
    bell = ZmqDoorbell(start.bells([True] * plan.data_parallel_size), rank_id)
    if plan.eplb is not None:
        sys.setswitchinterval(THINKING_SECONDS)
    # One bar is enough; every rank says in the end what it has read.
    progress = LoadProgress(f"rank {rank_id}", sys.stderr, leads=rank_id == 0)
    store = open_store(plan, places) if start.begun is None else start.begun.store
    mapped = store is not None and store.complete
    if start.join and plan.checkpoint and not mapped:
        await_checkpoint(plan.model_path, plan.checkpoint, WEIGHTS_SECONDS, partial(_say_waiting, socket, rank_id))
    phases.end("open")
    meet = _meet(plan, rank_id, places.meetings, network)
    rank = build_rank(plan, rank_id, meet, bell, progress, start.join, store, network, places.caches)
    progress.finish(rank.ready.bytes_read)
    phases.end("build", {"load": rank.ready.load_seconds})
    if store is not None and mapped and start.begun is None:
        start_mapping(store)
    _warm_up(start, rank, stored=store is not None)
    phases.end("practice")
    gc.collect()
    gc.freeze()  # the model's objects are never garbage; do not look through them again
    if store is not None and not mapped:
        start_mapping(store)
    heartbeat = LoopBeat(places.file(f"beat-{rank_id}"))
    loading.close()
    ready = _ready(start, rank)
    arrivals = Arrivals(socket, ready.process)
    socket.send(ready)
    phases.end("rest")
    say("rank_ready", rank=rank_id, pid=os.getpid(), **phases.seconds)
    if cores is not None and network is None:
        rank.on_formed = lambda num_ranks: torch.set_num_threads(cores.share(num_ranks))
    _start_forgetting(rank)
    was_idle = True
    while not rank.done:
        mark()
        for message in arrivals.take():
            if isinstance(message, Membership):
                bell.reach(start.bells(message.alive))
            rank.submit(message)
        arrivals.note(outputs := rank.step())
        joined = rank.take_joined()
        if joined is not None:  # before the tokens of that epoch
            socket.send(joined)
            beat_once(places.file(f"joined-{rank_id}"))
        if outputs or rank.idle != was_idle:  # also when falling asleep: the front's gauges should not go stale
            socket.send(Outputs(rank_id, outputs, rank.stats, time.monotonic()))
        was_idle = rank.idle
        for event in rank.take_events():
            socket.send(event)
        pause = rank.pause(SLEEP_SECONDS)
        if pause > 0:
            sleep_until_called(socket, bell, 0.0 if rank.prepare() else pause)
    rank.close()
    heartbeat.close()
    bell.close()


def _ready(start: Start, rank: Rank) -> RankReady:
    return structs.replace(rank.ready, process=life_of(os.getpid())) if start.remote else rank.ready


def _cores(start: Start) -> Cores | None:
    """Those that this process has taken; None: any."""
    plan, network = start.plan, start.network
    if not plan.pin_ranks:
        return None
    ranks = plan.data_parallel_size_local or plan.data_parallel_size
    cores = Cores(start.rank if network is None else network.place(start.rank), plan.threads_per_rank, ranks)
    cores.share(ranks)
    return cores


def _warm_up(start: Start, rank: Rank, stored: bool) -> None:
    """stored: its weights lie in a store, so that it needs no other rank's experts."""
    alone = start.join or start.network is not None or stored
    if alone and not start.practised:
        practise(rank, alone=True)
    if not start.join and start.network is None:
        warm_up(rank, start.places, start.rank, start.plan.data_parallel_size, practised=alone)


def _start_forgetting(rank: Rank) -> None:
    timer = threading.Timer(FORMER_SECONDS, rank.forget_former)
    timer.daemon = True
    timer.start()


def _say_waiting(socket: RankSocket, rank_id: int, reason: str) -> None:
    log.warning("event=weights_unavailable reason=%r", reason)
    socket.send(Waiting(rank_id, reason))


def _meet(plan: Plan, rank_id: int, place: Path, network: Network | None) -> Meet:
    return _meet_in(plan, rank_id, place) if network is None else _meet_at(plan, network, rank_id, place)


def _meet_in(plan: Plan, own: int, place: Path) -> Meet:
    """Ranks of one machine meet in a file (ep/transport/shm_rendezvous.py)."""

    def meet(epoch: int, rank: int, size: int) -> Opening:
        backend = backend_of(plan, size)

        def open_groups(stop: Callable[[], bool]) -> Groups:
            use_device(own_device(plan.device, own, plan.ranks_per_machine))
            return Groups(*make_groups(backend, place, rank, size, plan.exchange_timeout, epoch, stop))

        return OpeningThread(open_groups)

    return meet


def backend_of(plan: Plan, size: int) -> str:
    """What joins so many ranks of one machine. A server that began with one rank and has grown had no exchange to plan:
    between GPUs it is the one that is always there."""
    if plan.all2all_backend != "local":
        return plan.all2all_backend
    return choose("auto", size) if plan.device == "cpu" or size == 1 else "nccl"


def _meet_at(plan: Plan, network: Network, rank_id: int, place: Path) -> Meet:
    """Ranks of several machines meet in the head's store."""

    def meet(epoch: int, rank: int, size: int) -> Opening:
        def open_groups(stop: Callable[[], bool]) -> Groups:
            address = network.addresses[rank_id]
            return Groups(*remote_groups(network.store, address, rank, size, plan.exchange_timeout, epoch, stop, place))

        return OpeningThread(open_groups)

    return meet


def _report(socket: RankSocket, rank_id: int, error: Exception, code: int) -> int:
    bad_input = isinstance(error, ValueError)
    if not bad_input:  # else its text says it all
        traceback.print_exc(file=sys.stderr)
    first_line = (str(error).splitlines() or [""])[0]
    try:
        socket.send(RankFailed(rank_id, f"rank {rank_id}: {type(error).__name__}: {first_line}", bad_input))
    except ConnectionError as unheard:
        say_line(f"rank {rank_id}: {unheard}")
    return code
