"""Ranks die and come back while experts move: the move is forgotten, every token is the right one, and balancing goes on.

That this holds at any moment is in test_survival.py."""

from __future__ import annotations

from pathlib import Path

import hf_tiny
import numpy as np
import pytest
import torch
from balanced import RESTLESS, answer, balance_of, check_slots, placement_of, status
from msgspec import structs
from rank_parts import Job
from survivors import Survivors, undisturbed

from ep.protocol import PeerLost

torch.set_num_threads(1)

NUM_EXPERTS = 8
JOBS = [Job([5 + 3 * i, 7, 11 * i % 90 + 2, *range(2, 2 + i)], 16 + i % 4) for i in range(7)]
SLOW = structs.replace(RESTLESS, move_budget_mib=0.002)  # many chunks for each expert: moves take many steps


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("survival")).path


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> dict[int, list[int]]:
    return undisturbed(checkpoint, JOBS)


def start(checkpoint: Path, size: int = 3, slots: int = 4, **overrides: object) -> Survivors:
    return Survivors(checkpoint, size, **{"slots_per_rank": slots, "eplb": SLOW, **overrides})


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_dies_while_experts_move(
    checkpoint: Path, expected: dict[int, list[int]], asynchronous: bool, victim: int
) -> None:
    """The leading one, or another one; and then it returns."""
    cluster = start(checkpoint, async_scheduling=asynchronous)
    for index in range(5):
        cluster.add(index, JOBS[index])
    for _ in range(5):
        cluster.round()
    answer(cluster.ranks[0], "rebalance")
    bound = 30
    while not any(
        (under_way := balance_of(rank)._rebalance) and under_way.received > 0 for rank in cluster.ranks.values()
    ):
        cluster.round()
        bound -= 1
        assert bound, "nothing moves"
    before = {rank: placement_of(cluster.ranks[rank]) for rank in cluster.ranks}
    cluster.round(victim=victim, turns=4)
    for rank, alive in cluster.ranks.items():
        assert balance_of(alive)._rebalance is None and balance_of(alive)._exchange.parcels is None, (
            "the move is forgotten"
        )
        assert placement_of(alive) is before[rank]
    cluster.tell_all()
    cluster.replay()
    for _ in range(3):
        cluster.round()
    leader = min(cluster.ranks)
    assert status(cluster.ranks[leader]).epoch == 1
    cluster.start(victim)
    cluster.round()
    cluster.tell_all()
    for index in range(5, 7):
        cluster.add(index, JOBS[index])
    cluster.finish()
    assert cluster.released == expected
    check_slots(checkpoint, list(cluster.ranks.values()))
    assert status(cluster.ranks[0]).epoch == 2 and status(cluster.ranks[0]).failures == 0


def test_the_last_rank_balances_nothing_and_goes_on(checkpoint: Path, expected: dict[int, list[int]]) -> None:
    cluster = start(checkpoint, 2, NUM_EXPERTS)
    for index in range(7):
        cluster.add(index, JOBS[index])
    for _ in range(4):
        cluster.round()
    cluster.kill(1)
    cluster.tell_all()
    cluster.replay()
    cluster.finish()
    assert cluster.released == expected
    alone = status(cluster.ranks[0])
    assert alone.failures == 0 and alone.window_balance == [1.0] * len(alone.window_balance) != []


def test_ranks_that_differ_by_one_change_come_together(checkpoint: Path, expected: dict[int, list[int]]) -> None:
    """Rank 2 is lost when rank 0 has gone over to new shares and experts, and rank 1 has not."""
    cluster = start(checkpoint, eplb=structs.replace(RESTLESS, move_interval=0))
    for index in range(7):
        cluster.add(index, JOBS[index])
    for _ in range(8):
        cluster.round()
    first = placement_of(cluster.ranks[0]).slot_to_expert
    answer(cluster.ranks[0], "rebalance")
    bound = 60
    gone_over = False
    while not gone_over:
        bound -= 1
        assert bound, "nobody goes over"
        running = {rank: alive.steps() for rank, alive in cluster.ranks.items()}
        while running and not gone_over:
            for rank in list(running):
                try:
                    next(running[rank])
                except StopIteration as done:
                    del running[rank]
                    cluster._take(rank, done.value)
                gone_over = not np.array_equal(placement_of(cluster.ranks[0]).slot_to_expert, first)
                if gone_over:
                    break  # between the turns of rank 0 and of rank 1
    held = {rank: placement_of(cluster.ranks[rank]).checksum() for rank in (0, 1)}
    running.pop(2).close()
    cluster.kill(2)
    with pytest.raises(StopIteration):
        running[1].throw(PeerLost((2,), "as if the record had not come whole"))
    for _ in running[0]:
        pass
    assert not any(rank._team.working for rank in cluster.ranks.values())
    assert held == {rank: placement_of(cluster.ranks[rank]).checksum() for rank in (0, 1)} and held[0] != held[1]
    cluster.tell_all()
    cluster.replay()
    cluster.finish()
    assert cluster.released == expected
    check_slots(checkpoint, list(cluster.ranks.values()))
