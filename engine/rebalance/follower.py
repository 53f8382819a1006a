"""Balancing experts while they serve: the rank's side (docs/design.md, 6).

The first live rank leads. It alone thinks (engine/rebalance/leader.py), on a thread of its own, so that no step waits
for it and equal decisions on all ranks need no equal arithmetic. What it wants done goes into its word `order` of the
step record; so all ranks do it in the same step, and nothing new can be waited for in vain:

    GATHER    every few steps all ranks send it what they have counted
    PUBLISH   it sends a rebalance to all: a placement, or several that follow each other, with new shares and
              perhaps some experts in other slots. Each rank makes it ready on its own thread: tables to route by, and
              what to send to whom.

The word `ready` says how far a rank has come with the rebalance under way; the plan has the least of all ranks. Once
that is PREPARED, each step carries a chunk of the weights of the next placement, at most one step's budget to any rank,
into memory beside the slots. Once it is READY, all go over at the start of that same step: experts are copied into
their slots, the routing tables change, the record's checksum from then on is that of the new placement, and the first
chunk for the one after it travels. Only one rebalance is under way at a time.

Exchanges are begun before the step's forward pass and waited for after it (engine/rebalance/exchange.py, on the device
thread). What a rank certainly holds is what its device thread has last gone over to (Team.placement): after a loss the
ranks may differ by one rebalance, and Team.form brings them together. A move under way is then forgotten. Repair gives
each expert to one of its copies; the leader's next counts make better ones.

A cluster without requests stays awake until the placement under way has been taken, and then sleeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from configs.eplb import EplbConfig
from engine.agreement import StepPlan
from engine.hooks import StepCompanion
from engine.rebalance.exchange import (
    BATCH_UNIT,
    GATHER,
    PUBLISH,
    BalanceExchange,
    Chunk,
    Counted,
    MoveBatch,
    Rebalance,
    RowCounter,
    StepMoves,
)
from engine.rebalance.leader import MAX_BATCHES, Coordinator, Facts
from engine.schedule import Schedule
from engine.team import Team
from ep.migrate import Migration
from ep.place import slot_tables
from ep.table import make_parcels
from eplb.load import ExpertLoad, RowLoad
from eplb.placement import Placement
from front.messages import BalanceCommand, BalanceReply, FrontToRank, RankToFront
from models.base import CausalLM

V = TypeVar("V")

# How far a rank is with the rebalance under way: with making it ready, then with the weights of its next placement.
FAILED, WAITING, PREPARED, READY = -1, 0, 1, 2

MAX_CHUNK_BYTES = 1 << 30  # a larger budget is not used up
UNASKED_INTERVAL = 20  # steps between gatherings when nothing is ever decided


class Worker:
    """Runs what is submitted, one after the other: on a thread, or at once where all ranks share one thread."""

    def __init__(self, threaded: bool) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="balancer") if threaded else None
        self._last: Future[Any] | None = None

    def submit(self, work: Callable[..., V], *arguments: object) -> Future[V]:
        future: Future[V]
        if self._threads is not None:
            future = self._threads.submit(work, *arguments)
        else:
            future = Future()
            try:
                future.set_result(work(*arguments))
            except Exception as error:
                future.set_exception(error)
        self._last = future
        return future

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)


class Balance(StepCompanion):
    """One rank's. Used by the rank's thread. Its words: order and ready."""

    num_words = 2

    def __init__(
        self,
        team: Team,
        model: CausalLM,
        config: EplbConfig,
        model_name: str,
        device: torch.device,
        threaded: bool,
    ) -> None:
        """model: the team's, on that device; threaded: a thread may think beside the steps."""
        placement = team.placement
        assert placement is not None
        self._team = team
        self._model = model
        self._config = config
        self._device = device
        self._worker = Worker(threaded)
        self._facts = Facts(
            rank=team.rank,
            model=model_name,
            layer_ids=model.moe_layer_ids,
            expert_bytes=sum(tensor.nbytes for tensor in model.expert_storage(0, 0)),
            chunk_bytes=min(MAX_CHUNK_BYTES, max(1, int(config.move_budget_mib * (1 << 20)))),
        )
        intervals = [interval for interval in (config.reweight_interval, config.move_interval) if interval]
        self._interval = min(intervals, default=UNASKED_INTERVAL)
        load = ExpertLoad(placement.num_layers, placement.num_experts)
        rows = RowLoad(placement.num_layers)
        model.count(load.recorder, rows.recorder)
        self._exchange = BalanceExchange(team, load, rows, self._interval, self._on_counts, self._prepare)
        self.counter = RowCounter(rows)
        self._coordinator: Coordinator | None = None
        self._formed = False
        self._rebalance: Rebalance | None = None
        self._chosen: list[Placement] = []  # to be published in the step that is being agreed on
        self._steps = self._tokens = 0  # since the last gathering
        self._questions: list[BalanceCommand] = []
        self._events: deque[RankToFront] = deque()

    # ---- epochs ----

    def formed(self) -> None:
        team, placement = self._team, self._team.placement
        assert placement is not None
        size, index = len(team.live), team.live.index(team.rank)
        exchange = self._exchange
        room_bytes = self._facts.chunk_bytes + max(exchange.gather_bytes * size, exchange.publish_bytes * MAX_BATCHES)
        exchange.begin(make_parcels(team.experts_group, room_bytes), size, index)
        self._forget()
        self._formed = True
        if index > 0:
            self._retire()
        elif self._coordinator is None:
            self._coordinator = Coordinator(self._facts, self._config, placement, team.epoch)
        else:
            self._notify(self._coordinator, lambda coordinator: coordinator.begin(placement, team.epoch))
        questions, self._questions = self._questions, []
        for question in questions:
            self._ask(question)

    def dropped(self) -> None:
        self._forget()
        self._exchange.end()
        self._formed = False

    def close(self) -> None:
        self._worker.close()
        if self._coordinator is not None:
            self._coordinator.close()

    def _forget(self) -> None:
        self._rebalance, self._chosen = None, []
        self._steps = self._tokens = 0

    def _retire(self) -> None:
        """Another rank leads now."""
        if self._coordinator is not None:
            self._notify(self._coordinator, Coordinator.close)
            self._events += self._coordinator.outbox
            self._coordinator = None

    # ---- the record ----

    @property
    def has_work(self) -> bool:
        """A placement is to be brought to its end, though no rank may have requests."""
        if self._coordinator is None or not self._formed:
            return False
        return self._rebalance is not None or bool(self._chosen) or self._has_proposal(self._coordinator)

    @property
    def busy(self) -> bool:
        return (
            self._worker.busy
            or bool(self._events)
            or (self._coordinator is not None and bool(self._coordinator.outbox))
        )

    def propose(self, schedule: Schedule) -> tuple[int, int]:
        coordinator, rebalance = self._coordinator, self._rebalance
        order = 0
        if coordinator is not None:
            if rebalance is None and self._has_proposal(coordinator):
                self._chosen, coordinator.proposal = coordinator.proposal, []
                order = PUBLISH | BATCH_UNIT * len(self._chosen)
            if self._steps >= self._interval:
                order |= GATHER
        return order, WAITING if rebalance is None else self._progress(rebalance)

    def join(self, plan: StepPlan, proposals: Sequence[Sequence[int]]) -> StepMoves | None:
        """The same on all ranks: what the first one orders, and as far as all are with the rebalance under way."""
        order, ready = proposals[0][0], min(words[1] for words in proposals)
        num_tokens = sum(plan.num_tokens)
        moves = self._moves(order, ready) if order or self._rebalance is not None else None
        if num_tokens:
            self._steps += 1
            self._tokens += num_tokens
        return moves

    def _moves(self, order: int, ready: int) -> StepMoves | None:
        moves = StepMoves(self._exchange)
        rebalance = self._rebalance
        if rebalance is not None and ready == FAILED:
            self._give_up(rebalance)
        elif rebalance is not None:
            if ready == READY:
                moves.commit = self._commit(rebalance)
            if ready >= PREPARED and rebalance is self._rebalance:
                migration = rebalance.next.migration
                if rebalance.ordered < migration.num_chunks:
                    moves.chunk = Chunk(rebalance, migration, rebalance.ordered)
                    rebalance.ordered += 1
        if order & GATHER:
            moves.counted = Counted(self._steps, self._tokens)
            self._steps = self._tokens = 0
        if order & PUBLISH:
            moves.new = self._rebalance = Rebalance(order // BATCH_UNIT)
            moves.publish = b"".join(placement.to_bytes() for placement in self._chosen)
            self._chosen = []
        return moves if order or moves.commit is not None or moves.chunk is not None else None

    def _has_proposal(self, coordinator: Coordinator) -> bool:
        """Not one of an epoch that is over."""
        proposal, placement = coordinator.proposal, self._team.placement
        return bool(proposal) and placement is not None and proposal[0].epoch == placement.epoch

    def _progress(self, rebalance: Rebalance) -> int:
        future = rebalance.prepared
        if future is None or not future.done():
            return WAITING
        if future.exception() is not None:
            return FAILED
        return READY if rebalance.received == rebalance.next.migration.num_chunks else PREPARED

    def _commit(self, rebalance: Rebalance) -> MoveBatch:
        """All ranks have the next placement's weights: it is taken in the step that has been agreed on."""
        batch = rebalance.next
        rebalance.batch += 1
        rebalance.ordered = rebalance.received = 0
        last = rebalance.batch == rebalance.num_batches
        if last:
            self._rebalance = None
        self._team.expect(batch.placement)
        if self._coordinator is not None:
            self._notify(self._coordinator, lambda coordinator: coordinator.committed(batch, last))
        return batch

    def _give_up(self, rebalance: Rebalance) -> None:
        self._rebalance = None
        if self._coordinator is not None:
            future = rebalance.prepared
            own = future.exception() if future is not None and future.done() else None
            why = f"a rank could not prepare a placement: {own or 'another rank than the leading one'}"
            self._notify(self._coordinator, lambda coordinator: coordinator.dropped(why))

    # ---- on the worker, or on its way there ----

    def _on_counts(self, counted: Counted, counts: list[npt.NDArray[np.int32]]) -> None:
        if self._coordinator is not None:
            self._notify(
                self._coordinator, lambda coordinator: coordinator.observe(self._exchange.sum_up(counted, counts))
            )

    def _notify(self, coordinator: Coordinator, what: Callable[[Coordinator], None]) -> None:
        """On the worker; what goes wrong is told to the front."""

        def think() -> None:
            try:
                what(coordinator)
            except Exception as error:
                coordinator.fail(error)

        self._worker.submit(think)

    def _prepare(self, current: Placement, packed: list[bytes]) -> Future[list[MoveBatch]]:
        return self._worker.submit(self._make_ready, current, packed)

    def _make_ready(self, current: Placement, packed: list[bytes]) -> list[MoveBatch]:
        rank, batches = self._team.rank, []
        for content in packed:
            target = Placement.from_bytes(content)
            migration = Migration(current, target, rank, self._model.expert_storage, self._facts.chunk_bytes)
            batches.append(MoveBatch(target, slot_tables(target, rank, self._device), migration))
            current = target
        return batches

    # ---- the front ----

    def take(self, message: FrontToRank) -> bool:
        """A command is answered by one BalanceReply among the events; while an epoch forms, when that is done."""
        if isinstance(message, BalanceCommand):
            self._ask(message)
            return True
        return False

    def _ask(self, command: BalanceCommand) -> None:
        if not self._formed:
            self._questions.append(command)
        elif self._coordinator is None:
            self._events.append(refuse(command, f"rank {self._team.rank} does not lead the balancing", again=True))
        else:
            self._notify(self._coordinator, lambda coordinator: coordinator.answer(command))

    def take_events(self) -> Sequence[RankToFront]:
        if self._coordinator is not None:
            outbox = self._coordinator.outbox
            while outbox:
                self._events.append(outbox.popleft())
        if not self._events:
            return ()
        events, self._events = list(self._events), deque()
        return events


def refuse(command: BalanceCommand, why: str, again: bool = False) -> BalanceReply:
    """The answer of a rank that cannot give one. again: another rank can."""
    return BalanceReply(command_id=command.command_id, error=why, again=again)
