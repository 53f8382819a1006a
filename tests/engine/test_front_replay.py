"""The front when ranks are lost and return: nothing repeated, nothing missing, whatever comes late."""

from __future__ import annotations

import itertools
import random

import pytest
from amounts import examples
from front_parts import ready
from front_world import TOKENIZER, World, joined, make_front, make_prompt, outputs, token_of
from hypothesis import given, settings
from hypothesis import strategies as st

from front.driver import in_order
from front.front import EngineBusy, Front
from front.members import GATHER_SECONDS, State
from front.messages import (
    Abort,
    AddRequest,
    Logprobs,
    Membership,
    NoneLeft,
    RankFailed,
    RankLost,
    RankStats,
    RankToFront,
    TokenOutput,
    Waiting,
)


def test_a_lost_rank_s_requests_go_on_elsewhere() -> None:
    front = make_front(3, num_experts=4, slots_per_rank=2)
    [(rank, first)] = front.add(make_prompt(logprobs=0, prompt_logprobs=0, seed=9))
    scored = [Logprobs([5], [-1.0], 1)]
    work = front.on_message(outputs(rank, TokenOutput(first.request_id, [70], None, None, scored, [None, *scored], 3)))
    assert work.deltas[0][1].prompt_logprobs and work.deltas[0][1].num_cached_tokens == 3

    work = front.on_message(RankLost(rank, "killed", 99.0, 1))
    alive = [place != rank for place in range(3)]
    others = [place for place in range(3) if place != rank]
    assert work.deltas == []
    (other, second), *told = work.messages  # before the survivors compute the first step of the epoch
    assert told == [(place, Membership(1, alive, 1)) for place in others]
    assert other in others and second.token_ids == [*first.token_ids, 70] and second.prompt_len == first.prompt_len
    assert (second.seed, second.arrival, second.params.max_tokens) == (9, first.arrival, 8)
    assert first.formers == () and second.formers == ((rank, first.request_id, len(first.token_ids)),)
    assert first.params.prompt_logprobs == 0 and second.params.prompt_logprobs is None
    assert front.num_replayed == 1 and front.router.loads[rank] == 0 and rank not in front.ready

    assert front.on_message(outputs(rank, TokenOutput(first.request_id, [71]))) == ([], [])  # comes late
    assert front.stats[rank] == RankStats()
    work = front.on_message(outputs(other, TokenOutput(second.request_id, [71], "length", None, scored, None, 8)))
    [(_, delta)] = work.deltas
    assert delta.token_ids == [71] and len(delta.logprobs) == 1 and delta.num_cached_tokens == 0
    [record] = front.take_finished()
    assert (record.num_output_tokens, record.num_cached_tokens, record.rank) == (2, 3, other)
    assert front.router.loads == [0, 0, 0]


def test_what_was_sent_to_a_rank_after_its_end_is_not_computed_by_the_next_process() -> None:
    """All ranks end at once, and the front hears of it one after another: what it moves meanwhile to one that has ended too
    comes to the process that follows, which has the rank's name by then."""
    front = make_front(3, num_experts=4, slots_per_rank=4)
    sent = [message for index in range(6) for message in front.add(make_prompt(f"r{index}"))]
    for lost in range(3):
        work = front.on_message(RankLost(lost, "killed by SIGKILL", 99.0, 1))
        sent += [(rank, message) for rank, message in work.messages if isinstance(message, AddRequest)]
    old = [{message.request_id for rank, message in sent if rank == place} for place in range(3)]
    assert all(len(ids) >= 2 for ids in old) and len(old[2]) > 2
    for back in range(3):
        [(rank, first), *rest] = front.on_message(ready(back, 2)).messages
        assert rank == back and isinstance(first, Abort) and set(first.request_ids) == old[back]
        assert not any(isinstance(item, Abort) for _, item in rest)
        front.on_message(joined(back, front.members.epoch))


