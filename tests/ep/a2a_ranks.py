"""What each process of a backend between processes does: every case once, then the accidents. Results come over a queue."""

from __future__ import annotations

import multiprocessing.queues
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from a2a_cases import CASES, HIDDEN, Case, anything, check_moe, exchange
from forked import forked_with_torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dbo.steps import drain, weave
from ep.protocol import PeerLost, Routing
from ep.table import make_groups, make_lanes, make_parcels
from ep.transport.group import Group
from ep.transport.remote import remote_groups

REMOTE = "gloo of several machines"  # that is, by another address than the loopback's first
Results = dict[tuple[str, int], str]  # (what, rank) -> "ok" or what went wrong
BOUND = 40.0  # seconds: the timeout of the group that works
STALL = 1.0  # seconds: the timeout of the group that one rank leaves waiting


def run_ranks(backend: str, size: int) -> Results:
    """Start `size` processes, let them do everything, and collect what they report."""
    context = forked_with_torch()
    reports: multiprocessing.queues.Queue[tuple[str, int, str]] = context.Queue()
    results: Results = {}
    with tempfile.TemporaryDirectory() as folder:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        args = [(backend, rank, size, Path(folder), store.port, reports) for rank in range(size)]
        processes = [context.Process(target=_rank, args=arg, daemon=True) for arg in args]
        for process in processes:
            process.start()
        while sum(what == "end" for what, _ in results) < size - 1:  # the last rank dies without a word
            what, rank, outcome = reports.get(timeout=90)
            results[what, rank] = outcome
        for process in processes:
            process.join(timeout=30)
            assert process.exitcode is not None, "a rank did not end"
        assert processes[-1].exitcode == -signal.SIGKILL
    return results


def _rank(
    backend: str,
    rank: int,
    size: int,
    folder: Path,
    port: int,
    reports: multiprocessing.queues.Queue[tuple[str, int, str]],
) -> None:
    torch.set_num_threads(1)

    def groups(timeout: float, epoch: int = 0) -> tuple[Group, Group]:
        if backend == REMOTE:
            return remote_groups(("127.0.0.1", port), "127.0.0.2", rank, size, timeout, epoch)
        return make_groups(backend, folder, rank, size, timeout, epoch)

    def report(what: str, check: Callable[[], None]) -> None:
        try:
            check()
            outcome = "ok"
        except BaseException:
            outcome = traceback.format_exc()
        reports.put((what, rank, outcome))

    with torch.inference_mode():
        agreement, group = groups(BOUND)
        for case in CASES:
            report(case.name, lambda case=case: _case(group, case))
        report("moe", lambda: _moe("gloo" if backend == REMOTE else backend, group))
        report("gather", lambda: _gather(agreement))
        report("parcels", lambda: _parcels(group))
        agreement.close()
        short, unused = groups(STALL, epoch=3)
        unused.close()
        report("stall", lambda: _stall(group, short))
        report("death", lambda: _death(group, reports))
        reports.put(("end", rank, "ok"))


def _case(group: Group, case: Case) -> None:
    lanes = make_lanes("auto", group, case.num_slots, case.hidden, case.dtype, num_lanes=2, rows=case.rows)
    for _ in range(2):
        drain(exchange(lanes[0], case, group.rank, group.size))
    drain(weave(*(exchange(lane, case, group.rank, group.size) for lane in lanes)))


def _moe(backend: str, group: Group) -> None:
    for num_extra in (0, 2):
        check_moe(backend, group, num_extra)


def _gather(group: Group) -> None:
    for step in range(50):
        first = group.all_gather_ints([group.rank, step, -1 << 62])
        second = group.all_gather_ints([7 * group.rank])
        assert first.wait() == [[rank, step, -1 << 62] for rank in range(group.size)]
        assert second.wait() == [[7 * rank] for rank in range(group.size)]


def _parcels(group: Group) -> None:
    """Sizes that differ for each pair and exchange, nothing among them; bytes that say who sent them, and to whom."""
    parcels = make_parcels(group, 5000 * group.size)
    lane = make_lanes("auto", group, 4, HIDDEN, torch.float32)[0]
    for number in range(8):
        sizes_GG = np.arange(group.size**2).reshape(group.size, group.size) * number * 37 % 5000
        np.fill_diagonal(sizes_GG, 0)

        def sent(sender: int, receiver: int, sizes_GG: Any = sizes_GG, number: int = number) -> torch.Tensor:
            first = 16 * sender + receiver + number
            return torch.arange(first, first + int(sizes_GG[sender, receiver])).to(torch.uint8)

        others = [peer for peer in range(group.size) if peer != group.rank]
        pieces = {peer: torch.tensor_split(sent(group.rank, peer), 3) for peer in others}
        pending = parcels.send(sizes_GG, pieces)
        drain(exchange(lane, CASES[0], group.rank, group.size))  # tokens travel meanwhile
        arrived = pending.wait()
        assert all(torch.equal(arrived[peer], sent(peer, group.rank)) for peer in others)
        parcels.release()


def _stall(group: Group, short: Group) -> None:
    """Rank 0 is alive but does not come."""
    if group.rank > 0:
        begin = time.monotonic()
        try:
            short.all_gather_ints([1]).wait()
            raise AssertionError("nobody noticed")
        except PeerLost:
            assert STALL * 0.9 < time.monotonic() - begin < STALL + 15
    group.all_gather_ints([0]).wait()


def _death(group: Group, reports: multiprocessing.queues.Queue[tuple[str, int, str]]) -> None:
    """The last rank is killed in the middle of a step; the others learn of it long before the timeout."""
    lane = make_lanes("auto", group, 4, HIDDEN, torch.float32)[0]
    case = Case("death", (5,))
    drain(exchange(lane, case, group.rank, group.size))
    begin = time.monotonic()
    try:
        x_TD, routing = case.inputs(group.rank, group.size)
        arrived = lane.dispatch(x_TD, Routing(routing.slot_TK, routing.weight_TK)).wait()
        if group.rank == group.size - 1:
            reports.close()
            reports.join_thread()
            os.kill(os.getpid(), signal.SIGKILL)
        lane.combine(anything(arrived.batch), arrived.ticket, torch.empty_like(x_TD)).wait()
        raise AssertionError("nobody noticed")
    except PeerLost as lost:
        assert group.rank not in lost.ranks
        assert time.monotonic() - begin < BOUND / 2
    try:
        group.all_gather_ints([1])
        raise AssertionError("a broken group must stay broken")
    except PeerLost:
        group.close()
