"""Experts that are read beside the rank's loop: errors, stalls, and epochs that are broken off meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_team import formed, make_team

from dbo.steps import drain, weave
from engine.recovery import reading as reading_module
from engine.recovery.reading import ReadingThread, StagedExpert, await_checkpoint
from engine.team import Groups, Opened, Team
from ep.transport.group import MailboxGroup, MailboxWorld
from eplb.repair import SlotUpdate
from layers.identity import CheckpointError, identify
from layers.weights import Checkpoint
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.attacks
UPDATES = [SlotUpdate(0, 0, slot, slot) for slot in range(6)]


class Disk:
    """error: what reads raise. gate: they do not end before it is open."""

    def __init__(self) -> None:
        self.error = ""
        self.gate = threading.Event()
        self.gate.set()

    def stage(self, update: SlotUpdate) -> StagedExpert:
        self.gate.wait(20)
        if self.error:
            raise CheckpointError(self.error)
        return StagedExpert(update, cast(Any, None), 1)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_a_file_that_is_away_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    disk.error = "model.safetensors: cannot be read"
    reading = ReadingThread(UPDATES, disk.stage)
    wait_for(lambda: reading.trouble, "it says what is wrong")
    assert reading.trouble == disk.error and reading.take(0.0) is None and reading.left == 6
    disk.error = ""
    got = []
    while reading.left:
        expert = reading.take(5.0)
        assert expert is not None
        got.append(expert.update)
    assert got == UPDATES and reading.trouble == ""
    assert caplog.text.count("event=weights_unavailable") == 1


def test_a_disk_that_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "STALLED_SECONDS", 0.05)
    disk = Disk()
    disk.gate.clear()
    reading = ReadingThread(UPDATES, disk.stage)
    began = time.monotonic()
    assert reading.take(0.01) is None and time.monotonic() - began < 5.0
    wait_for(lambda: reading.trouble, "it says that nothing comes")
    assert reading.trouble == "reading an expert takes longer than 0.05 s"
    reading.drop()
    disk.gate.set()
    wait_for(lambda: not any(thread.name == "reading" for thread in threading.enumerate()), "the thread has ended")


def test_other_errors_are_raised_where_experts_are_taken() -> None:
    def stage(update: SlotUpdate) -> StagedExpert:
        raise ValueError("of a kind that waiting does not mend")

    reading = ReadingThread(UPDATES, stage)
    with pytest.raises(ValueError, match="waiting does not mend"):
        wait_for(lambda: reading.take(0.01), "an error")


def test_a_rank_that_starts_again_waits_for_its_weights(tmp_path: Path) -> None:
    for path in CHECKPOINT.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    known, weights, told = identify(tmp_path), tmp_path / "model.safetensors", list[str]()
    weights.rename(tmp_path / "away")
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 3.0 and not weights.exists():
            (tmp_path / "away").rename(weights)

    await_checkpoint(tmp_path, known, 10.0, told.append, lambda: now[0], sleep)
    assert 3.0 < now[0] < 6.0 and [text.partition(": ")[2] for text in told] == [
        "cannot be read: No such file or directory"
    ]
    weights.touch()
    with pytest.raises(CheckpointError, match="changed since the start: mtime_ns"):
        await_checkpoint(tmp_path, known, 10.0, told.append, lambda: now[0], sleep)
    assert now[0] < 20.0 and len(told) == 2


# ---- the ranks of an epoch ----


def flaky_teams(world: MailboxWorld, disk: Disk) -> list[Team]:
    """Three ranks with 8 slots for 16 experts; the disk's errors concern what is read while they are at work."""
    teams = [make_team(rank, world, 8) for rank in range(3)]
    for team in teams:
        checkpoint = Checkpoint(CHECKPOINT)
        team._model.load(checkpoint)

        def stage(update: SlotUpdate, inner: Any = (team, checkpoint)) -> StagedExpert:
            team, checkpoint = inner
            disk.stage(update)
            keys = team._model.expert_keys(checkpoint, update.layer, update.expert)
            return StagedExpert(update, *checkpoint.stage(keys))

        team._read = lambda updates, stage=stage: ReadingThread(updates, stage)
        team.begin(0, (True, True, True))
    formed(teams)
    return teams


def begin(teams: Sequence[Team], epoch: int, alive: tuple[bool, ...]) -> None:
    world = MailboxWorld(len(teams))
    for index, team in enumerate(teams):
        team.close()

        def meet(epoch: int, rank: int, size: int, index: int = index) -> Opened:
            group = MailboxGroup(world, index)
            return Opened(Groups(group, group))

        team._meet = meet
        team.begin(epoch, alive)


def attempt(teams: Sequence[Team]) -> list[object]:
    return list(drain(weave(*(team.form() for team in teams))))


def fill_some(team: Team) -> bool:
    assert team._forming is not None
    team._fill(team._forming)
    return bool(team._filled)


def right_weights(team: Team) -> None:
    """Each slot holds what the placement says, as a rank that has just loaded it has it."""
    placement, model = team._placement, team._model
    assert placement is not None
    checkpoint = Checkpoint(CHECKPOINT)
    for layer in range(placement.num_layers):
        for slot, expert in enumerate(placement.experts_of(layer, team.rank)):
            if expert < 0:
                continue
            found = [part.clone() for part in model.expert_storage(layer, slot)]
            model.read_expert(checkpoint, layer, slot, expert)
            assert all(map(torch.equal, found, model.expert_storage(layer, slot))), (layer, slot, expert)


def test_all_ranks_wait_for_the_one_that_reads() -> None:
    disk = Disk()
    teams = flaky_teams(MailboxWorld(3), disk)
    disk.error = "model.safetensors: cannot be read"
    left = teams[:2]
    teams[2].close()
    begin(left, 1, (True, True, False))
    for _ in range(3):
        assert attempt(left) == [None, None]
        assert all(team.opening and not team.working for team in left)
    assert any(team.trouble == disk.error for team in left) and {team.look_seconds for team in left} == {0.05}
    disk.error = ""
    assert [one.epoch for one in formed(left)] == [1, 1]
    for team in left:
        right_weights(team)


def test_slots_that_a_broken_off_epoch_has_filled_are_not_trusted() -> None:
    """Rank 2 has gone, and the others have read some of its experts into slots of replicas, when rank 2 is back (as one that has
    just loaded). What those slots held before is in force again."""
    disk = Disk()
    teams = flaky_teams(MailboxWorld(3), disk)
    left = teams[:2]
    teams[2].close()
    begin(left, 1, (True, True, False))
    disk.gate.clear()
    assert attempt(left) == [None, None]
    disk.gate.set()
    wait_for(lambda: fill_some(left[0]), "some slots are filled")
    begin(teams, 2, (True, True, True))  # the old placement is in force for all
    formed(teams)
    for team in teams:
        right_weights(team)
        assert not team._filled