def test_where_a_moved_request_has_been() -> None:
    """Until a rank has released a token of it, what earlier ones have of it counts too; not what one has left that ended for a
    fault in its memory, or is still there."""
    front = make_front(4, num_experts=4, slots_per_rank=4)
    [(rank, first)] = front.add(make_prompt())
    front.on_message(outputs(rank, TokenOutput(first.request_id, [70])))
    places = [(rank, first.request_id, len(first.token_ids))]  # the token that was released last is in no cache
    [(rank, second), *_] = front.on_message(RankLost(rank, "killed by SIGKILL", 99.0, 1)).messages
    assert second.formers == tuple(places)
    places.append((rank, second.request_id, 0))
    [(rank, third), *_] = front.on_message(RankLost(rank, "killed by SIGKILL", 99.0, 1)).messages
    assert third.formers == tuple(places)
    [(rank, fourth), *_] = front.on_message(RankLost(rank, "killed by SIGSEGV", 99.0, 1, intact=False)).messages
    assert fourth.formers == tuple(places)
    front.on_message(outputs(rank, TokenOutput(fourth.request_id, [71])))
    back = next(place for place in range(4) if place != rank)
    front.on_message(ready(back, 2))
    front.on_message(joined(back, front.members.epoch))
    front.on_message(joined(rank, front.members.epoch))
    [(_, fifth), *_] = front.on_message(RankFailed(rank, "its own word")).messages
    assert fifth.formers == ()


def test_new_work_only_after_joined() -> None:
    front = make_front(2, num_experts=2, slots_per_rank=2)
    front.on_message(RankLost(0, "killed", 99.0, 1))
    assert front.on_message(RankLost(0, "died while loading", 99.5, 2)) == ([], [])
    assert front.on_message(ready(0, 2)) == ([], [])  # and what it said last comes later
    assert {front.add(make_prompt(str(number)))[0][0] for number in range(4)} == {1}
    both = [(rank, Membership(2, [True, True], process)) for rank, process in ((0, 3), (1, 1))]
    assert front.on_message(ready(0, 3)) == ([], both)
    assert front.on_message(joined(0, 1)) == ([], [])  # of an earlier life
    assert front.add(make_prompt("x"))[0][0] == 1
    assert front.on_message(joined(1, 2)) == ([], [])
    front.on_message(joined(0, 2))
    assert front.add(make_prompt("y"))[0][0] == 0 and sorted(front.ready) == [0, 1]


def test_words_of_two_lives_out_of_order() -> None:
    """The new process is ready before the end of the old one is told; and a rank that says itself that it fails."""
    front = make_front(2, num_experts=2, slots_per_rank=2)
    assert front.on_message(ready(1, 2)) == ([], [])
    work = front.on_message(RankLost(1, "killed", 99.0, 1))
    assert front.members.epoch == 2 and work.messages == [
        (rank, Membership(2, [True, True], 1 + rank)) for rank in (0, 1)
    ]
    front.on_message(joined(1, 2))
    assert front.on_message(RankFailed(1, "rank 1: no memory")).messages == [(0, Membership(3, [True, False], 1))]
    assert front.on_message(ready(1, 3)).messages[0] == (0, Membership(4, [True, True], 1))
    assert front.on_message(RankLost(1, "exit code 3", 99.0, 2)) == ([], [])  # of the one that failed: known
    assert front.members.alive == [True, True] and front.failed is None


def test_capacity() -> None:
    front = make_front(3, num_experts=6, slots_per_rank=3)
    names = [str(number) for number in range(6)]
    for name in names:
        front.add(make_prompt(name))
    front.on_message(RankLost(0, "killed", 99.0, 1))
    assert front.members.shortage is None
    work = front.on_message(RankLost(1, "killed", 99.0, 1))
    assert front.members.shortage == (
        "1 of 3 ranks serve, with room for 3 of 6 experts in each layer; waiting for rank 0, 1"
    )
    assert work.messages == [(2, Membership(2, [False, False, True], 1))]  # what they had is held
    work = front.abort(names[0])
    assert front.add(make_prompt("held")) == []
    front.on_message(ready(1, 2))
    work = front.on_message(joined(1, 3))
    assert front.members.shortage is None
    moved = [message for _, message in work.messages if isinstance(message, AddRequest)]
    assert moved and {rank for rank, _ in work.messages} <= {1, 2}
    for name in [*names, "held"]:
        front.abort(name)
    assert front.num_requests == 0 and front.router.loads == [0, 0, 0]


