"""A front in a world in which anything is late and any rank dies."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Iterable

from front_parts import ready, small_tokenizer

from front.collector import Collector
from front.front import EngineBusy, Front, FrontOutput
from front.messages import (
    Abort,
    AddRequest,
    Joined,
    Logprobs,
    Membership,
    Outputs,
    RankLost,
    RankStats,
    RankToFront,
    TokenOutput,
)
from front.outputs import Prompt
from front.params import SamplingParams
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
        self.take(FrontOutput([], self.front.add(prompt)))
        for sequence in self.front._requests[name].sequences:
            self.seeds[name, sequence.index] = sequence.seed

    def take(self, work: FrontOutput) -> None:
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
