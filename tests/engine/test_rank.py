"""The rank's own protocol: agreement, sleep and doorbell, errors, leaving."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hf_tiny
import pytest
import torch
from rank_parts import Job, drive, mailbox_ranks, make_plan, meet_in

from dbo import alive
from dbo.steps import drain, weave
from engine.agreement import Agreement, Proposal, StepPlan
from engine.build import build_rank
from engine.doorbell import SharedDoorbell
from engine.process.heartbeat import LoopBeat, idle_beat
from engine.process.local_ranks import LocalRanks
from ep.protocol import PeerLost
from ep.recorder import Kind
from ep.transport.group import LocalGroup, MailboxGroup, MailboxWorld
from front.messages import AddRequest, Membership, Outputs, RankReady, ResetPrefixCache, Shutdown
from models.tiny import CHECKPOINT

torch.set_num_threads(1)
IDLE = Proposal(0, False, False, 10)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("rank")).path


# ---- agreement ----


def agree(proposals: list[Proposal], epochs: list[int], checksums: list[int]) -> list[StepPlan]:
    world = MailboxWorld(len(proposals))
    agreements = [Agreement(MailboxGroup(world, r), epochs[r], checksums[r]) for r in range(len(proposals))]
    pending = [agreement.propose(proposal) for agreement, proposal in zip(agreements, proposals, strict=True)]
    return [plan.wait() for plan in pending]


def test_all_ranks_come_to_the_same_plan() -> None:
    plans = agree([IDLE, Proposal(5, True, False, 3), Proposal(0, True, True, 4)], [2, 2, 2], [9, 9, 9])
    assert plans[0] == plans[1] == plans[2]
    said = ((), (), ())
    assert plans[0] == StepPlan(0, True, True, num_tokens=(0, 5, 0), free_blocks=(10, 3, 4), words=said, epoch=2)
    assert not plans[0].runs, "a step that is the last one computes nothing"
    (idle, _) = agree([IDLE, IDLE], [0, 0], [0, 0])
    assert not idle.busy and not idle.runs and not idle.shutdown


def test_ranks_change_over_when_all_have_heard_of_it() -> None:
    one, two, three = (Proposal(0, False, False, 10, known_epoch=epoch) for epoch in (4, 5, 6))
    assert [plan.known_epoch for plan in agree([two, one, three], [4] * 3, [0] * 3)] == [4] * 3
    assert [plan.known_epoch for plan in agree([two, three, three], [4] * 3, [0] * 3)] == [5] * 3


def test_a_rank_alone_agrees_with_itself() -> None:
    agreement = Agreement(LocalGroup(), 0, 0)
    assert [agreement.propose(IDLE).wait().step for _ in range(3)] == [0, 1, 2]


def test_a_rank_in_a_long_step_does_not_look_idle(tmp_path: Path) -> None:
    """Its loop makes no mark for as long as the step takes; what gets ready beside idle ranks waits."""
    world, path = MailboxWorld(2), tmp_path / "beat-0"
    beat = LoopBeat(path)
    for groups in ([LocalGroup()], [MailboxGroup(world, rank) for rank in range(2)]):
        alive.meets(0, range(len(groups)), Kind.MEETING)
        assert idle_beat(path) is not None, "it has had no work yet"
        agreements = [Agreement(group, 0, 0) for group in groups]
        for proposal in (Proposal(5, True, False, 3), IDLE, Proposal(5, True, False, 3)):
            pending = [agreement.propose(proposal) for agreement in agreements]
            assert all(plan.wait().busy is proposal.has_work for plan in pending)
            assert (idle_beat(path) is None) is proposal.has_work
    beat.close()


def test_ranks_that_differ_are_named() -> None:
    world = MailboxWorld(3)
    agreements = [Agreement(MailboxGroup(world, rank), 1, [7, 8, 7][rank], ranks=(2, 5, 6)) for rank in range(3)]
    pending = [agreement.propose(IDLE) for agreement in agreements]
    said = r"disagree on the checksum of the placement \(rank 2: 7, rank 5: 8, rank 6: 7\); not with the others: rank 5"
    with pytest.raises(RuntimeError, match=said):
        pending[1].wait()
    for rank in (0, 2):
        with pytest.raises(PeerLost, match=said) as lost:
            pending[rank].wait()
        assert lost.value.ranks == (1,)
    with pytest.raises(PeerLost, match=r"disagree on the epoch \(rank 0: 1, rank 1: 0\); not with the others: rank 1"):
        agree([IDLE, IDLE], [1, 0], [7, 7])


def test_a_pass_that_was_left_out_is_named() -> None:
    world = MailboxWorld(3)
    agreements = [Agreement(MailboxGroup(world, rank), 0, 7) for rank in range(3)]
    agreements[0].passes = agreements[1].passes = 1
    pending = [agreement.propose(IDLE) for agreement in agreements]
    with pytest.raises(PeerLost, match=r"number of passes computed \(rank 0: 1, rank 1: 1, rank 2: 0\)") as lost:
        pending[0].wait()
    assert lost.value.ranks == (2,)


def test_ranks_of_different_placement_do_not_run_together(checkpoint: Path) -> None:
    world, bell = MailboxWorld(2), SharedDoorbell()
    ranks = []
    for rank, slots in enumerate((4, 5)):
        plan = make_plan(checkpoint, data_parallel_size=2, all2all_backend="mailbox", slots_per_rank=slots)
        ranks.append(build_rank(plan, rank, meet_in({0: world}), bell))
    ranks[0].submit(Job([5, 6, 7], 4).message(0))
    with pytest.raises(RuntimeError, match="disagree on the checksum of the placement"):
        drain(weave(*(rank.steps() for rank in ranks)))


# ---- sleep ----


def test_all_sleep_together_and_one_wakes_all(checkpoint: Path) -> None:
    ranks = mailbox_ranks(checkpoint, 3)
    for _ in range(3):
        drive(ranks, [])
        assert all(rank.idle for rank in ranks)
        got = drive(ranks, [Job([5, 6, 7], 4)])  # for rank 0 alone
        assert len(got[0].tokens) == 4
        assert all(rank.idle for rank in ranks)
    assert all(rank.stats.steps > 0 for rank in ranks[:1])


def test_a_ring_for_an_earlier_sleep_wakes_nobody(checkpoint: Path) -> None:
    bell = SharedDoorbell()
    rank = build_rank(make_plan(checkpoint), bell=bell)
    rank.step()
    drive([rank], [Job([5, 6], 2)])
    bell.ring(0)  # it has slept twice by now
    rank.step()
    assert rank.idle


def test_dense_ranks_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Without experts there is no exchange, so there is no lockstep."""
    path = hf_tiny.make_qwen3(tmp_path).path
    ranks = mailbox_ranks(path, 2)
    assert len(drive(ranks[:1], [Job([5, 6, 7], 4)])[0].tokens) == 4


