"""Experts change their ranks while requests run (ranks of one thread): every token is the right one, and the numbers add up."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import hf_tiny
import numpy as np
import pytest
import torch
from amounts import examples
from balanced import RESTLESS, answer, ask, balance_of, check_slots, placement_of, reports, status
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from overlapped import OFTEN, SPLIT
from rank_parts import Got, Job, drive, mailbox_ranks, make_plan

from configs.dbo import DboPlan
from configs.eplb import EplbConfig
from engine.build import build_rank
from engine.rebalance.start import start_placement
from eplb.offline.placement_file import decode_placement, describe, write_placement
from eplb.offline.trace import read_trace
from eplb.placement import Placement, linear_placement
from eplb.repair import even_shares
from front.messages import BalanceCommand, BalanceReply
from models.tiny import CHECKPOINT

torch.set_num_threads(1)

MAX_LEN = 48
LAYERS, EXPERTS, TOP_K = 3, 16, 4  # of the embedded model
JOBS = [Job([5 + 3 * i, 7, 11 * i % 90 + 2, *range(2, 2 + i)], 24 + i % 4) for i in range(8)]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("balance")).path


@pytest.fixture(scope="session")
def expected() -> list[list[int]]:
    return [got.tokens for got in drive([build_rank(make_plan(CHECKPOINT))], JOBS)]


def tokens(got: Sequence[Got]) -> list[list[int]]:
    return [one.tokens for one in got]


@pytest.mark.parametrize(
    ("asynchronous", "budget"),
    [
        (False, 64.0),
        (True, 0.02),
        pytest.param(True, 64.0, marks=pytest.mark.slow),
        pytest.param(False, 0.02, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_rank(expected: list[list[int]], asynchronous: bool, budget: float) -> None:
    """budget: far above all experts together, or a tenth of one expert."""
    config = structs.replace(RESTLESS, move_budget_mib=budget)
    ranks = mailbox_ranks(CHECKPOINT, 4, slots_per_rank=6, eplb=config, async_scheduling=asynchronous)
    assert tokens(drive(ranks, JOBS)) == expected
    first = status(ranks[0])
    assert first.moves > 0 and first.bytes_moved > 0 and first.reweights > 0 and first.failures == 0
    ask(ranks[0], "rebalance")
    assert tokens(drive(ranks, JOBS)) == expected
    assert status(ranks[0]).moves > first.moves
    check_slots(CHECKPOINT, ranks)


@st.composite
def jobs_strategy(draw: st.DrawFn) -> list[Job]:
    jobs = []
    for _ in range(draw(st.integers(1, 7))):
        arrive = draw(st.integers(0, 12))
        abort = draw(st.none() | st.integers(arrive, arrive + 15))
        prompt = draw(st.lists(st.integers(2, 90), min_size=1, max_size=20))
        jobs.append(Job(prompt, draw(st.integers(1, 24)), arrive, abort))
    return jobs


@settings(max_examples=examples(15), deadline=None)
@given(
    jobs=jobs_strategy(),
    size=st.integers(2, 4),
    spare=st.integers(0, 2),
    asynchronous=st.booleans(),
    blocks=st.integers(MAX_LEN // 4, 20),
    batched=st.sampled_from([3, 64]),
    budget=st.sampled_from([0.001, 0.01, 64.0]),
    intervals=st.sampled_from([(1, 2), (2, 4), (0, 3), (3, 0), (5, 20)]),
    rebalance=st.integers(0, 1),
    dbo=st.sampled_from(OFTEN),
)
def test_whatever_happens_tokens_are_the_same(
    checkpoint: Path,
    jobs: list[Job],
    size: int,
    spare: int,
    asynchronous: bool,
    blocks: int,
    batched: int,
    budget: float,
    intervals: tuple[int, int],
    rebalance: int,
    dbo: DboPlan | None,
) -> None:
    """Aborts, prompts in pieces, preemption; plans taken on top of plans."""
    config = structs.replace(
        RESTLESS, move_budget_mib=budget, reweight_interval=intervals[0], move_interval=intervals[1]
    )
    common = {"max_model_len": MAX_LEN, "num_kv_blocks": blocks, "max_num_batched_tokens": batched, "dbo": dbo}
    single = drive(
        [build_rank(make_plan(checkpoint, max_model_len=MAX_LEN))], [structs.replace(j, abort=None) for j in jobs]
    )
    slots = -(-8 // size) + spare
    ranks = mailbox_ranks(checkpoint, size, slots_per_rank=slots, eplb=config, async_scheduling=asynchronous, **common)
    for turn in range(2):
        for want, got in zip(single, drive(ranks, jobs), strict=True):
            if got.finish_reason is None:
                assert got.tokens == want.tokens[: len(got.tokens)]
            else:
                assert got.tokens == want.tokens
        if turn == 0 and rebalance:
            answer(ranks[0], "rebalance")  # refused when nothing was counted
    assert status(ranks[0]).failures == 0
    check_slots(checkpoint, ranks)
    assert all(rank.idle and rank.stats.kv_blocks_used == 0 for rank in ranks)


def test_counts_are_those_of_every_token(expected: list[list[int]]) -> None:
    """Of all ranks, once each; the rows that ranks computed add up to the same; and whatever the placement and the parts."""
    config = EplbConfig(window_size=20, reweight_interval=5, move_interval=0)
    loads = []
    for size, dbo in ((2, None), (4, None), (2, SPLIT)):
        ranks = mailbox_ranks(CHECKPOINT, size, slots_per_rank=9, eplb=config, dbo=dbo)
        assert tokens(drive(ranks, JOBS)) == expected
        (report, *_) = reports(ranks[0].take_events())
        load = ask(ranks[0], "load")
        counts = np.array(load["load"])
        assert counts.shape == (LAYERS, EXPERTS) and load["steps"] == report.steps == 20
        # 8 prompts, then a token of each per step.
        assert load["tokens"] == sum(len(job.prompt) for job in JOBS) + 19 * 8
        assert (counts.sum(1) == TOP_K * load["tokens"]).all()
        assert len(report.window_balance) == len(report.step_balance) == len(report.lower_bound) == LAYERS
        for window, step, bound in zip(report.window_balance, report.step_balance, report.lower_bound, strict=True):
            assert 1 / size <= step <= window <= 1 and bound <= 1
        loads.append(counts)
        assert not reports(ranks[1].take_events())
    assert (loads[0] == loads[1]).all() and (loads[0] == loads[2]).all(), (
        "who computes what changes nothing in what is counted"
    )


def test_balance_gets_better() -> None:
    """Loads come from a placement that puts the hottest experts together."""
    config = EplbConfig(window_size=20, reweight_interval=0, move_interval=0)
    ranks = mailbox_ranks(CHECKPOINT, 4, slots_per_rank=6, eplb=config)
    drive(ranks, JOBS)
    before = reports(ranks[0].take_events())[-1]
    assert before.reweights == before.moves == 0
    planned = ask(ranks[0], "plan")
    assert planned["moves"] == len(planned["moved"]) > 0 and status(ranks[0]).moving == 0
    assert np.mean(planned["balance_planned"]) > np.mean(planned["balance_now"])
    taken = ask(ranks[0], "rebalance")
    assert taken["moves"] == planned["moves"] and taken["taken"]
    drive(ranks, JOBS[:1])  # the ranks finish it although there is little to do
    done = status(ranks[0])
    assert done.moving == 0 and done.moves == taken["moves"] and done.age_steps < 24
    drive(ranks, JOBS)
    after = reports(ranks[0].take_events())[-1]
    assert np.mean(after.window_balance) > np.mean(before.window_balance) + 0.05
    check_slots(CHECKPOINT, ranks)


def test_ranks_without_requests_finish_their_moves_and_sleep() -> None:
    ranks = mailbox_ranks(CHECKPOINT, 3, slots_per_rank=7, eplb=structs.replace(RESTLESS, move_interval=0))
    drive(ranks, JOBS)
    assert ask(ranks[0], "rebalance")["moves"] > 0
    steps = ranks[0].stats.steps
    assert ranks[0].has_work
    drive(ranks, [])
    assert status(ranks[0]).moving == 0 and status(ranks[0]).moves > 0
    assert all(rank.idle and not rank.has_work and rank.pause(9.0) == 9.0 for rank in ranks)
    assert ranks[0].stats.steps == steps
    check_slots(CHECKPOINT, ranks)


def test_shares_change_without_moves(expected: list[list[int]]) -> None:
    ranks = mailbox_ranks(CHECKPOINT, 4, slots_per_rank=6, eplb=structs.replace(RESTLESS, move_interval=0))
    linear = linear_placement(LAYERS, EXPERTS, 4, 6)
    assert tokens(drive(ranks, JOBS)) == expected
    now = status(ranks[0])
    assert now.reweights > 0 and now.moves == now.bytes_moved == 0
    for rank in ranks:
        assert np.array_equal(placement_of(rank).slot_to_expert, linear.slot_to_expert)
        assert not np.allclose(placement_of(rank).share, linear.share)


# ---- when it fails ----


def test_a_failing_balancer_says_so_and_serving_goes_on(
    expected: list[list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = mailbox_ranks(CHECKPOINT, 4, slots_per_rank=6, eplb=RESTLESS)
    drive(ranks, JOBS[:1])
    ranks[0].take_events()
    before = placement_of(ranks[0]).checksum()

    def fail(counts_LE: object) -> None:
        raise ValueError("every load must be finite\nand so on")

    with caplog.at_level(logging.ERROR, "moesaic.eplb"), monkeypatch.context() as broken:
        broken.setattr(balance_of(ranks[0])._coordinator._balancer, "observe", fail)
        assert tokens(drive(ranks, JOBS)) == expected
    failed = reports(ranks[0].take_events())
    assert failed[0].failures == 1 and failed[0].last_error == "ValueError: every load must be finite"
    assert failed[-1].failures > 1, "reports of windows go on"
    assert [record.message.startswith("event=eplb_failed") for record in caplog.records] == [True], "once"
    assert placement_of(ranks[0]).checksum() == before
    assert tokens(drive(ranks, JOBS)) == expected
    now = status(ranks[0])
    assert now.last_error == "" and now.failures >= failed[-1].failures
    assert placement_of(ranks[0]).checksum() != before


def test_a_placement_that_a_rank_cannot_take_is_given_up(expected: list[list[int]]) -> None:
    ranks = mailbox_ranks(CHECKPOINT, 4, slots_per_rank=6, eplb=RESTLESS)
    drive(ranks, JOBS[:1])
    before = placement_of(ranks[0]).checksum()
    storage = balance_of(ranks[2])._model.expert_storage

    def fail(layer: int, slot: int) -> tuple[torch.Tensor, ...]:
        raise MemoryError("no room for the experts to come")

    balance_of(ranks[2])._model.expert_storage = fail
    ask(ranks[0], "rebalance")
    drive(ranks, [])
    now = status(ranks[0])
    assert now.failures > 0 and now.last_error and now.moving == 0
    assert {placement_of(rank).checksum() for rank in ranks} == {before}
    balance_of(ranks[2])._model.expert_storage = storage
    assert tokens(drive(ranks, JOBS)) == expected
    assert placement_of(ranks[0]).checksum() != before
    check_slots(CHECKPOINT, ranks)


# ---- questions ----


def test_what_is_asked_is_answered(tmp_path: Path) -> None:
    ranks = mailbox_ranks(CHECKPOINT, 2, slots_per_rank=9, eplb=EplbConfig())
    command = BalanceCommand(command_id=3, kind="status")
    ranks[0].submit(command)
    assert not ranks[0].take_events(), "not before the ranks have met"
    drive(ranks, [])
    (reply,) = ranks[0].take_events()
    assert isinstance(reply, BalanceReply) and reply.command_id == 3 and not reply.error
    assert "no tokens have been counted" in answer(ranks[0], "plan").error
    ranks[1].submit(command)
    (reply,) = ranks[1].take_events()
    assert isinstance(reply, BalanceReply) and "rank 1 does not lead" in reply.error
    found = decode_placement(answer(ranks[0], "placement").body)
    assert np.array_equal(found.placement.slot_to_expert, placement_of(ranks[0]).slot_to_expert)
    assert found.model == "test" and found.layer_ids == (1, 2, 3)
    assert "No such file" in answer(ranks[0], "record", str(tmp_path / "nowhere" / "x.jsonl")).error

    single = build_rank(make_plan(CHECKPOINT))
    assert "not balanced" in answer(single, "status").error


def test_a_recording_holds_every_step(expected: list[list[int]], tmp_path: Path) -> None:
    ranks = mailbox_ranks(CHECKPOINT, 4, slots_per_rank=6, eplb=RESTLESS)
    drive(ranks, JOBS[:2])
    path = tmp_path / "load.jsonl"
    ask(ranks[0], "record", str(path))
    assert status(ranks[0]).recording == str(path)
    begin = status(ranks[0]).steps
    assert tokens(drive(ranks, JOBS)) == expected
    assert ask(ranks[0], "record")["ended"] == str(path) and status(ranks[0]).recording == ""
    trace = read_trace(path)
    assert trace.meta.model == "test" and trace.meta.ranks == 4 and trace.meta.top_k == TOP_K
    assert trace.layer_ids == (1, 2, 3) and trace.step[0] == begin
    assert (np.diff(trace.step) == trace.steps[:-1]).all() and set(trace.steps.tolist()) == {2}
    assert trace.load.shape[1:] == (LAYERS, EXPERTS)
    assert np.allclose(trace.load.sum(2), TOP_K * trace.tokens[:, None])
    assert "exists" in answer(ranks[0], "record", str(path)).error


@pytest.mark.attacks
def test_a_recording_on_a_disk_that_fills_ends_alone(expected: list[list[int]], tmp_path: Path) -> None:
    """Also when the last of it finds no room as the rank leaves."""
    ranks = mailbox_ranks(CHECKPOINT, 4, slots_per_rank=6, eplb=RESTLESS)
    drive(ranks, JOBS[:2])
    path = tmp_path / "load.jsonl"
    ask(ranks[0], "record", str(path))
    [file] = [int(link.name) for link in Path("/proc/self/fd").iterdir() if link.exists() and link.samefile(path)]
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file)
    os.close(full)
    assert tokens(drive(ranks, JOBS)) == expected
    ask(ranks[0], "record")
    now = status(ranks[0])
    assert now.recording == "" and now.failures and "No space left" in now.last_error


# ---- an operator's placement ----


def test_ranks_begin_with_an_operators_placement(expected: list[list[int]], tmp_path: Path) -> None:
    ids = (
        np.random.default_rng(0)
        .permutation(np.arange(20) % EXPERTS)
        .reshape(1, 4, 5)
        .repeat(LAYERS, 0)
        .astype(np.int32)
    )
    placement = Placement(0, EXPERTS, ids, even_shares(ids, EXPERTS), (True,) * 4)
    path = tmp_path / "placement.json"
    write_placement(path, describe(placement))
    config = EplbConfig(placement=str(path), move_interval=0, reweight_interval=0)
    ranks = mailbox_ranks(CHECKPOINT, 4, slots_per_rank=6, eplb=config)
    assert tokens(drive(ranks, JOBS)) == expected
    assert np.array_equal(placement_of(ranks[0]).slot_to_expert[:, :, :5], ids)
    assert (placement_of(ranks[0]).slot_to_expert[:, :, 5] == -1).all()
    check_slots(CHECKPOINT, ranks)


def test_a_placement_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    write_placement(path, describe(linear_placement(LAYERS, EXPERTS, 4, 6)))
    for num_experts, shape, why in (
        (8, (LAYERS, 4, 6), "experts is 16; the model has 8"),
        (16, (2, 4, 6), "layers is 3; the model has 2 MoE layers"),
        (16, (LAYERS, 8, 6), "ranks is 4; --data-parallel-size is 8"),
        (16, (LAYERS, 4, 5), "it needs 6 slots per rank, there are 5; --num-redundant-experts 8 gives enough"),
    ):
        with pytest.raises(ValueError, match=why) as raised:
            start_placement(str(path), num_experts, shape)
        assert str(path) in str(raised.value)
    fits = start_placement(str(path), 16, (LAYERS, 4, 6))
    assert np.array_equal(fits.slot_to_expert, linear_placement(LAYERS, EXPERTS, 4, 6).slot_to_expert)
