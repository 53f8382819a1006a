"""The balancer's hooks around a step: counting, the exchange, going over to a new placement.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts, N steps.

Everything that travels in a step goes in one exchange (ep/transport/parcels.py), begun before the forward pass and
waited for after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from dbo.steps import Steps
from engine.agreement import StepPlan
from engine.hooks import StepCompanion, StepHook
from engine.team import Team
from ep.migrate import Migration
from ep.place import SlotTable
from ep.protocol import Pending
from ep.transport.parcels import Parcels
from eplb.load import ExpertLoad, RowLoad
from eplb.placement import Placement

Ints = npt.NDArray[np.int64]


# What the leading rank wants done in a step: its word in the record.
GATHER = 1  # what was counted since the last time goes to the leader
PUBLISH = 2  # a rebalance goes to everybody; it consists of order // BATCH_UNIT batches
BATCH_UNIT = 4


class MoveBatch(NamedTuple):
    """One placement on the way of a rebalance, and all that a rank needs to go over to it."""

    placement: Placement
    tables: Sequence[SlotTable]
    migration: Migration


class Rebalance(Struct, eq=False):
    """Placements under way, to be taken one after the other.

    num_batches: known to all when it is published. prepared: there once it has come. batch: the one that is next;
    ordered, received: chunks of its weights so far (ordered: by the rank's thread, received: by the device thread).
    """

    num_batches: int
    prepared: Future[list[MoveBatch]] | None = None
    batch: int = 0
    ordered: int = 0
    received: int = 0

    @property
    def next(self) -> MoveBatch:
        assert self.prepared is not None
        return self.prepared.result()[self.batch]


class Chunk(NamedTuple):
    """Of the weights of a rebalance's next batch."""

    rebalance: Rebalance
    migration: Migration
    number: int


class Counted(NamedTuple):
    """Steps since the last gathering, and their tokens on all ranks together."""

    steps: int
    tokens: int


class Counts(NamedTuple):
    """What all ranks have counted. rows_NLG: rows that arrived at each live rank, in the last of these steps."""

    counted: Counted
    load_LE: Ints
    rows_NLG: Ints


class BalanceExchange:
    """What the moves of all steps share. `begin` and `end` are called by the rank's thread while no step runs."""

    def __init__(
        self,
        team: Team,
        load: ExpertLoad,
        rows: RowLoad,
        max_steps: int,
        on_counts: Callable[[Counted, list[npt.NDArray[np.int32]]], None],
        prepare: Callable[[Placement, list[bytes]], Future[list[MoveBatch]]],
    ) -> None:
        """max_steps: of how many steps at most rows are sent; on_counts: called on the leading rank with every live
        rank's counts, for `sum_up`; prepare: on all."""
        self._team = team
        self._load = load
        self.rows = rows
        self._max_steps = max_steps
        self.on_counts = on_counts
        self._prepare = prepare
        self.parcels: Parcels | None = None
        self.size = self.index = 0
        self.gather_bytes = 4 * (load.num_layers * load.num_experts + max_steps * load.num_layers)

    @property
    def publish_bytes(self) -> int:
        """Of one packed placement; it grows with the number of ranks."""
        placement = self._team.placement
        assert placement is not None
        return placement.num_bytes

    def begin(self, parcels: Parcels, size: int, index: int) -> None:
        """A new epoch, in which this is rank `index` of `size` live ones."""
        self.parcels, self.size, self.index = parcels, size, index
        self._load.reset()
        self.rows.take()

    def end(self) -> None:
        self.parcels = None

    def commit(self, batch: MoveBatch) -> None:
        """Go over: this step is the first by the new placement."""
        batch.migration.swap()
        self._team.hosts(batch.placement, batch.tables)

    def adopt(self, rebalance: Rebalance, publish: bytes) -> None:
        """A rebalance has come: make it ready, beside the steps."""
        size = self.publish_bytes
        assert self._team.placement is not None and len(publish) == rebalance.num_batches * size
        packed = [publish[at : at + size] for at in range(0, len(publish), size)]
        rebalance.prepared = self._prepare(self._team.placement, packed)

    def count(self, counted: Counted) -> npt.NDArray[np.int32]:
        """Tokens per layer and expert, then rows of the last steps; begins anew."""
        rows_NL = self.rows.take()
        assert len(rows_NL) == counted.steps, "the ranks count different steps"
        rows_NL = rows_NL[-self._max_steps :]
        sent_NL = np.zeros((self._max_steps, self.rows.num_layers), dtype=np.int64)
        sent_NL[: len(rows_NL)] = rows_NL
        load_LE = self._load.window()
        self._load.reset()
        return np.concatenate([load_LE.ravel(), sent_NL.ravel()]).astype(np.int32)

    def sum_up(self, counted: Counted, counts: Sequence[npt.NDArray[np.int32]]) -> Counts:
        """counts: of every live rank. Any thread may call it."""
        layers, experts = self._load.num_layers, self._load.num_experts
        whole = np.stack(counts).astype(np.int64)  # [G, L * E + N * L]
        load_LE = whole[:, : layers * experts].sum(0).reshape(layers, experts)
        rows_GNL = whole[:, layers * experts :].reshape(len(counts), self._max_steps, layers)
        return Counts(counted, load_LE, rows_GNL[:, : counted.steps].transpose(1, 2, 0))


class RowCounter(StepCompanion):
    """Counts the rows that arrive at this rank, step by step."""

    def __init__(self, rows: RowLoad) -> None:
        self._rows = rows

    def join(self, plan: StepPlan, proposals: Sequence[Sequence[int]]) -> StepHook:
        return _RowCount(self._rows, any(plan.num_tokens))


class _RowCount(StepHook):
    """has_tokens: on some rank."""

    def __init__(self, rows: RowLoad, has_tokens: bool) -> None:
        self._rows = rows
        self._has_tokens = has_tokens

    def after(self) -> Steps[None]:
        yield from ()
        self._rows.end_step(self._has_tokens)


class StepMoves(Struct, StepHook, eq=False):
    """Of one step; what is None is not done.

    commit: go over to it before the step; counted: gather; new, publish: a rebalance that is published, and on the
    leader its bytes; chunk: of weights, travels.
    """

    needed = True  # what they do has been ordered

    exchange: BalanceExchange
    commit: MoveBatch | None = None
    counted: Counted | None = None
    new: Rebalance | None = None
    publish: bytes = b""
    chunk: Chunk | None = None
    _pending: Pending[list[Tensor]] | None = None
    _own: npt.NDArray[np.int32] | None = None

    def before(self) -> None:
        if self.commit is not None:
            self.exchange.commit(self.commit)
        if self.counted is not None or self.new is not None or self.chunk is not None:
            self._send()

    def after(self) -> Steps[None]:
        if self._pending is not None:
            yield
            self._receive(self._pending.wait())

    def _send(self) -> None:
        exchange = self.exchange
        assert exchange.parcels is not None
        sizes_GG = np.zeros((exchange.size, exchange.size), dtype=np.int64)
        parcels: dict[int, list[Tensor]] = {peer: [] for peer in range(exchange.size) if peer != exchange.index}
        if self.counted is not None:
            self._own = exchange.count(self.counted)
            sizes_GG[1:, 0] += exchange.gather_bytes
            if exchange.index > 0:
                parcels[0].append(torch.from_numpy(self._own.view(np.uint8)))
        if self.new is not None:
            sizes_GG[0, 1:] += self._published
            if exchange.index == 0:
                content = torch.frombuffer(bytearray(self.publish), dtype=torch.uint8)
                for chunks in parcels.values():
                    chunks.append(content)
        if self.chunk is not None:
            _, migration, number = self.chunk
            sizes_GG += migration.sizes(number)
            for peer, chunks in migration.outgoing(number).items():
                parcels[peer] += chunks
        self._pending = exchange.parcels.send(sizes_GG, parcels)

    def _receive(self, arrived: list[Tensor]) -> None:
        exchange = self.exchange
        assert exchange.parcels is not None
        if self.counted is not None and self._own is not None and exchange.index == 0:
            counts = [self._own]
            for peer in range(1, exchange.size):
                counts.append(np.frombuffer(_bytes(arrived[peer][: exchange.gather_bytes]), dtype=np.int32))
                arrived[peer] = arrived[peer][exchange.gather_bytes :]
            exchange.on_counts(self.counted, counts)
        if self.new is not None:
            if exchange.index > 0:
                self.publish = _bytes(arrived[0][: self._published])
                arrived[0] = arrived[0][self._published :]
            exchange.adopt(self.new, self.publish)
        if self.chunk is not None:
            rebalance, migration, number = self.chunk
            migration.receive(number, arrived)
            rebalance.received += 1
        exchange.parcels.release()

    @property
    def _published(self) -> int:
        """Bytes."""
        return 0 if self.new is None else self.new.num_batches * self.exchange.publish_bytes


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