@pytest.mark.parametrize("experts", [(0, 0), (6, 6)])
def test_all_lost(experts: tuple[int, int]) -> None:
    """Requests are held until a rank is back, and go on from their logs."""
    front = make_front(2, *experts)
    front.add(make_prompt("a"))
    front.on_message(RankLost(0, "killed by SIGKILL", 99.0, 1))
    work = front.on_message(RankFailed(1, "rank 1: out of memory"))
    front.on_message(RankLost(1, "exit code 3", 99.0, 1))
    assert work.messages == [] and front.failed is None and front.num_requests == 1
    assert (
        front.members.shortage == "0 of 2 ranks serve; waiting for rank 0, 1 (rank 1: out of memory)"
        and front.members.mode == "degraded"
    )
    assert front.add(make_prompt("b")) == [] and front.members.epoch == 2
    work = front.on_message(ready(1, 2))
    assert work.messages[-1] == (1, Membership(3, [False, True], 2))
    moved = [message for _, message in (*work.messages, *front.on_message(joined(1, 3)).messages)]
    assert sum(isinstance(message, AddRequest) for message in moved) == 2
    assert front.members.shortage is None and front.members.states == [State.LOST, State.UP]
    for name in ("a", "b"):
        front.abort(name)
    assert front.num_requests == 0 and not front.members.open


@pytest.mark.parametrize("last", ["comes", "is late", "ends again"])
def test_the_first_waits_for_the_others(last: str) -> None:
    """After the loss of all; else it would begin a step with what all had. Not for long."""
    now = [100.0]
    front = Front(3, TOKENIZER, num_experts=6, slots_per_rank=6, clock=lambda: now[0])
    for rank in range(3):
        front.on_message(ready(rank))
    front.add(make_prompt("a"))
    for rank in range(3):
        front.on_message(RankLost(rank, "killed by SIGKILL", 99.0, 1))
    assert not front.on_message(ready(1, 2)).messages and not front.on_message(ready(0, 2)).messages
    now[0] += 0.9 * GATHER_SECONDS
    assert not front.look().messages and front.members.gathering and front.members.up == []
    if last == "comes":
        work, members = front.on_message(ready(2, 2)), [True, True, True]
    else:
        members = [True, last == "is late", False]
        if last == "ends again":
            assert not front.on_message(RankLost(1, "exit code 5", 99.0, 2)).messages
        now[0] += 0.2 * GATHER_SECONDS
        work = front.look()
    expected = Membership(front.members.epoch, members, 2)
    [(_, moved), *told] = [pair for pair in work.messages if not isinstance(pair[1], Abort)]
    assert isinstance(moved, AddRequest)  # before they are told: it is in their first step
    assert told == [(rank, expected) for rank in range(3) if members[rank]]
    assert front.members.epoch == 3 + sum(members) and not front.members.gathering and not front.look().messages


def test_none_left() -> None:
    front = make_front(2)
    for rank in (0, 1):
        front.on_message(RankLost(rank, "killed by SIGKILL", 99.0, 1))
    front.on_message(NoneLeft("none could be started again in 15 tries"))
    assert front.failed == "all ranks are lost: none could be started again in 15 tries"


def test_a_rank_that_waits_for_its_weights() -> None:
    front = make_front(3, 6, 3)
    front.on_message(RankLost(0, "killed", 99.0, 1))
    front.on_message(Waiting(1, "model.safetensors: cannot be read"))
    assert front.members.shortage == "rank 1 waits: model.safetensors: cannot be read"
    assert front.add(make_prompt("a")) == []
    work = front.on_message(joined(1, 1))
    assert [type(message) for _, message in work.messages] == [AddRequest] and front.members.shortage is None
    # One that is not back says why, and that keeps nothing from going on.
    front.on_message(Waiting(0, "model.safetensors: changed"))
    assert front.members.troubles == {0: "model.safetensors: changed"} and front.members.shortage is None
    front.on_message(RankFailed(0, "rank 0: CheckpointError: model.safetensors: changed"))
    front.on_message(RankLost(0, "exit code 5", 99.0, 2))
    assert front.members.troubles == {0: "CheckpointError: model.safetensors: changed"} and front.failed is None
    front.on_message(ready(0, 3))
    assert front.members.troubles == {}


@pytest.mark.parametrize("message", [RankLost(1, "exit code 3", 0.0, 1), RankFailed(1, "exit code 3")])
def test_a_loss_at_the_start_is_an_error(message: RankToFront) -> None:
    front = Front(2, TOKENIZER)
    front.on_message(ready(1))
    front.on_message(message)
    assert front.failed is not None and front.failed.startswith("rank 1") and "exit code 3" in front.failed


