"""Ranks die and come back at any moment; every token still comes once, in order, and is the right one (float32)."""

from __future__ import annotations

from pathlib import Path

import hf_tiny
import numpy as np
import pytest
import torch
from amounts import examples
from balanced import RESTLESS, answer, balance_of, check_slots, status
from cache_files import CacheFiles
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from overlapped import OFTEN, SPLIT
from rank_parts import Job, drive, make_plan
from survivors import Survivors, undisturbed

from configs.dbo import DboPlan
from engine import rank as rank_module
from engine.build import build_rank
from ep.protocol import PeerLost
from eplb.placement import linear_placement
from eplb.repair import lost_experts
from front.messages import Membership, Shutdown
from models.tiny import CHECKPOINT

torch.set_num_threads(1)

NUM_EXPERTS = 8
RANDOM = {"temperature": 1.0, "presence_penalty": 0.5}
JOBS = [
    Job([5 + 3 * i, 7, 11 * i % 90 + 2, *range(2, 2 + i)], 9 + i % 4, params=RANDOM if i % 3 == 2 else {})
    for i in range(7)
]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("survival")).path


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> dict[int, list[int]]:
    return undisturbed(checkpoint, JOBS)


def spare_slots(size: int, num_experts: int = NUM_EXPERTS) -> int:
    """Enough for the loss of one."""
    return -(-num_experts // (size - 1))


def start(checkpoint: Path, size: int = 3, **overrides: object) -> Survivors:
    return Survivors(checkpoint, size, **{"slots_per_rank": spare_slots(size), **overrides})


@pytest.mark.parametrize(
    ("asynchronous", "dbo", "turns"),
    [
        pytest.param(asynchronous, dbo, turns, id=f"{name}-{turns}", marks=[] if turns in often else [pytest.mark.slow])
        for name, asynchronous, dbo, often in (
            ("whole", False, None, (0, 1, 2, 3, 5, 7, 99)),
            ("whole-asynchronous", True, None, (2,)),
            ("split", False, SPLIT, (3,)),
            ("split-asynchronous", True, SPLIT, (0, 1, 5, 99)),
        )
        for turns in (0, 1, 2, 3, 5, 7, 99)
    ],
)
def test_a_rank_dies_and_returns(
    checkpoint: Path, expected: dict[int, list[int]], asynchronous: bool, turns: int, dbo: DboPlan | None
) -> None:
    """turns: it dies before its record, waiting for it, in the first exchange, ..., after the step."""
    cluster = start(checkpoint, async_scheduling=asynchronous, dbo=dbo)
    for index in range(5):
        cluster.add(index, JOBS[index])
    for _ in range(4):
        cluster.round()
    cluster.round(victim=1, turns=turns)
    for _ in range(3):
        cluster.round()  # nobody has said yet who is left
    before = {index: list(tokens) for index, tokens in cluster.released.items()}
    cluster.tell_all()
    cluster.replay()
    for _ in range(4):
        cluster.round()
    assert any(len(cluster.released[index]) > len(before[index]) for index in before), "it goes on"
    assert sorted((joined.rank, joined.epoch) for joined in cluster.joined) == [(0, 1), (2, 1)]
    assert sum(joined.experts_loaded for joined in cluster.joined) == lost_by(1) * 3  # layers
    assert all((joined.bytes_read > 0) == (joined.experts_loaded > 0) for joined in cluster.joined)
    cluster.joined.clear()
    cluster.start(1)
    cluster.round()
    cluster.tell_all()
    for index in range(5, 7):
        cluster.add(index, JOBS[index])
    cluster.finish()
    assert cluster.released == expected
    assert sorted(joined.rank for joined in cluster.joined) == [0, 1, 2]
    assert {joined.experts_loaded for joined in cluster.joined} == {0}, "the one that came has read its own"


@pytest.mark.parametrize("turns", [2, 3, 4, 5])
def test_the_second_part_of_a_prompt_does_not_say_that_the_first_is_computed(checkpoint: Path, turns: int) -> None:
    """A rank ends while both parts of a step have tokens of one prompt; whoever has it next computes all of them."""
    jobs = [Job([5 + 3 * i, *range(2, 26)], 4) for i in range(3)]
    overrides = {"slots_per_rank": NUM_EXPERTS, "max_num_batched_tokens": 5, "dbo": SPLIT}
    cluster = start(checkpoint, 2, caches=CacheFiles(), **overrides)
    cluster.lose_one(jobs, turns)
    assert cluster.released == undisturbed(checkpoint, jobs)


def lost_by(rank: int) -> int:
    """Experts of a layer that the loss of `rank` of 3 leaves without a copy."""
    placement = linear_placement(1, NUM_EXPERTS, 3, spare_slots(3))
    return len(lost_experts(placement, [r != rank for r in range(3)])[0])


LONG = [Job([5 + 3 * i, 7, 11 * i % 90 + 2, *range(2, 2 + i)], 16 + i % 4) for i in range(7)]  # experts move meanwhile
MOVING = [structs.replace(RESTLESS, move_budget_mib=budget) for budget in (0.002, 0.01, 64.0)]


@pytest.fixture(scope="session")
def expected_long(checkpoint: Path) -> dict[int, list[int]]:
    return undisturbed(checkpoint, LONG)


@given(st.data())
@settings(max_examples=examples(35), deadline=None)
def test_losses_and_returns_at_any_moment(
    checkpoint: Path,
    expected: dict[int, list[int]],
    expected_long: dict[int, list[int]],
    data: st.DataObject,
) -> None:
    """Several losses, also while the survivors of the last one meet again, or while experts move all the time; news that
    reaches ranks at different times; caches that outlive their ranks, or not."""
    size = data.draw(st.integers(2, 4), "ranks")
    eplb = data.draw(st.sampled_from([None, *MOVING]), "eplb")
    cluster = start(
        checkpoint,
        size,
        caches=CacheFiles() if data.draw(st.booleans(), "caches") else None,
        slots_per_rank=data.draw(st.sampled_from([spare_slots(size), NUM_EXPERTS]), "slots"),
        async_scheduling=data.draw(st.booleans(), "asynchronous"),
        max_num_batched_tokens=data.draw(st.sampled_from([5, 64])),
        num_kv_blocks=data.draw(st.sampled_from([8, 64])),
        dbo=data.draw(st.sampled_from(OFTEN), "dbo"),
        eplb=eplb,
    )
    jobs, tokens = (JOBS, expected) if eplb is None else (LONG, expected_long)
    waiting = list(range(len(jobs)))
    events = ["kill", "return", "nothing"] if eplb is None else ["kill", "return", "rebalance"]
    for _ in range(data.draw(st.integers(1, 12), "events")):
        for _ in range(data.draw(st.integers(0, 3))):
            if waiting:
                cluster.add(waiting[0], jobs[waiting.pop(0)])
        cluster.rounds(data.draw(st.integers(0, 9), "rounds"))
        event = data.draw(st.sampled_from(events))
        if event == "kill" and len(cluster.ranks) > 1:
            cluster.round(data.draw(st.sampled_from(sorted(cluster.ranks)), "victim"), data.draw(st.integers(0, 12)))
            cluster.replay()
        elif event == "return" and len(cluster.ranks) < size:
            cluster.start(min(set(range(size)) - set(cluster.ranks)))
        else:
            leader = cluster.ranks[min(cluster.ranks)]
            if event == "rebalance" and balance_of(leader)._formed:
                answer(leader, "rebalance")
            continue
        cluster.news(data)
    for rank in set(range(size)) - set(cluster.ranks):  # else the slots may not suffice
        cluster.start(rank)
    cluster.tell_all()
    for index in waiting:
        cluster.add(index, jobs[index])
    cluster.finish()
    assert cluster.released == tokens
    if eplb is not None:
        cluster.rounds(4)  # ranks without requests have slept when they were told of the last change
        check_slots(checkpoint, list(cluster.ranks.values()))
        assert all(
            balance_of(rank)._coordinator is None or status(rank).failures == 0 for rank in cluster.ranks.values()
        )


def test_too_few_ranks_wait_for_one_that_returns(checkpoint: Path, expected: dict[int, list[int]]) -> None:
    cluster = start(checkpoint, 4)
    for index in range(7):
        cluster.add(index, JOBS[index])
    for _ in range(3):
        cluster.round()
    for victim in (1, 3):
        cluster.round(victim, 2)
        cluster.tell_all()
        cluster.replay()
    for _ in range(5):
        cluster.round()
    assert len(cluster.finished) == 0 and all(rank.pause(7.0) == 7.0 for rank in cluster.ranks.values())
    cluster.start(3)
    cluster.tell_all()
    cluster.finish()
    assert cluster.released == expected


def test_embedded_model_loses_two_of_four() -> None:
    """DeepSeek-shaped; 16 experts, and just the slots that a loss of two needs."""
    jobs = [Job([5 + 3 * i, 7, 11 + i], 8) for i in range(4)]
    single = drive([build_rank(make_plan(CHECKPOINT))], jobs)
    cluster = Survivors(CHECKPOINT, 4, slots_per_rank=8)
    for index, job in enumerate(jobs):
        cluster.add(index, job)
    for victim in (2, 0):
        for _ in range(2):
            cluster.round()
        cluster.round(victim, 4)
        cluster.tell_all()
        cluster.replay()
    cluster.finish()
    assert cluster.released == {index: got.tokens for index, got in enumerate(single)}
    assert sum(joined.experts_loaded for joined in cluster.joined) > 0


def test_a_ring_before_the_first_meeting_is_heard(checkpoint: Path, expected: dict[int, list[int]]) -> None:
    cluster = start(checkpoint)
    cluster.add(0, JOBS[0])  # rank 0 meets the others and rings before they have looked
    cluster.finish()
    assert cluster.released == {0: expected[0]}


def test_sleeping_ranks_change_over_at_once(checkpoint: Path) -> None:
    cluster = start(checkpoint)
    cluster.finish()
    cluster.kill(2)
    cluster.tell_all()
    for _ in range(3):
        cluster.round()
    assert sorted(joined.rank for joined in cluster.joined) == [0, 1]
    assert all(rank.idle for rank in cluster.ranks.values())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_when_nobody_is_lost_ranks_change_over_after_the_same_step(
    checkpoint: Path, expected: dict[int, list[int]], asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The news reaches rank 2 three steps late; until then all go on. No step is broken off."""
    cluster = start(checkpoint, async_scheduling=asynchronous)
    cluster.add(0, JOBS[0])
    for _ in range(3):
        cluster.round()
    tell = cluster.change()
    tell(0)
    tell(1)
    before = len(cluster.released[0])
    for _ in range(3):
        cluster.round()
    assert len(cluster.released[0]) == before + 3 and not cluster.joined
    tell(2)
    cluster.finish()
    assert cluster.released == {0: expected[0]} and len(cluster.joined) == 3
    assert "lost" not in caplog.text
    steps = cluster.ranks[0].stats.steps
    assert steps == JOBS[0].max_tokens + 1, "the step that was not taken is the only one to be made again"


def test_a_returned_rank_hears_the_bell(checkpoint: Path) -> None:
    """The others have slept more often than it has."""
    cluster = start(checkpoint)
    for index in range(3):
        cluster.add(3 * index, JOBS[0])
        cluster.finish()
    cluster.kill(1)
    cluster.tell_all()
    cluster.start(1)
    cluster.tell_all()
    for _ in range(5):
        cluster.round()
    assert all(rank.idle for rank in cluster.ranks.values())
    for index in range(10, 13):
        cluster.add(index, JOBS[1])
        cluster.finish()


def test_the_last_rank_goes_on_alone(checkpoint: Path, expected: dict[int, list[int]]) -> None:
    cluster = start(checkpoint, 2, async_scheduling=True)
    for index in range(7):
        cluster.add(index, JOBS[index])
    cluster.round()
    cluster.round(victim=0, turns=3)
    cluster.tell_all()
    cluster.replay()
    cluster.finish()
    assert cluster.released == expected


def test_a_rank_gives_up_when_nobody_says_who_is_left(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_module, "FENCE_SECONDS", 0.0)
    cluster = start(checkpoint, exchange_timeout=0.05)
    for index in range(3):
        cluster.add(index, JOBS[index])
    cluster.round(victim=2, turns=1)
    assert 0 < cluster.ranks[0].pause(10.0) <= 0.05
    with pytest.raises(PeerLost):
        while True:
            cluster.ranks[0].step()


def test_a_rank_that_is_left_out_leaves(checkpoint: Path, expected: dict[int, list[int]]) -> None:
    """Shrinking on purpose: the others need not wait for its end to be noticed."""
    cluster = start(checkpoint)
    for index in range(7):
        cluster.add(index, JOBS[index])
    for _ in range(3):
        cluster.round()
    leaver = cluster.ranks[0]
    leaver.submit(Membership(1, [False, True, True]))
    cluster.round()
    assert leaver.done
    cluster.kill(0)
    cluster.tell_all()
    cluster.replay()
    cluster.finish()
    assert cluster.released == expected


def test_ranks_that_wait_for_each_other_leave_when_told(checkpoint: Path) -> None:
    cluster = start(checkpoint)
    cluster.add(0, JOBS[0])
    cluster.round(victim=2, turns=1)
    for rank in cluster.ranks.values():
        rank.submit(Shutdown())
        rank.step()
        assert rank.done
    joiner = build_rank(cluster.plan, 2, cluster.meet, join=True)
    assert joiner.step() == [] and joiner.pause(5.0) == 5.0
    joiner.submit(Shutdown())
    joiner.step()
    assert joiner.done


def test_an_old_membership_changes_nothing(checkpoint: Path) -> None:
    cluster = start(checkpoint)
    cluster.finish()
    for rank in cluster.ranks.values():
        rank.submit(Membership(0, [True] * 3))
    cluster.round()
    assert not cluster.joined and all(rank.idle for rank in cluster.ranks.values())


def test_dense_ranks_only_take_note(tmp_path: Path) -> None:
    path = hf_tiny.make_qwen3(tmp_path).path
    cluster = Survivors(path, 2)
    jobs = JOBS[:2]
    single = drive([build_rank(make_plan(path))], jobs)
    for index, job in enumerate(jobs):
        cluster.add(index, job)
    cluster.round()
    cluster.kill(1)
    cluster.tell_all()
    cluster.replay()
    cluster.finish()
    assert cluster.released == {index: got.tokens for index, got in enumerate(single)}
    assert [joined.rank for joined in cluster.joined] == [0]


def test_the_experts_of_a_repaired_rank_are_those_of_the_checkpoint(checkpoint: Path) -> None:
    """Every slot of every survivor, byte by byte."""
    cluster = start(checkpoint)
    cluster.finish()
    cluster.kill(0)
    cluster.tell_all()
    for _ in range(3):
        cluster.round()
    whole = hf_tiny.load_ours(checkpoint)
    for rank, alive in cluster.ranks.items():
        model = alive._team._model
        placement = model.parallel.placement
        assert placement is not None and placement.epoch == 1
        for layer, ((_, ours), (_, theirs)) in enumerate(zip(model._hosts, whole._hosts, strict=True)):
            for slot, expert in enumerate(placement.experts_of(layer, rank)):
                assert expert >= 0
                kept = zip(ours.experts.slot_storage(slot), theirs.experts.slot_storage(expert), strict=True)
                assert all(torch.equal(here, there) for here, there in kept)
    assert np.allclose(placement.share.sum(), 3 * NUM_EXPERTS)
