"""Ranks that lose each other though no process has ended: they meet again, and only who stays away twice is accused."""

from __future__ import annotations

import pytest
from front_parts import ready

from front.accusations import AGAIN_SECONDS, NOTHING, SILENT_SECONDS, Accusations, Finding
from front.members import Members
from front.messages import EpochLost, RankLost

MEET = Finding(True, [])


class World:
    def __init__(self, num_ranks: int) -> None:
        self.now = 100.0
        self.members = Members(num_ranks, 4, 4, lambda: self.now)
        self.accusations = Accusations(self.members, lambda: self.now)
        for rank in range(num_ranks):
            self.members.on_ready(ready(rank))
        assert self.members.started

    def lose(self, *ranks: int, epoch: int | None = None) -> Finding:
        for rank in ranks:
            self.accusations.on_lost(EpochLost(rank, self.members.epoch if epoch is None else epoch, "silence"))
        return self.look()

    def look(self, after: float = 0.0) -> Finding:
        self.now += after
        finding = self.accusations.look()
        if finding.meet_again:
            self.members.meet_again()
        return finding


def test_all_have_lost_each_other() -> None:
    world = World(3)
    assert world.lose(0, 2) == NOTHING
    assert world.lose(1) == MEET and world.members.epoch == 1
    assert world.look(60.0) == NOTHING
    assert world.lose(0, 1, 2) == MEET


def test_not_in_a_frenzy() -> None:
    world = World(2)
    assert world.lose(0, 1) == MEET
    assert world.lose(0, 1) == NOTHING
    assert world.look(AGAIN_SECONDS) == MEET


def test_who_stays_away_twice_is_accused() -> None:
    world = World(4)
    assert world.lose(0, 1, 3) == NOTHING
    assert world.look(SILENT_SECONDS - 0.1) == NOTHING
    assert world.look(0.1) == MEET
    world.now += 5.0
    assert world.lose(0, 1, 3) == NOTHING
    assert world.look(SILENT_SECONDS) == Finding(False, [2])
    assert world.members.epoch == 1


@pytest.mark.parametrize("second", [(0, 1, 2, 3), (0, 1, 2)])
def test_who_comes_again_is_not_accused(second: tuple[int, ...]) -> None:
    """It had only been long at work; and whoever stays away now has come the first time."""
    world = World(4)
    world.lose(0, 1, 3)
    assert world.look(SILENT_SECONDS) == MEET
    world.now += 5.0
    world.lose(*second)
    assert world.look(SILENT_SECONDS).accused == []


def test_a_loss_that_is_told_settles_it() -> None:
    world = World(3)
    world.lose(0, 2)
    assert world.members.on_lost(RankLost(1, "killed", 99.0, world.members.ready[1].process))
    assert world.look(60.0) == NOTHING
    assert world.lose(0, 2, epoch=0) == NOTHING  # late words about an epoch that is over