@pytest.mark.parametrize("early", [False, True])
def test_phases_of_a_recovery(early: bool) -> None:
    """early: the first token comes from a rank that has changed over while the front has not heard so of all."""
    now = [100.0]
    front = Front(3, TOKENIZER, num_experts=4, slots_per_rank=2, clock=lambda: now[0])
    for rank in range(3):
        front.on_message(ready(rank))
    front.add(make_prompt())
    now[0] = 102.0
    work = front.on_message(RankLost(0, "killed", 101.5, 1))
    [(rank, message)] = [item for item in work.messages if isinstance(item[1], AddRequest)]
    now[0] = 103.0
    front.on_message(outputs(1, TokenOutput(message.request_id, [70])))  # of the epoch before
    front.on_message(joined(1, 1))
    assert not front.members.done  # rank 2 has not changed over
    if early:
        front.on_message(outputs(1, TokenOutput(message.request_id, [70])))
    front.on_message(joined(2, 1))
    now[0] = 103.25
    front.on_message(outputs(rank, TokenOutput(message.request_id, [70])))
    [recovery] = front.members.done
    assert (recovery.detect, recovery.agree, recovery.repair) == (0.5, 0.75, 0.25)
    first_token, total = (0.0, 1.5) if early else (0.25, 1.75)
    assert (recovery.first_token, recovery.total, recovery.replayed) == (first_token, total, 1)
    assert (front.members.num_experts_loaded, front.members.num_bytes_read, front.members.num_losses) == (4, 20, 1)


def test_tokens_that_came_with_the_news_are_taken_first() -> None:
    lost, said = RankLost(0, "killed", 0.0, 1), outputs(0, TokenOutput(3, [5]))
    late = joined(1, 3)
    assert in_order([lost, ready(1), said, late]) == [said, lost, ready(1), late]


def test_who_is_back_is_heard_behind_all_that_are_lost() -> None:
    """Else the first would begin alone, as if those were there whose loss is known a moment later."""
    front = Front(3, TOKENIZER, num_experts=4, slots_per_rank=4)
    for rank in range(3):
        front.on_message(ready(rank))
    front.on_message(RankLost(0, "killed", 0.0, process=1))
    back = [ready(rank, process=9) for rank in (2, 0)]
    lost = [RankLost(rank, "killed", 0.0, process=1) for rank in (1, 2)]
    for message in in_order([back[0], lost[0], back[1], lost[1]]):
        front.on_message(message)
    assert front.members.gathering and not any(front.members.alive), "they wait for rank 1"
    front.on_message(ready(1, process=9))
    assert front.members.up == [0, 1, 2]


# ---- growing and shrinking on purpose ----


def test_ranks_that_leave_hand_over_their_requests() -> None:
    front = make_front(4, num_experts=4, slots_per_rank=2)
    placed = dict(front.add(make_prompt(str(number), "abcd"[number]))[0] for number in range(4))
    for rank, message in placed.items():
        front.on_message(outputs(rank, TokenOutput(message.request_id, [70 + rank])))
    work = front.resize(2)
    alive = [True, True, False, False]
    told = [(rank, Membership(1, alive, process)) for rank, process in ((2, 0), (3, 0), (0, 1), (1, 1))]
    farewells, moved, members_told = work.messages[:2], work.messages[2:4], work.messages[4:]
    assert work.deltas == [] and [*farewells, *members_told] == told
    assert len(moved) == 2 and all(rank < 2 for rank, _ in moved)
    assert sorted(message.token_ids[-1] for _, message in moved) == [72, 73]
    late = [
        outputs(2, TokenOutput(placed[2].request_id, [5])),
        joined(3, 1),
        RankFailed(3, "x"),
        RankLost(2, "x", 0.0, 1),
    ]
    for message in late:  # nobody waits for their words any more
        assert front.on_message(message) == ([], [])
    members = front.members
    assert (members.count, members.num_losses, members.mode, front.num_replayed) == (2, 0, "full", 2)
    assert not members.open and front.stats[2] == RankStats() and {front.add(make_prompt("x"))[0][0]} <= {0, 1}


