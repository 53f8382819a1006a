"""Meeting on a thread, telling each other the placement, heartbeats. tests/engine/test_survival.py has the rest."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from dbo.steps import drain, weave
from engine.agreement import Proposal
from engine.process.heartbeat import Heartbeat
from engine.recovery.reading import Read, reader
from engine.team import Groups, Opened, OpeningThread, Team
from ep.parallel import Parallel
from ep.protocol import AllToAll, PeerLost
from ep.table import make_lanes
from ep.transport.group import Group, LocalGroup, MailboxGroup, MailboxWorld
from eplb.placement import linear_placement
from eplb.repair import repair
from front.messages import Joined
from layers.weights import Checkpoint
from models.registry import build, read_config
from models.tiny import CHECKPOINT

PROPOSAL = Proposal(0, False, False, 10)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Closable(LocalGroup):
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


# ---- meeting on a thread ----


def test_groups_open_while_the_rank_does_something_else() -> None:
    let = threading.Event()
    groups = Groups(Closable(), Closable())

    def open_groups(stop: Callable[[], bool]) -> Groups:
        assert let.wait(10) and not stop()
        return groups

    opening = OpeningThread(open_groups)
    assert not opening.done()
    let.set()
    wait_until(opening.done)
    assert opening.take() is groups


def test_what_went_wrong_is_raised_where_the_groups_are_taken() -> None:
    def open_groups(stop: Callable[[], bool]) -> Groups:
        raise PeerLost((2,), "it did not come")

    opening = OpeningThread(open_groups)
    wait_until(opening.done)
    with pytest.raises(PeerLost, match="it did not come"):
        opening.take()


@pytest.mark.parametrize("early", [False, True])
def test_groups_that_are_not_wanted_any_more_are_closed(early: bool) -> None:
    groups = Groups(Closable(), Closable())

    def open_groups(stop: Callable[[], bool]) -> Groups:
        if early:
            wait_until(stop)
        return groups

    opening = OpeningThread(open_groups)
    if not early:
        wait_until(opening.done)
    opening.drop()
    for group in groups:
        assert isinstance(group, Closable) and group.closed.wait(10)


# ---- the newest placement ----


def make_team(rank: int, world: MailboxWorld, slots: int, num_ranks: int = 3, read: Read | None = None) -> Team:
    facts = read_config(CHECKPOINT)
    placement = linear_placement(facts.num_moe_layers, facts.num_experts, num_ranks, slots)
    parallel = Parallel(rank, num_ranks, placement, lambda slots, size: ())
    model = build(facts, parallel, torch.float32, torch.device("cpu"))

    def lanes(group: Group, num_slots: int, hidden_size: int) -> Sequence[AllToAll]:
        return make_lanes("auto", group, num_slots, hidden_size, torch.float32)

    def meet(epoch: int, index: int, size: int) -> Opened:
        group = MailboxGroup(world, index)
        return Opened(Groups(group, group))

    read = read or reader(model, Checkpoint(CHECKPOINT))
    return Team(rank, num_ranks, placement, model, 7, meet, lanes, read)


def formed(teams: Sequence[Team]) -> list[Joined]:
    """All of them, once all have read what they need."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        joined = drain(weave(*(team.form() for team in teams)))
        if None not in joined:
            return [one for one in joined if one is not None]
    raise AssertionError("not within 20 s: all ranks have formed the epoch")


@pytest.mark.parametrize("slots", [8, 60])
def test_whoever_has_just_started_learns_the_placement(slots: int) -> None:
    """Also one that takes more than one gather to tell (3 ranks, 60 slots, 3 layers)."""
    world = MailboxWorld(3)
    teams = [make_team(rank, world, slots) for rank in range(3)]
    placements = [team._placement for team in teams]
    assert placements[0] is not None
    # Ranks 0 and 2 have lived through two losses; rank 2 does not know of the last one.
    once = repair(placements[0], (True, True, False), 3)
    twice = repair(once, (False, True, True), 5)
    teams[0]._placement = teams[2]._placement = once
    teams[0]._placement = twice
    for team in teams:
        team.begin(9, (True, True, True))
        assert team.opened
    joined = formed(teams)
    expected = repair(twice, (True, True, True), 9)
    for team in teams:
        assert team._placement is not None and team.working and team.live == (0, 1, 2)
        assert team._placement.checksum() == expected.checksum() and team._placement.epoch == 9
    assert [one.epoch for one in joined] == [9, 9, 9]
    pending = [team.agreement.propose(PROPOSAL) for team in teams]
    assert {plan.wait().step for plan in pending} == {0}


@pytest.mark.parametrize("news", [False, True])
def test_ranks_that_are_added_count_more_ranks_than_the_others(news: bool) -> None:
    """Three ranks of which the last has gone, and two new ones; `news`: the old ones have lived through a change."""
    world = MailboxWorld(4)
    teams = {rank: make_team(rank, world, 8, 3 if rank < 3 else 5) for rank in (0, 1, 3, 4)}
    old = teams[0]._placement
    assert old is not None
    if news:
        old = teams[0]._placement = teams[1]._placement = repair(old, (True, True, False), 4)
    alive = (True, True, False, True, True)
    for team in teams.values():
        team.begin(9, alive)
    joined = formed([*teams.values()])
    expected = repair(old, alive, 9)
    for team in teams.values():
        assert team._placement is not None and team.live == (0, 1, 3, 4)
        assert team._placement.checksum() == expected.checksum()
    assert [one.experts_loaded for one in joined] == [0, 0, 0, 0]  # all are what each has read at its start
    pending = [team.agreement.propose(PROPOSAL) for team in teams.values()]
    assert {plan.wait().step for plan in pending} == {0}


# ---- heartbeats ----


def read_beat(path: Path) -> float:
    (when,) = struct.unpack("=d", path.read_bytes()[:8])
    return float(when)


def test_a_heartbeat_goes_on_until_it_is_closed(tmp_path: Path) -> None:
    before = time.monotonic()
    heartbeat = Heartbeat(tmp_path / "beat-0")
    first = read_beat(tmp_path / "beat-0")
    assert before <= first <= time.monotonic()
    wait_until(lambda: read_beat(tmp_path / "beat-0") > first)
    heartbeat.close()