# ---- requests that cannot run ----


def test_a_prompt_that_does_not_fit_is_an_error_output(checkpoint: Path) -> None:
    rank = build_rank(make_plan(checkpoint, max_model_len=16))
    jobs = [Job(list(range(2, 30)), 4), Job([5, 6, 7], 4), Job([5, 6, 7, 8], 0)]
    got = drive([rank], jobs)
    assert [result.finish_reason for result in got] == ["error", "length", "length"]
    assert [len(result.tokens) for result in got] == [0, 4, 0]


def test_a_request_id_in_use_is_an_error_output(checkpoint: Path) -> None:
    rank = build_rank(make_plan(checkpoint))
    rank.submit(Job([5, 6, 7], 4).message(1))
    rank.submit(Job([5, 6, 7], 4).message(1))
    assert [output.finish_reason for output in rank.step()][:1] == ["error"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stop_tokens_and_seeds_hold_in_both_modes(checkpoint: Path, asynchronous: bool) -> None:
    """A sequence that ends unforeseen is one step further on when the schedule is asynchronous; nothing of it shows."""
    plain = drive([build_rank(make_plan(checkpoint))], [Job([5, 6, 7], 12)])[0].tokens
    stop = plain[5]
    rank = build_rank(make_plan(checkpoint, async_scheduling=asynchronous))
    random = {"temperature": 1.0, "logprobs": 1}
    jobs = [Job([5, 6, 7], 12, params={"stop_token_ids": (stop,)}), Job([5, 6], 12, params=random)]
    got = drive([rank], jobs)
    assert got[0].tokens == plain[: plain.index(stop) + 1] and got[0].finish_reason == "stop"
    again = drive([rank], [jobs[1], jobs[1]])  # ids are the seeds
    assert again[1].tokens == got[1].tokens != again[0].tokens
    assert all(output.logprobs is not None for output in got[1].outputs)
    rank.close()


def test_a_rank_does_not_go_on_after_a_step_that_was_left_half_way(checkpoint: Path) -> None:
    ranks = mailbox_ranks(checkpoint, 2)
    ranks[0].submit(Job([5, 6, 7], 4).message(0))
    steps = weave(*(rank.steps() for rank in ranks))
    next(steps)
    next(steps)
    steps.close()
    for rank in ranks:
        with pytest.raises(RuntimeError, match="an earlier step failed or was interrupted"):
            rank.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("embedded", [False, True])
def test_either_dtype_from_a_checkpoint_of_either(checkpoint: Path, dtype: str, embedded: bool) -> None:
    rank = build_rank(make_plan(CHECKPOINT if embedded else checkpoint, dtype=dtype))
    assert len(drive([rank], [Job([5, 6, 7], 4)])[0].tokens) == 4


# ---- leaving ----


@pytest.mark.parametrize("asynchronous", [False, True])
def test_shutdown_of_one_ends_all_in_the_same_step(checkpoint: Path, asynchronous: bool) -> None:
    ranks = mailbox_ranks(checkpoint, 2, async_scheduling=asynchronous)
    ranks[0].submit(Job([5, 6, 7], 20).message(0))
    for _ in range(3):
        drain(weave(*(rank.steps() for rank in ranks)))
    ranks[1].submit(Shutdown())
    drain(weave(*(rank.steps() for rank in ranks)))
    assert all(rank.done for rank in ranks)
    assert [rank.step() for rank in ranks] == [[], []]


def test_shutdown_wakes_sleeping_ranks(checkpoint: Path) -> None:
    ranks = mailbox_ranks(checkpoint, 2)
    drive(ranks, [])
    ranks[0].submit(Shutdown())
    drain(weave(*(rank.steps() for rank in ranks)))
    assert all(rank.done for rank in ranks)


# ---- one rank in this process ----


def receive_all(ranks: LocalRanks, num_requests: int) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    finished = 0
    deadline = time.monotonic() + 20
    while finished < num_requests:
        assert time.monotonic() < deadline
        for message in ranks.receive(1.0):
            assert isinstance(message, Outputs)
            for output in message.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                finished += output.finish_reason is not None
    return tokens


@pytest.mark.parametrize("asynchronous", [False, True])
def test_local_ranks(checkpoint: Path, asynchronous: bool) -> None:
    ranks = LocalRanks(build_rank(make_plan(checkpoint, async_scheduling=asynchronous)))
    (ready,) = ranks.receive(0)
    assert isinstance(ready, RankReady)
    assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (64, 4, 64)
    assert ready.bytes_read > 0 and ready.vocab_size == hf_tiny.VOCAB
    assert ranks.receive(0) == []
    ranks.send(0, Job([5, 6, 7], 4).message(0))
    ranks.send(0, Job([8, 9], 6).message(1))
    tokens = receive_all(ranks, 2)
    assert [len(tokens[0]), len(tokens[1])] == [4, 6]
    ranks.send(0, ResetPrefixCache())
    assert ranks.receive(0.02) == []
    with pytest.raises(ValueError, match=r"rank 1 is not in 0\.\.0"):
        ranks.send(1, Shutdown())
    ranks.close()


def test_an_idle_local_rank_waits_for_a_message_from_another_thread(checkpoint: Path) -> None:
    ranks = LocalRanks(build_rank(make_plan(checkpoint)))
    ranks.receive(0)
    message: AddRequest = Job([5, 6, 7], 1).message(0)
    began = time.process_time()
    timer = threading.Timer(0.3, ranks.send, (0, message))
    timer.start()
    (outputs,) = ranks.receive(10.0)
    assert time.process_time() - began < 0.2, "it did not sleep"
    assert isinstance(outputs, Outputs) and outputs.outputs[0].finish_reason == "length"
    timer.join()
    ranks.close()


def test_a_local_rank_prepares_while_it_has_no_work(checkpoint: Path) -> None:
    rank = build_rank(make_plan(checkpoint))
    pieces = 0

    def preparation() -> Iterator[int]:
        nonlocal pieces
        while True:
            pieces += 1
            yield 1

    def prepares(more_than: int) -> None:
        deadline = time.monotonic() + 10
        while pieces <= more_than:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    rank._preparation = preparation()
    ranks = LocalRanks(rank)
    ranks.receive(0)
    prepares(0)
    ranks.send(0, Job([5, 6, 7], 20).message(0))
    ranks.receive(1.0)
    begun = pieces
    for _ in range(18):
        assert ranks.receive(1.0)
    assert pieces <= begun + 1  # one may have been under way
    ranks.receive(1.0)
    prepares(begun + 1)
    ranks.close()
    assert not any(thread.name == "prepare" for thread in threading.enumerate())


def test_a_rank_prepares_nothing_while_it_waits_for_the_others(checkpoint: Path) -> None:
    """What begins then, as reading the vocabulary on a thread, would slow the first step after a loss."""
    rank = build_rank(make_plan(checkpoint), join=True)
    rank._preparation = iter([1, 1])
    assert not rank.prepare()
    rank.submit(Membership(1, [True]))
    while not rank.serving:
        rank.step()
    assert rank.prepare()
    rank.close()