def test_ranks_that_are_added_serve_once_they_have_joined() -> None:
    front = make_front(2, num_experts=4, slots_per_rank=2)
    assert front.resize(4) == ([], []) and front.members.mode == "growing" and front.members.epoch == 0
    assert front.on_message(RankLost(3, "killed", 99.0, 7)) == ([], [])  # while it loaded: no member is lost
    assert front.members.states[3] is State.STARTING
    told = [(rank, Membership(1, [True, True, False, True], process)) for rank, process in ((0, 1), (1, 1), (3, 8))]
    assert front.on_message(ready(3, 8)).messages == told
    assert {front.add(make_prompt(str(number)))[0][0] for number in range(4)} <= {0, 1}
    front.on_message(joined(3, 1))
    assert 3 in {front.add(make_prompt(f"a{number}"))[0][0] for number in range(4)}
    front.on_message(RankLost(3, "killed", 99.0, 8))
    assert (front.members.mode, front.members.losses) == ("degraded", [0, 0, 0, 1])
    assert front.resize(3) == ([], []) and front.members.mode == "growing"  # nobody that takes part leaves
    assert front.on_message(ready(3, 9)).messages == [(3, Membership(2, [True, True, False, False]))]  # too late
    assert front.members.alive == [True, True, False, False]
    front.on_message(ready(2))
    front.on_message(joined(2, front.members.epoch))
    assert front.members.mode == "full"


def test_counts_that_cannot_be() -> None:
    front = make_front(4, num_experts=8, slots_per_rank=3)
    with pytest.raises(ValueError, match="count must be at most 62, not 63"):
        front.resize(63)
    with pytest.raises(ValueError, match="count must be at least 1, not 0"):
        front.resize(0)
    with pytest.raises(ValueError, match=r"at least 3: 2 rank\(s\) of 3 slots have room for 6 of 8 experts"):
        front.resize(2)
    front.on_message(RankLost(1, "killed", 99.0, 1))
    with pytest.raises(EngineBusy, match="2 of the 3 ranks that would stay serve now, and it takes 3; wait for rank 1"):
        front.resize(3)
    assert (front.members.count, front.members.epoch) == (4, 1)
    front.resize(5)
    assert front.members.shortage is None and front.members.mode == "degraded"


ACTIONS = [*["add"] * 2, *["step"] * 8, *["deliver"] * 9, "kill", "restart", "resize", "supervise"]


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from([(2, 4, 4), (3, 4, 2), (4, 8, 3), (3, 0, 0)]), st.integers(60, 160), st.integers(0, 1 << 20))
def test_every_token_once_and_in_order(shape: tuple[int, int, int], num_actions: int, seed: int) -> None:
    chance = random.Random(seed)
    num_ranks, num_experts, slots = shape
    world = World(num_ranks, num_experts, slots, chance)
    front = world.front
    names = itertools.count()
    for _ in range(num_actions):
        action = "abort" if chance.random() < 0.02 else chance.choice(ACTIONS)
        rank = chance.randint(0, world.size)
        if action == "add":
            name = next(names)
            world.add(
                str(name), max_tokens=1 + 5 * (name % 7), n=1 + name % 2, logprobs=0 if name % 3 else None, seed=name
            )
        elif action == "deliver":
            world.deliver(rank)
        elif action == "supervise":
            world.supervise()
        elif rank == world.size:
            continue
        elif action == "resize":
            world.resize(rank + 1)
        elif action == "abort":
            world.take(front.abort(str(rank)))
        else:
            {"step": world.step, "kill": world.kill, "restart": world.restart}[action](rank)
        assert front.failed is None
    world.finish()

    assert not any(front.router.loads) and not front._sequences and not front._held
    records = {record.request_id: record for record in front.take_finished()}
    assert records.keys() == world.collectors.keys()
    for name, collector in world.collectors.items():
        assert collector.finished
        for choice in collector.output().outputs:
            wanted = [token_of(world.seeds[name, choice.index], place) for place in range(len(choice.token_ids))]
            assert choice.token_ids == wanted
            assert choice.text == TOKENIZER.decode(choice.token_ids)
            assert choice.finish_reason == "abort" or len(wanted) == world.prompts[name].params.max_tokens
            assert choice.logprobs is None or len(choice.logprobs) == len(wanted)
