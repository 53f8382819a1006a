"""The front's core: which requests live, where they run, and what their tokens mean. Pure bookkeeping: no sockets, no
loop.

A *request* (a Prompt) has params.n *sequences*, one per choice, all on one rank so that they share the prompt's KV.
Ranks know sequences by an integer that this module gives out. What to send and what to tell the callers comes back as
`FrontOutput`. Which ranks there are is in front/members.py.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from front.accusations import Accusations, WaitBook
from front.members import Members, State
from front.messages import (
    Abort,
    BalanceReply,
    BalanceReport,
    BalanceStatus,
    EpochLost,
    FinishReason,
    FrontToRank,
    Joined,
    Logprobs,
    Membership,
    NoneLeft,
    Outputs,
    ProfilePart,
    RankFailed,
    RankLost,
    RankReady,
    RankStats,
    RankToFront,
    TokenOutput,
    Waiting,
    Waits,
)
from front.outputs import Delta, PositionLogprobs, Prompt, TokenLogprob
from front.profiling import Profiling
from front.routing import RequestRouter
from front.sampling_params import seeds
from front.sequences import FinishedRequest, LiveRequest, Sequence
from front.text.tokenizer import Tokenizer

_MAX_FINISHED = 65536


class EngineFailed(RuntimeError):
    """No request can go on: all ranks are lost for good, or one failed before all had loaded."""


class EngineBusy(RuntimeError):
    """Too few ranks serve to compute anything; running requests wait for one to come back, new ones are refused."""


class EngineDraining(RuntimeError):
    """The engine takes no new requests."""


class FrontOutput(NamedTuple):
    """deltas: (request id, what it got). messages: (rank, what to send to it)."""

    deltas: list[tuple[str, Delta]]
    messages: list[tuple[int, FrontToRank]]


class Front:
    """One per server or offline engine. Not thread-safe; nothing here waits.

    A lost rank's requests are *replayed* on another one: it gets the prompt with every token released so far, and goes
    on from there (a draw depends on seed and position only). While the ranks that are left cannot hold all experts, or
    none is left, requests without a rank are held, and sent when they can again.
    """

    def __init__(
        self,
        num_ranks: int,
        tokenizer: Tokenizer,
        *,
        block_size: int = 16,
        num_experts: int = 0,
        slots_per_rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """block_size: tokens of a KV block, the unit of prefix affinity. num_experts, slots_per_rank: of one layer."""
        self.tokenizer = tokenizer
        self.router = RequestRouter(num_ranks, block_size)
        self.stats = [RankStats() for _ in range(num_ranks)]
        self.members = Members(num_ranks, num_experts, slots_per_rank, clock)
        self.accusations = Accusations(self.members, clock)
        self.accused: list[tuple[int, int]] = []  # (rank, its process) to be killed; the killer takes them out
        self.num_replayed = 0  # requests moved from a rank that was lost or has left to another one
        self.balance: BalanceStatus | None = None  # the newest
        self.profiling = Profiling(clock)
        self.waits = WaitBook()
        self._clock = clock
        self._requests: dict[str, LiveRequest] = {}
        self._held: dict[str, LiveRequest] = {}  # those of them that no rank has now
        self._sequences: dict[int, Sequence] = {}  # those that a rank has
        # Those that a rank had when it was lost: what was sent after its end comes to the process that follows it.
        self._former: dict[int, list[int]] = {}
        self._next_id = itertools.count()
        self._finished: deque[FinishedRequest] = deque(maxlen=_MAX_FINISHED)

    @property
    def failed(self) -> str | None:
        """Why no request can go on."""
        return self.members.failed

    @property
    def ready(self) -> dict[int, RankReady]:
        """What the ranks that serve said of themselves."""
        return self.members.ready

    # ---- requests in ----

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, prompt: Prompt) -> list[tuple[int, FrontToRank]]:
        """prompt.params must be resolved (sampling_params.resolve). ValueError when its request id is in use."""
        params = prompt.params
        assert params.max_tokens is not None and prompt.token_ids
        if prompt.request_id in self._requests:
            raise ValueError(f"request_id {prompt.request_id!r} is in use by a running request")
        request = LiveRequest(prompt, self._clock())
        self._requests[prompt.request_id] = request
        for index, seed in enumerate(seeds(params.seed, params.n)):
            tags = prompt.format.tags if prompt.format is not None else ()
            detokenizer = self.tokenizer.detokenizer(prompt.token_ids, params.skip_special_tokens, tags)
            request.sequences.append(Sequence(index, seed, request, detokenizer))
        self._held[prompt.request_id] = request
        return self._place_held()

    def _place_held(self) -> list[tuple[int, FrontToRank]]:
        """Send what no rank has to the ranks that serve, if these can compute."""
        members = self.members
        if members.started and members.shortage is not None:
            return []
        messages: list[tuple[int, FrontToRank]] = []
        for request in self._held.values():
            request.rank = self.router.choose(request.prompt.token_ids, request.prompt.cache_salt, request.prompt.rank)
            for sequence in request.sequences:
                self._charge(sequence)
                sequence.sequence_id = next(self._next_id)
                sequence.awaited = True
                self._sequences[sequence.sequence_id] = sequence
                messages.append((request.rank, sequence.message(self.tokenizer.eos_token_ids)))
        self._held.clear()
        return messages

    def _charge(self, sequence: Sequence) -> None:
        """Choices share the prompt's KV and its computation: the first one is charged for both."""
        params = sequence.request.prompt.params
        assert params.max_tokens is not None
        first = sequence is sequence.request.sequences[0]
        num_known = len(sequence.token_ids) if first else sequence.num_output
        num_left = params.max_tokens - sequence.num_output
        sequence.pending = num_known
        sequence.cost = self.router.expected_tokens(num_known, num_left) + num_known
        self.router.loads[sequence.request.rank] += sequence.cost

    def _uncharge(self, sequence: Sequence) -> None:
        self.router.loads[sequence.request.rank] -= sequence.cost
        sequence.cost = sequence.pending = 0

    def has_begun(self, request_id: str) -> bool:
        """Whether a token of it has come, and it has not finished."""
        request = self._requests.get(request_id)
        return request is not None and request.first_token is not None

    def abort(self, request_id: str) -> FrontOutput:
        """End a request: its open choices get a final delta with finish_reason "abort". Nothing if it is not live."""
        request = self._requests.get(request_id)
        if request is None:
            return FrontOutput([], [])
        now = self._clock()
        deltas = []
        running = [item.sequence_id for item in request.sequences if item.sequence_id in self._sequences]
        for sequence in list(request.sequences):
            deltas.append((request_id, sequence.last_delta("abort")))
            self._close_sequence(sequence, "abort", now)
        return FrontOutput(deltas, [(request.rank, Abort(running))] if running else [])

    def resize(self, count: int) -> FrontOutput:
        """Ranks 0 to count - 1 are to serve. Those beyond leave at once, and their requests go on elsewhere; new ones
        serve when they have loaded. ValueError when so few can never hold all experts (or there are too many),
        EngineBusy when they cannot just now."""
        members = self.members
        never = members.impossible(count)
        if never is not None:
            raise ValueError(never)
        not_now = members.impossible_now(count)
        if not_now is not None:
            raise EngineBusy(not_now)
        leaving = members.resize(count)
        self.router.grow(count)
        self.stats += [RankStats() for _ in range(count - len(self.stats))]
        for rank in leaving:
            self._take_from(rank)
        work = self._changed() if leaving else FrontOutput([], [])
        return FrontOutput([], self._farewells(leaving) + work.messages)

    def _farewells(self, ranks: list[int]) -> list[tuple[int, FrontToRank]]:
        """A membership that leaves them out: a rank that gets it leaves."""
        message = Membership(self.members.epoch, self.members.alive)
        return [(rank, message) for rank in ranks]

    # ---- what ranks and the supervisor say ----

    def on_message(self, message: RankToFront) -> FrontOutput:
        """Take what a rank, or the supervisor, has sent. Once `failed` says why, no request will go on."""
        if isinstance(message, Outputs):
            return self._on_outputs(message)
        if isinstance(message, RankReady):
            if self.members.states[message.rank] is State.LEFT:
                return FrontOutput([], self._farewells([message.rank]))
            return self._changed() if self.members.on_ready(message) else FrontOutput([], [])
        if isinstance(message, Joined):
            if self.members.on_joined(message, busy=bool(self._requests)):
                self._open_ranks()
            return FrontOutput([], self._place_held())
        if isinstance(message, Waiting):
            self.members.on_waiting(message)
            return FrontOutput([], self._place_held())
        if isinstance(message, NoneLeft):
            self.members.on_none_left(message)
            return FrontOutput([], [])
        if isinstance(message, EpochLost):
            self.accusations.on_lost(message)
            return self.look()
        if isinstance(message, BalanceReport):
            self.balance = message.status
        if isinstance(message, ProfilePart):
            self.profiling.take(message)
        if isinstance(message, Waits):
            self.waits.take(message)
        if isinstance(
            message, BalanceReport | BalanceReply | ProfilePart | Waits
        ):  # the one that asked takes the reply
            return FrontOutput([], [])
        assert isinstance(message, RankLost | RankFailed)
        lost = self.members.on_lost(message) if isinstance(message, RankLost) else self.members.on_failed(message)
        if not lost:
            return FrontOutput([], [])
        replayed = self._take_from(message.rank, isinstance(message, RankLost) and message.intact)
        if self.members.open:
            self.members.open[-1].replayed = replayed
        return self._changed()

    def look(self) -> FrontOutput:
        """To be called a few times per second, as some things are found by nothing happening."""
        finding = self.accusations.look()
        self.accused += [(rank, self.ready[rank].process) for rank in finding.accused if rank in self.ready]
        gathered = self.members.gather()
        if finding.meet_again:
            self.members.meet_again()
        return self._changed() if gathered or finding.meet_again else FrontOutput([], [])

    def _changed(self) -> FrontOutput:
        """The membership has: the ranks get what waits, and are told. In this order, as a survivor computes the first
        step of an epoch as soon as it is told: what came later would wait for that step."""
        self._open_ranks()
        if not self._requests:  # then no first token will end a recovery whose survivors need not agree on anything
            self.members.on_idle()
        messages = self._place_held()
        ended = [rank for rank in sorted(self._former) if self.members.is_member(rank)]
        forget: list[tuple[int, FrontToRank]] = [(rank, Abort(self._former.pop(rank))) for rank in ended]
        return FrontOutput([], [*forget, *messages, *self.members.memberships()])

    def _open_ranks(self) -> None:
        self.router.open = [state is State.UP for state in self.members.states]

    def _take_from(self, rank: int, intact: bool = False) -> int:
        """Nothing that this rank has is to be expected any more; how many requests that are. What it had released stays
        released. intact: it has ended, and others may read what is in its cache."""
        self.stats[rank] = RankStats()
        self.profiling.lose(rank)
        self.router.forget_rank(rank)
        moved = [
            item for item in self._requests.values() if item.rank == rank and item.prompt.request_id not in self._held
        ]
        for request in moved:
            for sequence in request.sequences:
                del self._sequences[sequence.sequence_id]
                self._former.setdefault(rank, []).append(sequence.sequence_id)
                sequence.leave(rank, intact)
                self._uncharge(sequence)
            self._held[request.prompt.request_id] = request
        self.num_replayed += len(moved)
        return len(moved)

    def take_finished(self) -> list[FinishedRequest]:
        """Requests that finished since the last call (at most the newest 65536)."""
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def _on_outputs(self, message: Outputs) -> FrontOutput:
        if self.members.is_member(message.rank):
            self.stats[message.rank] = message.stats
        now = self._clock()
        sequences = self._sequences
        deltas: list[tuple[str, Delta]] = []
        stopped: list[int] = []
        for output in message.outputs:
            sequence = sequences.get(output.request_id)
            if sequence is None:  # aborted, stopped by a stop string, or moved to another rank while this was under way
                continue
            delta = self._advance(sequence, output, now)
            deltas.append((sequence.key, delta))
            if delta.finish_reason is not None:
                if output.finish_reason is None:
                    stopped.append(output.request_id)
                sequence.request.num_preemptions += output.num_preemptions
                self._close_sequence(sequence, delta.finish_reason, now)
        if deltas and self.members.open:
            self.members.on_token(message.rank, now)
        return FrontOutput(deltas, [(message.rank, Abort(stopped))] if stopped else [])

    def _advance(self, sequence: Sequence, output: TokenOutput, now: float) -> Delta:
        """One output into one delta, and into the log."""
        delta = sequence.delta(output)
        num_new = len(delta.token_ids)
        sequence.token_ids.extend(delta.token_ids)
        sequence.num_output += num_new
        sequence.request.num_output += num_new
        logprobs = output.logprobs
        if logprobs is not None:
            delta.logprobs = [self._position(logprobs[place]) for place in range(num_new)]
        delta.num_accepted, delta.num_rejected = output.num_accepted, output.num_rejected
        if sequence.awaited:
            self._first_output(sequence, output, delta, now)
        return delta

    def _first_output(self, sequence: Sequence, output: TokenOutput, delta: Delta, now: float) -> None:
        """Of this rank. What is told once for a request is not told again after a replay."""
        request = sequence.request
        sequence.awaited = False
        self.router.loads[request.rank] -= sequence.pending
        sequence.cost -= sequence.pending
        sequence.pending = 0
        if sequence.answered:
            return
        sequence.answered = True
        if request.first_token is None and output.new_token_ids:
            request.first_token, request.queued = now, output.queued
        if sequence.index == 0:
            request.num_cached = delta.num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                delta.prompt_logprobs = [
                    self._position(item) if item is not None else None for item in output.prompt_logprobs
                ]

    def _close_sequence(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        request = sequence.request
        self._sequences.pop(sequence.sequence_id, None)
        self._uncharge(sequence)
        self.router.finished(sequence.num_output)
        request.sequences.remove(sequence)
        request.reasons[sequence.index] = reason
        request.most_output = max(request.most_output, sequence.num_output)
        request.open -= 1
        if request.open:
            return
        del self._requests[request.prompt.request_id]
        self._held.pop(request.prompt.request_id, None)
        self._finished.append(request.finished(now))
        if not self._requests and self.members.open:
            self.members.on_idle()

    def _position(self, logprobs: Logprobs) -> PositionLogprobs:
        ids, values = logprobs.ids, logprobs.values
        top = [self._token(ids[place], values[place], place) for place in range(1, len(ids))]
        return PositionLogprobs(self._token(ids[0], values[0], logprobs.rank), top)

    def _token(self, token_id: int, logprob: float, rank: int) -> TokenLogprob:
        raw = self.tokenizer.token_bytes(token_id)
        return TokenLogprob(token_id, logprob, rank, raw.decode("utf-8", "replace"), raw)
