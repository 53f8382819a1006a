"""The front when ranks are lost and return: nothing repeated, nothing missing, whatever comes late."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Iterable

import pytest
from front_parts import ready, small_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from front.collector import Collector
from front.front import EngineBusy, Front, Work, losses_last
from front.members import State
from front.messages import (
    Abort,
    AddRequest,
    Joined,
    Logprobs,
    Membership,
    NoneLeft,
    Outputs,
    RankFailed,
    RankLost,
    RankStats,
    RankToFront,
    SamplingParams,
    TokenOutput,
    Waiting,
)
from front.outputs import Prompt
from front.sampling_params import resolve

TOKENIZER = small_tokenizer()


def make_prompt(request_id: str = "r", text: str = "The fox", **params) -> Prompt:
    token_ids = TOKENIZER.encode(text)
    resolved = resolve(SamplingParams(**{"max_tokens": 8, **params}), TOKENIZER, len(token_ids), 2000)
    return Prompt(request_id=request_id, token_ids=token_ids, params=resolved, text=text)


def make_front(num_ranks: int, num_experts: int = 0, slots_per_rank: int = 0) -> Front:
    ticks = itertools.count(100)
    front = Front(
        num_ranks,
        TOKENIZER,
        num_experts=num_experts,
        slots_per_rank=slots_per_rank,
        clock=lambda: float(next(ticks)),
    )
    for rank in range(num_ranks):
        assert front.on_message(ready(rank)) == ([], [])
    return front


def outputs(rank: int, *items: TokenOutput) -> Outputs:
    return Outputs(rank, list(items), RankStats(running=len(items)))


def joined(rank: int, epoch: int) -> Joined:
    return Joined(rank=rank, epoch=epoch, agree_seconds=0.5, repair_seconds=0.25, experts_loaded=2, bytes_read=10)


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
    assert work.messages[:2] == [(place, Membership(1, alive)) for place in others]
    [(other, second)] = work.messages[2:]
    assert other in others and second.token_ids == [*first.token_ids, 70] and second.prompt_len == first.prompt_len
    assert (second.seed, second.arrival, second.params.max_tokens) == (9, first.arrival, 8)
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


def test_new_work_only_after_joined() -> None:
    front = make_front(2, num_experts=2, slots_per_rank=2)
    front.on_message(RankLost(0, "killed", 99.0, 1))
    assert front.on_message(RankLost(0, "died while loading", 99.5, 2)) == ([], [])
    assert front.on_message(ready(0, 2)) == ([], [])  # and what it said last comes later
    assert {front.add(make_prompt(str(number)))[0][0] for number in range(4)} == {1}
    both = Membership(2, [True, True])
    assert front.on_message(ready(0, 3)) == ([], [(0, both), (1, both)])
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
    assert front.members.epoch == 2 and work.messages == [(rank, Membership(2, [True, True])) for rank in (0, 1)]
    front.on_message(joined(1, 2))
    assert front.on_message(RankFailed(1, "rank 1: no memory")).messages == [(0, Membership(3, [True, False]))]
    assert front.on_message(ready(1, 3)).messages[0] == (0, Membership(4, [True, True]))
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
    assert work.messages == [(2, Membership(2, [False, False, True]))]  # what they had is held
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
    assert work.messages[0] == (1, Membership(3, [False, True]))
    moved = [message for _, message in (*work.messages, *front.on_message(joined(1, 3)).messages)]
    assert sum(isinstance(message, AddRequest) for message in moved) == 2
    assert front.members.shortage is None and front.members.states == [State.LOST, State.UP]
    for name in ("a", "b"):
        front.abort(name)
    assert front.num_requests == 0 and not front.members.open


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
    assert losses_last([lost, ready(1), said]) == [ready(1), said, lost]


# ---- growing and shrinking on purpose ----


def test_ranks_that_leave_hand_over_their_requests() -> None:
    front = make_front(4, num_experts=4, slots_per_rank=2)
    placed = dict(front.add(make_prompt(str(number), "abcd"[number]))[0] for number in range(4))
    for rank, message in placed.items():
        front.on_message(outputs(rank, TokenOutput(message.request_id, [70 + rank])))
    work = front.resize(2)
    told = Membership(1, [True, True, False, False])
    assert work.deltas == [] and work.messages[:4] == [(rank, told) for rank in (2, 3, 0, 1)]
    moved = work.messages[4:]
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
    both = Membership(1, [True, True, False, True])
    assert front.on_message(ready(3, 8)).messages == [(rank, both) for rank in (0, 1, 3)]
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


# ---- a world in which anything is late and anybody dies ----

MORE = 2  # ranks that a world may have beyond those that it starts with


class World:
    """Ranks that say, for position p of a sequence, a number made of its seed and p. What they say is on its way
    until `deliver`; of what a dead one said, the end may be missing. The supervisor's words take another way."""

    def __init__(self, num_ranks: int, num_experts: int, slots: int, chance: random.Random) -> None:
        self.front = make_front(num_ranks, num_experts, slots)
        self.chance = chance
        self.size = size = num_ranks + MORE
        self.count = num_ranks  # as the supervisor knows it
        self.resizes: list[int] = []  # on their way to it
        self.needed = -(-num_experts // slots) if num_experts else 1
        self.wires: list[deque[RankToFront]] = [deque() for _ in range(size + 1)]  # the last is the supervisor's
        self.running: list[dict[int, tuple[AddRequest, int]]] = [{} for _ in range(size)]
        self.serves = [rank < num_ranks for rank in range(size)]  # this life has changed over to a membership
        self.up = [rank < num_ranks for rank in range(size)]  # the process lives
        self.lives = [1] * size
        self.collectors: dict[str, Collector] = {}
        self.prompts: dict[str, Prompt] = {}
        self.seeds: dict[tuple[str, int], int] = {}

    def add(self, name: str, **params) -> None:
        prompt = self.prompts[name] = make_prompt(name, **params)
        self.collectors[name] = Collector(prompt)
        self.take(Work([], self.front.add(prompt)))
        for sequence in self.front._requests[name].sequences:
            self.seeds[name, sequence.index] = sequence.seed

    def take(self, work: Work) -> None:
        for name, delta in work.deltas:
            self.collectors[name].add(delta)
        for rank, message in work.messages:
            if not self.up[rank]:
                continue
            if isinstance(message, AddRequest):
                assert message.token_ids[message.prompt_len :] == [
                    token_of(message.seed, place) for place in range(len(message.token_ids) - message.prompt_len)
                ]
                self.running[rank][message.request_id] = (message, len(message.token_ids) - message.prompt_len)
            elif isinstance(message, Abort):
                for number in message.request_ids:
                    self.running[rank].pop(number, None)
            elif not message.alive[rank]:
                self.end(rank, "not wanted")
            else:
                assert isinstance(message, Membership)
                self.serves[rank] = True
                self.wires[rank].append(joined(rank, message.epoch))

    def step(self, rank: int) -> None:
        if not (self.up[rank] and self.serves[rank]) or sum(self.serves) < self.needed:
            return
        items = []
        for number, (message, place) in list(self.running[rank].items()):
            count = min(self.chance.randint(1, 2), message.params.max_tokens - place)
            tokens = [token_of(message.seed, place + more) for more in range(count)]
            logprobs = (
                [Logprobs([token], [-1.0], 1) for token in tokens] if message.params.logprobs is not None else None
            )
            end = place + count == message.params.max_tokens
            items.append(TokenOutput(number, tokens, "length" if end else None, None, logprobs))
            self.running[rank][number] = (message, place + count)
            if end:
                del self.running[rank][number]
        self.wires[rank].append(outputs(rank, *items))

    def known(self, ranks: Iterable[int]) -> list[int]:
        """Those that serve, and of whose present life the front knows. When nobody is left, the front gives up."""
        ready = self.front.ready
        return [
            rank for rank in ranks if self.serves[rank] and rank in ready and ready[rank].process == self.lives[rank]
        ]

    def kill(self, rank: int) -> None:
        if not self.up[rank] or self.known(range(self.size)) == [rank]:
            return
        for _ in range(self.chance.randint(0, len(self.wires[rank]))):
            self.wires[rank].pop()
        self.end(rank, "killed")

    def end(self, rank: int, reason: str) -> None:
        self.up[rank] = self.serves[rank] = False
        self.running[rank] = {}
        self.wires[-1].append(RankLost(rank, reason, 0.0, self.lives[rank]))

    def resize(self, count: int) -> None:
        if self.known(range(count)):
            with contextlib.suppress(ValueError, EngineBusy):
                work = self.front.resize(count)
                self.resizes.append(count)
                self.take(work)

    def supervise(self) -> None:
        """The supervisor reads what the front wanted, one after the other."""
        for count in self.resizes:
            for rank in range(count, self.size):
                if self.up[rank] and not self.serves[rank]:
                    self.end(rank, "not wanted")
            self.count = count
        self.resizes.clear()

    def restart(self, rank: int) -> None:
        if not self.up[rank] and rank < self.count:
            self.up[rank] = True
            self.lives[rank] += 1
            self.wires[rank].append(ready(rank, self.lives[rank]))

    def deliver(self, wire: int) -> None:
        if self.wires[wire]:
            self.take(self.front.on_message(self.wires[wire].popleft()))

    def finish(self) -> None:
        for _ in range(500):
            self.supervise()
            for rank in range(self.size):
                self.restart(rank)
                self.step(rank)
            for wire in range(self.size + 1):
                while self.wires[wire]:
                    self.deliver(wire)
            if not self.front.num_requests and self.front.members.mode == "full":
                return
        raise AssertionError("requests are left")


def token_of(seed: int, place: int) -> int:
    return 5 + (seed * 31 + place * 17 + place * place) % 300


ACTIONS = [*["add"] * 2, *["step"] * 8, *["deliver"] * 9, "kill", "restart", "resize", "supervise"]


@settings(max_examples=200, deadline=None)
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
