"""Ranks that share memory, as threads of one process and as processes that do what they are told."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from a2a_cases import HIDDEN, Case, anything
from rank_threads import together

from ep.backends.dispatchers import StepState
from ep.backends.shm import ShmAllToAll
from ep.experts import Experts
from ep.protocol import PeerLost
from ep.transport.shm_group import ShmGroup, shm_group
from native.tape import CpuGraphs, Tape

__all__ = ["Processes", "team", "together"]


def team(folder: Path, size: int, timeout: float = 20.0, epoch: int = 0) -> list[ShmGroup]:
    """The groups of ranks that are threads of this process."""
    groups = together(size, lambda rank: shm_group(folder, rank, size, timeout, "team", epoch))
    assert all(isinstance(group, ShmGroup) for group in groups), groups
    return [group for group in groups if isinstance(group, ShmGroup)]


Reply = tuple[float, Any]  # when (CLOCK_MONOTONIC), and a value or (ranks, reason) of a PeerLost


class Processes:
    """Ranks as processes. Each takes the name of a function below, runs it with its group, and replies."""

    def __init__(self, folder: Path, size: int, timeout: float) -> None:
        context = mp.get_context("fork")  # starts at once; this process has no other threads at this time
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.processes = []
        there = context.Barrier(size)  # `timeout` is of their waits for each other, not of forks
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, there, folder, rank, size, timeout), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank in range(size):
            assert self.reply(rank)[1] == "ready"

    def tell(self, rank: int, what: str) -> None:
        self.pipes[rank].send(what)

    def reply(self, rank: int, seconds: float = 60.0) -> Reply:
        assert self.pipes[rank].poll(seconds), f"rank {rank} does not reply"
        reply: Reply = self.pipes[rank].recv()
        return reply

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


def _serve(
    pipe: multiprocessing.connection.Connection, there: Barrier, folder: Path, rank: int, size: int, timeout: float
) -> None:
    torch.set_num_threads(1)
    there.wait(60)
    group = shm_group(folder, rank, size, timeout, "team")
    lane = ShmAllToAll(group.heap, group.signals, 4, HIDDEN, torch.float32)
    pipe.send((time.monotonic(), "ready"))
    while True:
        what = pipe.recv()
        value: Any
        try:
            with torch.inference_mode():
                value = globals()[what](group, lane)
        except PeerLost as lost:
            value = (lost.ranks, str(lost))
        pipe.send((time.monotonic(), value))


def gather(group: ShmGroup, lane: ShmAllToAll) -> list[list[int]]:
    return group.all_gather_ints([group.rank]).wait()


def dispatch(group: ShmGroup, lane: ShmAllToAll) -> str:
    lane.dispatch(*Case("shm", (5,)).inputs(group.rank, group.size)).wait()
    return "arrived"


def combine(group: ShmGroup, lane: ShmAllToAll) -> str:
    x_TD, routing = Case("shm", (5,)).inputs(group.rank, group.size)
    arrived = lane.dispatch(x_TD, routing).wait()
    lane.combine(anything(arrived.batch), arrived.ticket, torch.empty_like(x_TD)).wait()
    return "returned"


_tapes: list[Tape] = []  # of this process


def record(group: ShmGroup, lane: ShmAllToAll) -> str:
    """An exchange with experts between its halves, on a tape, which this process keeps."""
    state = StepState()
    state.record(lane.recorded_tokens, {lane.key: lane.wait_late})
    recording = CpuGraphs(state.wait_late).series(0)
    tape = recording.new()
    x_TD, routing = Case("shm", (5,)).inputs(group.rank, group.size)
    experts = Experts(4, HIDDEN, 8, torch.float32)
    for slot in range(4):
        experts.clear_slot(slot)
    tape.begin()
    arrived = lane.dispatch(x_TD, routing).wait()
    lane.combine(experts(arrived.batch), arrived.ticket, torch.empty_like(x_TD)).wait()
    tape.end()
    _tapes.append(tape)
    for kept in (x_TD, routing.slot_TK, routing.weight_TK, *experts.memory):
        recording.keep(kept)
    return recording.refused


def replay(group: ShmGroup, lane: ShmAllToAll) -> str:
    _tapes[0].replay()
    return "replayed"


def abort(group: ShmGroup, lane: ShmAllToAll) -> None:
    group.abort([0])


def cpu_seconds(group: ShmGroup, lane: ShmAllToAll) -> float:
    return time.process_time()


def close(group: ShmGroup, lane: ShmAllToAll) -> None:
    group.close()
    group.close()
