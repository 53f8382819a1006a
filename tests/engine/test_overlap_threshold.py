"""The measured gate in ranks that share one thread: all come to one crossover, remember it, and tell it to who comes later."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs
from rank_parts import Job, drive, mailbox_ranks, make_plan
from survivors import Survivors

from configs.dbo import DboPlan
from configs.engine import EngineConfig, Plan
from configs.machine import Machine
from dbo.memory import recall, remember
from dbo.threshold import NEVER, Crossover
from engine.build import build_rank
from engine.overlap.memory import with_memory
from engine.overlap.policy import CHECKS, _Taken
from engine.plan import make_plan as plan_of
from engine.rank import Rank
from models.tiny import CHECKPOINT

torch.set_num_threads(1)

JOBS = [Job([5 + 3 * i, 7, 11 * i % 90 + 2, *range(2, 2 + i)], 6 + i % 4) for i in range(4)]
MEASURED, AGREED = "event=dbo_measured", "event=dbo_crossover"


@pytest.fixture(scope="session")
def expected() -> list[list[int]]:
    return [got.tokens for got in drive([build_rank(make_plan(CHECKPOINT))], JOBS)]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "moesaic.overlap")
    return caplog


def crossover(rank: Rank) -> Crossover | None:
    assert rank._overlap is not None
    return rank._overlap._known


def run(dbo: DboPlan, expected: list[list[int]], size: int = 2, asynchronous: bool = False) -> Sequence[Rank]:
    ranks = mailbox_ranks(CHECKPOINT, size, dbo=dbo, async_scheduling=asynchronous)
    assert [got.tokens for got in drive(ranks, JOBS)] == expected
    assert len({crossover(rank) for rank in ranks}) == 1
    return ranks


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_measure_when_none_has_work_and_remember(
    tmp_path: Path, expected: list[list[int]], asynchronous: bool, said: pytest.LogCaptureFixture
) -> None:
    dbo = DboPlan(memory=str(tmp_path / "cache" / "dbo.json"))
    ranks = run(dbo, expected, asynchronous=asynchronous)
    assert crossover(ranks[0]) == Crossover(NEVER, NEVER), "what comes at once hides nothing"
    assert said.text.count(MEASURED) == said.text.count(AGREED) == 2
    assert ranks[0].stats.dbo_steps == 0 and 0 <= ranks[0].stats.dbo_overlap <= 1
    found = recall(Path(dbo.memory))
    assert found is not None and found.crossover == Crossover(NEVER, NEVER) and found.prefill

    said.clear()
    remember(Path(dbo.memory), found._replace(crossover=Crossover(2, 4)))
    ranks = run(dbo, expected, asynchronous=asynchronous)
    assert said.messages[0].endswith("decodes from 2 tokens, prompts from 4 tokens")
    assert all(rank.stats.dbo_steps > 4 for rank in ranks) and ranks[0].stats.dbo_overlap > 0


@pytest.mark.parametrize(
    ("exchanges", "holds"),
    [([1.4e-3], True), ([0.7e-3], True), ([9e-3, 2e-3, 1.6e-3, 1.4e-3], True), ([2e-3] * CHECKS, False)],
)
def test_what_is_remembered_holds_while_an_exchange_takes_about_as_long(exchanges: list[float], holds: bool) -> None:
    """Of up to CHECKS runs, given here, after a first one that does not count."""
    overlap = mailbox_ranks(CHECKPOINT, 2, dbo=DboPlan())[0]._overlap
    assert overlap is not None
    runs = overlap._check(16, exchange=1e-3, leads=False)
    next(runs)
    runs.send(_Taken(1e-3, 4e-3, 0.0))
    for exchange in exchanges[:-1]:
        runs.send(_Taken(exchange, 4e-3, 0.0))
    with pytest.raises(StopIteration) if holds else contextlib.nullcontext():
        runs.send(_Taken(exchanges[-1], 4e-3, 0.0))


@pytest.mark.parametrize("broken", ["", "{}", '{"crossover": [1, 1], "decode": [], "prefill": []}', "slower network"])
def test_what_does_not_hold_is_measured_anew(
    tmp_path: Path, expected: list[list[int]], broken: str, said: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "dbo.json"
    if broken == "slower network":
        slow = [[32, 0.5, 1.0, 0.7]]
        broken = json.dumps({"crossover": [1, 1], "decode": slow, "prefill": slow})
    file.write_text(broken)
    ranks = run(DboPlan(memory=str(file)), expected)
    assert said.text.count(MEASURED) == 2 and crossover(ranks[0]) == Crossover(NEVER, NEVER)
    found = recall(file)
    assert found is not None and found.crossover == crossover(ranks[0])


def test_what_is_remembered_is_checked_once_there_has_been_work(
    tmp_path: Path, expected: list[list[int]], said: pytest.LogCaptureFixture
) -> None:
    """A start does not wait for it."""
    file = tmp_path / "dbo.json"
    slow = [[32, 0.5, 1.0, 0.7]]
    file.write_text(json.dumps({"crossover": [1, 1], "decode": slow, "prefill": slow}))
    cluster = Survivors(CHECKPOINT, 2, slots_per_rank=8, dbo=DboPlan(memory=str(file)))
    for _ in range(30):
        cluster.round()
    overlaps = [rank._overlap for rank in cluster.ranks.values()]
    assert all(one is not None and one._known == Crossover(1, 1) and one._seconds == 0 for one in overlaps)
    cluster.add(0, JOBS[0])
    cluster.finish()
    assert cluster.released == {0: expected[0]} and said.text.count(MEASURED) == 2


def test_a_place_that_cannot_be_written_to_costs_a_warning(
    tmp_path: Path, expected: list[list[int]], said: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    run(DboPlan(memory=str(tmp_path / "file" / "dbo.json")), expected)
    assert "cannot be remembered" in said.text
    run(DboPlan(), expected)


def test_given_numbers_are_not_measured(expected: list[list[int]], said: pytest.LogCaptureFixture) -> None:
    both = run(DboPlan(decode_tokens=2, prefill_tokens=NEVER), expected)
    assert MEASURED not in said.text and crossover(both[0]) == Crossover(2, NEVER) and both[0].stats.dbo_steps > 0
    one = run(DboPlan(decode_tokens=2), expected)
    assert MEASURED in said.text and crossover(one[0]) == Crossover(2, NEVER) and one[0].stats.dbo_steps > 0


def test_who_comes_later_is_told(tmp_path: Path, expected: list[list[int]], said: pytest.LogCaptureFixture) -> None:
    """Rank 0 dies and comes back, to others that know; what lies on disk by then is not theirs."""
    file = tmp_path / "dbo.json"
    cluster = Survivors(CHECKPOINT, 3, slots_per_rank=8, dbo=DboPlan(memory=str(file)))
    cluster.round()
    cluster.finish()
    found = recall(file)
    assert found is not None
    remember(file, found._replace(crossover=Crossover(1, 1)))
    for index, job in enumerate(JOBS):
        cluster.add(index, job)
    cluster.round()
    cluster.round(victim=0, turns=3)
    cluster.tell_all()
    cluster.replay()
    cluster.start(0)
    cluster.tell_all()
    cluster.finish()
    assert cluster.released == dict(enumerate(expected))
    assert {crossover(rank) for rank in cluster.ranks.values()} == {found.crossover}
    assert said.text.count(MEASURED) == 3, "once each, when they first met"


def test_nothing_is_measured_while_requests_are_open(expected: list[list[int]], said: pytest.LogCaptureFixture) -> None:
    """Neither at the start nor after a loss nor after a return: first all are answered. What comes while they measure is not kept waiting."""

    def began() -> bool:
        return any(rank._overlap is not None and rank._overlap._seconds > 0 for rank in cluster.ranks.values())

    cluster = Survivors(CHECKPOINT, 3, slots_per_rank=8, dbo=DboPlan())
    for index, job in enumerate(JOBS):
        cluster.add(index, job)
    cluster.round()
    cluster.round(victim=0, turns=3)
    cluster.tell_all()
    cluster.replay()
    cluster.round()
    cluster.start(0)
    cluster.tell_all()
    while len(cluster.finished) < len(JOBS):
        assert not began()
        cluster.round()
    assert cluster.released == dict(enumerate(expected))
    while not began():
        cluster.round()
    cluster.add(len(JOBS), JOBS[0])
    while len(cluster.finished) == len(JOBS):
        cluster.round()
    assert MEASURED not in said.text
    cluster.finish()
    assert said.text.count(MEASURED) == 3


def test_ranks_that_return_measure_once_they_have_had_work(
    expected: list[list[int]], said: pytest.LogCaptureFixture
) -> None:
    """The requests of those that were lost come when the next ones have met: none of these knows anything, and until then
    nobody has work."""
    cluster = Survivors(CHECKPOINT, 2, slots_per_rank=8, dbo=DboPlan())
    cluster.round()
    cluster.finish()
    assert said.text.count(MEASURED) == 2
    for rank in (0, 1):
        cluster.kill(rank)
    for rank in (0, 1):
        cluster.start(rank)
    cluster.tell_all()
    said.clear()
    for _ in range(30):
        cluster.round()
    assert all(rank._overlap is not None and rank._overlap._seconds == 0 for rank in cluster.ranks.values())
    cluster.add(0, JOBS[0])
    cluster.finish()
    assert cluster.released == {0: expected[0]} and said.text.count(MEASURED) == 2


def test_a_loss_while_they_measure(expected: list[list[int]], said: pytest.LogCaptureFixture) -> None:
    for turns in (2, 5, 9):
        cluster = Survivors(CHECKPOINT, 3, slots_per_rank=8, dbo=DboPlan())
        cluster.add(0, JOBS[0])
        cluster.round(victim=1, turns=turns)  # everybody is there, and all begin
        assert 1 not in cluster.ranks and MEASURED not in said.text
        cluster.tell_all()
        cluster.replay()
        cluster.finish()
        assert cluster.released == {0: expected[0]} and said.text.count(MEASURED) == 2
        said.clear()


def test_a_rank_alone_has_nothing_to_measure(expected: list[list[int]], said: pytest.LogCaptureFixture) -> None:
    ranks = run(DboPlan(), expected, size=1)
    assert crossover(ranks[0]) is None and not said.text and ranks[0].stats.dbo_steps == 0


# ---- the plan says where, and what is there ----


def resolved(tmp_path: Path, **config: object) -> Plan:
    machine = Machine("cpu", 4, 8 << 30, True, True)
    return with_memory(plan_of(EngineConfig(data_parallel_size=2, **config), machine), tmp_path)  # type: ignore[arg-type]


def test_the_plan_explains_what_is_remembered(tmp_path: Path, expected: list[list[int]]) -> None:
    plan = resolved(tmp_path)
    assert plan.dbo is not None and Path(plan.dbo.memory).parent == tmp_path
    assert plan.reasons["dbo"] == "where it pays; measured when no rank has work, and then remembered"
    run(structs.replace(plan.dbo), expected)
    assert "remembered: decodes never (at " in resolved(tmp_path).reasons["dbo"]
    others = [resolved(tmp_path, **{name: value}) for name, value in (
        ("all2all_backend", "gloo"), ("threads_per_rank", 2), ("dtype", "bfloat16"), ("ubatch_size", 3),
        ("dbo_decode_token_threshold", 9), ("max_num_batched_tokens", 77),
    )]  # fmt: skip
    files = {other.dbo.memory for other in others if other.dbo is not None}
    assert len(files) == len(others) and plan.dbo.memory not in files
    assert "from 9 decode tokens as asked; measured" in others[4].reasons["dbo"]
    given = resolved(tmp_path, dbo_decode_token_threshold=9, dbo_prefill_token_threshold=10)
    assert given.dbo == DboPlan(decode_tokens=9, prefill_tokens=10)
