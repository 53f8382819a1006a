"""The all-to-all in shared memory: its heap, its waits, and what happens when ranks are lost."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from a2a_cases import CASES, Case, exchange
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from shm_threads import Processes, team, together

from dbo.steps import Steps, drain, weave
from ep.backends.shm import ShmAllToAll
from ep.protocol import PeerLost
from ep.table import make_groups, make_lanes
from ep.transport.group import LocalGroup
from ep.transport.shm_group import MAX_INTS, ShmGroup, shm_group
from ep.transport.shm_rendezvous import SignIn, Watch, rendezvous, started
from moe_kernels import Layout
from native import Isa, best_isa

TIMEOUT = 1.5  # seconds: of the processes whose peers stop


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path, 3, TIMEOUT)
    yield started
    started.close()


@pytest.fixture(scope="module")
def trio() -> Iterator[list[ShmGroup]]:
    """Three ranks as threads, for tests that lose none of them."""
    with tempfile.TemporaryDirectory() as folder:
        groups = team(Path(folder), 3)
        yield groups
        for group in groups:
            group.close()


def lane(group: ShmGroup, case: Case, room_rows: int | None = None, layout: Layout = Layout.RAGGED) -> ShmAllToAll:
    return ShmAllToAll(group.heap, group.signals, case.num_slots, case.hidden, case.dtype, layout, room_rows, case.rows)


def every_rank(
    groups: list[ShmGroup], case: Case, room_rows: int | None = None, layout: Layout = Layout.RAGGED, times: int = 2
) -> None:
    lanes = [[lane(group, case, room_rows, layout) for _ in range(2)] for group in groups]

    def act(rank: int) -> None:
        for _ in range(times):
            drain(exchange(lanes[rank][0], case, rank, len(groups)))
        drain(weave(*(exchange(lane, case, rank, len(groups)) for lane in lanes[rank])))

    for result in together(len(groups), act):
        assert result is None, result


@pytest.mark.parametrize("tokens", [(63, 64, 65), (200, 0, 1), (0, 0, 300), (129, 128, 257)])
def test_more_rows_than_a_room_holds(trio: list[ShmGroup], tokens: tuple[int, ...]) -> None:
    every_rank(trio, Case("chunks", tokens, hidden=8), room_rows=64)


@pytest.mark.parametrize("target", [-1, 1])
def test_tokens_are_picked_where_that_saves_much(trio: list[ShmGroup], target: int) -> None:
    case = Case("picked", (150, 70, 0), top_k=2, hidden=256, target=target)
    every_rank(trio, case)
    every_rank(trio, case, room_rows=64)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_padded(trio: list[ShmGroup], case: Case) -> None:
    every_rank(trio, case, layout=Layout.PADDED)


def test_bfloat16_in_chunks(trio: list[ShmGroup]) -> None:
    every_rank(trio, Case("chunks", (90, 3, 65), dtype=torch.bfloat16, hidden=7), room_rows=64)


def test_counts_of_tokens_and_rooms() -> None:
    """Each rank its own number of tokens, step after step, on two lanes that take turns."""
    with tempfile.TemporaryDirectory() as folder:
        groups = team(Path(folder), 2)

        @settings(max_examples=examples(40), deadline=None)
        @given(
            counts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
            num_slots=st.integers(1, 5),
            top_k=st.integers(1, 4),
        )
        def check(counts: list[tuple[int, ...]], num_slots: int, top_k: int) -> None:
            shape = Case("drawn", (0,), num_slots=num_slots, hidden=4)
            lanes = [[lane(group, shape, 64) for _ in range(2)] for group in groups]

            def steps(rank: int, which: int) -> Steps[None]:
                for tokens in counts[which:] + counts[:which]:
                    case = Case("drawn", tokens, num_slots=num_slots, top_k=top_k, hidden=4)
                    yield from exchange(lanes[rank][which], case, rank, 2)

            for result in together(2, lambda rank: drain(weave(steps(rank, 0), steps(rank, 1)))):
                assert result == [None, None], result

        check()
        for group in groups:
            group.close()


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_reads(trio: list[ShmGroup]) -> None:
    def act(rank: int) -> None:
        for step in range(200):
            if step % 50 == 17 * rank:
                time.sleep(0.01)
            open_ones = [trio[rank].all_gather_ints([rank, step, k, -1 << 62]) for k in range(step % 5)]
            for k, pending in enumerate(open_ones):
                assert pending.wait() == [[peer, step, k, -1 << 62] for peer in range(3)]

    assert together(3, act) == [None] * 3


def test_limits(trio: list[ShmGroup], tmp_path: Path) -> None:
    def act(rank: int) -> None:
        assert trio[rank].all_gather_ints([rank] * MAX_INTS).wait() == [[peer] * MAX_INTS for peer in range(3)]
        assert trio[rank].all_gather_ints([]).wait() == [[], [], []]

    assert together(3, act) == [None] * 3
    with pytest.raises(ValueError, match=f"at most {MAX_INTS} integers, not {MAX_INTS + 1}"):
        trio[0].all_gather_ints([0] * (MAX_INTS + 1))
    with pytest.raises(ValueError, match="shared heap has 8589934592 bytes"):
        trio[0].heap.reserve(1 << 34)
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        shm_group(tmp_path, 2, 2, 1.0, "team")
    with pytest.raises(ValueError, match="size is 63; it must be 2 to 62"):
        shm_group(tmp_path, 0, 63, 1.0, "team")
    with pytest.raises(ValueError, match="timeout is 0"):
        shm_group(tmp_path, 0, 2, 0, "team")


def test_a_killed_rank_is_named_at_once(processes: Processes) -> None:
    """By ranks that wait for it in an exchange, and by those that wait for the survivors."""
    processes.tell(0, "gather")
    processes.tell(1, "dispatch")
    time.sleep(0.2)  # both are in their waits now, and sleep
    began = time.monotonic()
    processes.processes[2].kill()
    for rank in (0, 1):
        when, (ranks, reason) = processes.reply(rank)
        assert when - began < 0.5 and 2 in ranks, (rank, when - began, reason)
        assert 1 - rank not in ranks, reason
    for what in ("gather", "dispatch"):  # a broken group stays broken
        processes.tell(0, what)
        _, (ranks, _) = processes.reply(0)
        assert ranks == (2,)


def test_a_rank_killed_between_dispatch_and_combine(processes: Processes) -> None:
    for rank, what in ((0, "combine"), (1, "combine"), (2, "dispatch")):
        processes.tell(rank, what)
    assert processes.reply(2)[1] == "arrived"
    began = time.monotonic()
    processes.processes[2].kill()
    for rank in (0, 1):
        when, (ranks, reason) = processes.reply(rank)
        assert when - began < 0.5 and ranks == (2,), (rank, when - began, reason)


@pytest.mark.skipif(best_isa() == Isa.NONE, reason="the native kernels were not built")
@pytest.mark.parametrize("before", ["the step", "its results"])
def test_a_rank_killed_while_others_replay_an_exchange(processes: Processes, before: str) -> None:
    for _ in range(2):
        for what in ("record", "replay"):
            for rank in range(3):
                processes.tell(rank, what)
            assert {processes.reply(rank)[1] for rank in range(3)} == {"" if what == "record" else "replayed"}
    processes.tell(0, "replay")
    processes.tell(1, "replay")
    if before == "its results":
        processes.tell(2, "dispatch")
        assert processes.reply(2)[1] == "arrived"
    began = time.monotonic()
    processes.processes[2].kill()
    for rank in (0, 1):
        when, (ranks, reason) = processes.reply(rank)
        assert when - began < 0.5 and 2 in ranks and 1 - rank not in ranks, (rank, when - began, reason)


def test_a_stopped_rank_is_named_after_the_timeout(processes: Processes) -> None:
    pid = processes.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    for rank in (0, 2):
        processes.tell(rank, "gather")
    for rank in (0, 2):
        when, (ranks, reason) = processes.reply(rank)
        assert ranks == (1,) and TIMEOUT * 0.9 < when - began < TIMEOUT + 2, (rank, when - began, reason)


def test_aborting_ends_the_waits_of_others(processes: Processes) -> None:
    processes.tell(1, "gather")
    time.sleep(0.1)
    began = time.monotonic()
    processes.tell(2, "abort")
    processes.reply(2)
    when, (ranks, reason) = processes.reply(1)
    assert ranks == (0,) and "epoch 0 was aborted" in reason and when - began < 0.5


def test_who_waits_for_a_rank_that_gave_up_learns_why(tmp_path: Path) -> None:
    groups = team(tmp_path, 3, timeout=0.5)
    late = threading.Event()

    def act(rank: int) -> list[list[int]] | str:
        if rank == 2:
            assert late.wait(10)
            return "absent"
        if rank == 1:
            time.sleep(0.3)  # rank 0 gives up first
        return groups[rank].all_gather_ints([rank]).wait()

    began = time.monotonic()
    threading.Timer(1.5, late.set).start()
    first, second, _ = together(3, act)
    assert isinstance(first, PeerLost) and isinstance(second, PeerLost)
    assert first.ranks == second.ranks == (2,) and time.monotonic() - began < 3


def test_leaving(tmp_path: Path) -> None:
    groups = team(tmp_path, 2)
    waiting = groups[1].all_gather_ints([1])
    groups[0].all_gather_ints([0])
    groups[0].close()
    groups[0].close()
    assert waiting.wait() == [[0], [1]], "what a rank sent before it left counts"
    with pytest.raises(PeerLost, match="rank 0 has left its group"):
        groups[0].all_gather_ints([0])
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 was left by rank 0") as lost:
        groups[1].all_gather_ints([1]).wait()
    assert lost.value.ranks == (0,) and time.monotonic() - began < 0.5
    groups[1].close()


def test_who_waits_does_not_use_its_core(processes: Processes) -> None:
    processes.tell(0, "cpu_seconds")
    before = processes.reply(0)[1]
    processes.tell(0, "gather")
    time.sleep(1.0)
    for rank in (1, 2):
        processes.tell(rank, "gather")
    assert processes.reply(0)[1] == [[0], [1], [2]]
    processes.tell(0, "cpu_seconds")
    assert processes.reply(0)[1] - before < 0.1


def test_who_sleeps_is_woken(processes: Processes) -> None:
    """Rather than looking up when its nap of some milliseconds is over."""
    late = []
    for _ in range(15):
        processes.tell(0, "gather")
        time.sleep(0.025)  # naps end 23 and 31 ms after it began to wait
        for rank in (1, 2):
            processes.tell(rank, "gather")
        when = [processes.reply(rank)[0] for rank in range(3)]
        late.append(when[0] - max(when[1:]))
    # Naps would end 6 ms after it could go on, every time; a busy core delays some of the tries.
    assert sorted(late)[len(late) // 4] < 0.003, late


def named(folder: Path) -> set[str]:
    return {path.name for path in [*folder.iterdir(), *Path("/dev/shm").iterdir()]}


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = named(tmp_path)
    for how in ("close", "kill"):
        processes = Processes(tmp_path, 2, TIMEOUT)
        # Nothing has a name even while the ranks run, so there is nothing that a kill could leave.
        assert not {name for name in named(tmp_path) - before if "moesaic" in name}
        if how == "close":
            for rank in range(2):
                processes.tell(rank, "close")
                processes.reply(rank)
        processes.close()
    assert not {name for name in named(tmp_path) - before if "moesaic" in name}


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match=r"waited 0.2 s for them at team-0") as lost:
        shm_group(tmp_path, 1, 3, 0.2, "team")
    assert lost.value.ranks == (0, 2)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="told not to wait"):
        make_groups("shm", tmp_path, 1, 2, 30.0, 4, stop=lambda: time.monotonic() > began + 0.1)
    with pytest.raises(PeerLost, match="told not to wait"):
        make_groups("gloo", tmp_path, 1, 2, 30.0, 4, stop=lambda: time.monotonic() > began + 0.2)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_who_signed_in_and_died_is_named_at_once(backend: str, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    born = started(child)
    os.waitpid(child, 0)
    assert started(child) == -1
    name = "gloo" if backend == "gloo" else "agreement"
    began = time.monotonic()
    with (
        rendezvous(tmp_path, name, 1, 2, 7) as other,
        pytest.raises(PeerLost, match="had signed in") as lost,
    ):
        other.sign_in(who=SignIn(child, born, 3, 1, 1))
        make_groups(backend, tmp_path, 0, 2, 30.0, 7)
    assert lost.value.ranks == (1,) and time.monotonic() - began < 5


def test_an_id_that_passed_to_another_process_is_not_taken_for_it(tmp_path: Path) -> None:
    with rendezvous(tmp_path, "team", 1, 2, 0) as other:
        other.sign_in(who=SignIn(os.getpid(), started(os.getpid()) - 1, 3, 1))
        with pytest.raises(PeerLost, match="had signed in"):
            shm_group(tmp_path, 0, 2, 5.0, "team")
        other.sign_in(who=SignIn(os.getpid(), started(os.getpid()), 0, 1))
        with pytest.raises(PeerLost, match="has withdrawn its file") as lost:
            shm_group(tmp_path, 0, 2, 5.0, "team")
    assert lost.value.ranks == (1,)
    with pytest.raises(FileNotFoundError):
        shm_group(tmp_path / "nowhere", 0, 2, 5.0, "team")
    watch = Watch()
    assert watch.ended() == ()
    watch.close()


def test_a_new_epoch_in_the_same_folder(tmp_path: Path) -> None:
    for epoch in range(3):
        groups = team(tmp_path, 2, epoch=epoch)
        assert together(2, lambda rank, groups=groups: groups[rank].all_gather_ints([rank]).wait()) == [[[0], [1]]] * 2
        for group in groups:
            group.close()


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:moesaic-old-")


def test_memory_of_a_group_that_is_gone_is_freed(tmp_path: Path) -> None:
    groups = together(2, lambda rank: shm_group(tmp_path, rank, 2, 0.1, "old"))
    lanes = [make_lanes("auto", group, 4, 8, torch.float32) for group in groups if isinstance(group, ShmGroup)]
    assert len(lanes) == 2 and mapped() == 4
    gc.collect()
    gc.disable()  # a rank's old groups must not wait for the collector
    try:
        group = groups.pop()
        assert isinstance(group, ShmGroup)
        try:
            group.all_gather_ints([1]).wait()
        except PeerLost as lost:
            assert lost.ranks == (0,)
        group.close()
        del group
        lanes.clear()
        groups.clear()
        assert mapped() == 0
    finally:
        gc.enable()


def test_groups_of_a_rank(tmp_path: Path) -> None:
    assert all(isinstance(group, LocalGroup) for group in make_groups("shm", tmp_path, 0, 1, 1.0))
    with pytest.raises(ValueError, match="'local' does not join processes"):
        make_groups("local", tmp_path, 0, 2, 1.0)
    pairs = together(2, lambda rank: make_groups("shm", tmp_path, rank, 2, 20.0))
    for pair in pairs:
        assert not isinstance(pair, PeerLost)
        lanes = make_lanes("auto", pair[1], 4, 8, torch.float32, num_lanes=2)
        assert all(isinstance(lane, ShmAllToAll) for lane in lanes) and len(lanes) == 2
        for group in pair:
            group.close()
