"""Forward passes captured once and replayed, so that a step costs the host one call, or a few, instead of hundreds.

A graph is torch's CUDA graph on a GPU, and a tape of native kernel calls on a CPU (native/tape.py). Full: it holds the
whole forward pass of decodes, also when it is split in parts that take turns. Piecewise: it holds a piece of a pass of
T tokens, of whatever mix, between two graph breaks (models/graph_breaks.py): attention over the step's own lengths, and
exchanges whose rows are counted on the host. Graphs read the memory that every step is laid out in
(engine/step_memory.py), so that nothing is copied for them.

On a GPU they are captured ahead, of a few sizes, and a step is padded to the next one: rows of padding write to a
scratch block that no sequence owns, and attend to it. On a CPU the first step of so many sequences is captured while it
runs, so there is a graph for every number of them, and no padding. If it cannot be captured, because torch computes
something in it, it has lost nothing: it has run, and all others of its size run eager.

Legend: T tokens of the step, D hidden size.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Protocol

import torch
from msgspec import Struct
from torch import Tensor

from dbo.steps import Steps, drain, weave
from engine.prepared import Graphs, GraphSize, PreparedStep
from engine.step_buffers import StepBuffers
from ep.backends.dispatchers import StepState
from ep.protocol import PeerLost
from layers.step import StepInput
from models.graph_breaks import EAGER, GraphBreaks, Operation, Prepare

Forward = Callable[[StepInput, GraphBreaks, int], Steps[Tensor]]
MANY = 1 << 30


class Graph(Protocol):
    """What is done between `begin` and `end`, by this thread, is what `replay` does again."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None: ...


class GraphSeries(Protocol):
    """The graphs of one forward pass, which are replayed one after another."""

    @property
    def refused(self) -> str:
        """ "", or why what was captured cannot be replayed."""
        ...

    def new(self) -> Graph: ...


class GraphLibrary(Protocol):
    def session(self) -> AbstractContextManager[None]:
        """Around everything that is captured together ahead, and what runs in between."""
        ...

    def series(self, lane: int) -> GraphSeries:
        """lane: series of one lane never run at the same time."""
        ...


class GraphPolicy(Struct, frozen=True):
    """Which steps have graphs. full, piecewise: ascending numbers of rows that are captured ahead, of the sequences of
    decode steps and of the tokens of any step. exact: decode steps of at most so many sequences are captured when the
    first one comes. few_tokens: full graphs are for steps in which no rank has more. num_ubatches: of a step that is
    split; full graphs are captured of those too, with a lane for each part. break_exchanges: piecewise and exact graphs
    leave out exchanges, though this rank is alone. together: full graphs can hold exchanges with other ranks."""

    full: Sequence[int] = ()
    piecewise: Sequence[int] = ()
    exact: int = 0
    few_tokens: int = MANY
    num_ubatches: int = 1
    break_exchanges: bool = False
    together: bool = True


class Capture:
    """Not thread-safe: the thread that runs the steps captures and replays."""

    def __init__(
        self,
        forward: Forward,
        library: GraphLibrary,
        policy: GraphPolicy,
        buffers: StepBuffers,
        exchange: StepState | None = None,
        watched: Callable[[], bool] = lambda: False,
    ) -> None:
        """forward(step, breaks, lane): the model's. exchange: None: this rank is alone. watched(): whether steps are to
        run eager, because what their layers do is watched."""
        self._forward = forward
        self._library = library
        self._policy = policy
        self._buffers = buffers
        self._exchange = exchange
        self._watched = watched
        self._break_exchanges = True
        # Of graphs captured ahead by the number of parts, of exact ones by the lane.
        self._passes: dict[tuple[int, GraphSize], _Pass] = {}
        self._refused: dict[tuple[int, GraphSize], str] = {}

    def captured(self, full: bool, key: int | None = None) -> list[int]:
        """The numbers of rows of the graphs there are. key: of a step in so many parts, or of that lane."""
        key = int(not self._policy.exact) if key is None else key
        return sorted({size.rows for other, size in self._passes if other == key and size.full == full})

    @property
    def refused(self) -> dict[int, str]:
        """The numbers of sequences that cannot be captured, and why."""
        return {size.rows: reason for (_, size), reason in self._refused.items()}

    def forget(self) -> None:
        """Steps run eager until the next `capture`, or are captured anew: what graphs read may have moved."""
        self._passes.clear()
        self._refused.clear()

    def capture(self, num_ranks: int = 1) -> None:
        """The ranks have met: begin anew. num_ranks: that exchange rows with each other; all of them do this at the
        same time, because what is captured ahead runs once before, so that kernels are compiled and libraries have
        their workspaces.

        PeerLost; RuntimeError when the library cannot capture something.
        """
        self.forget()
        policy = self._policy
        self._break_exchanges = policy.break_exchanges or num_ranks > 1
        full = policy.full if num_ranks == 1 or policy.together else ()
        if not full and not policy.piecewise:
            return
        size = 0
        try:
            with self._library.session():
                # The largest first: the others fit into its memory.
                for size in sorted(full, reverse=True):
                    if self._exchange is not None:
                        self._exchange.begin(size)
                    for num_ubatches in sorted({policy.num_ubatches, 1}, reverse=True):
                        self._passes[num_ubatches, GraphSize(True, size)] = self._ahead(True, size, num_ubatches)
                for size in sorted(policy.piecewise, reverse=True):
                    self._passes[1, GraphSize(False, size)] = self._ahead(False, size, 1)
            if self._exchange is not None:
                self._exchange.ended()
        except PeerLost:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RuntimeError(f"a step of {size} rows cannot be captured ({reason}); --cudagraph-mode none") from error

    # ---- steps ----

    def choose(self, counts: Sequence[int], decodes: Sequence[bool]) -> Graphs:
        """Implements engine.prepared.Chooser, for a step that the exchange has been told of."""
        num_ubatches, none = len(counts), [None] * len(counts)
        if self._watched():
            return none
        if self._policy.exact:
            return none if num_ubatches > 1 and not self._break_exchanges else self._exact(counts, decodes)
        if not any(counts):
            return none
        few = self._exchange is None or self._exchange.largest <= self._policy.few_tokens
        if few and all(decodes):
            size = GraphSize(True, _round_up(self._policy.full, max(counts)))
            if (num_ubatches, size) in self._passes:
                return [size] * num_ubatches
        size = GraphSize(False, _round_up(self._policy.piecewise, max(counts)))
        return [size] if num_ubatches == 1 and (1, size) in self._passes else none

    def _exact(self, counts: Sequence[int], decodes: Sequence[bool], first_lane: int = 0) -> Graphs:
        """Parts have to take turns after every exchange, because one may read what another has written, so those of a
        split step have no graphs that hold exchanges."""
        forms = (True, False) if len(counts) == 1 and self._holds_exchanges() else (False,)
        found: list[GraphSize | None] = []
        for lane, (count, decode) in enumerate(zip(counts, decodes, strict=True), first_lane):
            can = decode and count <= self._policy.exact
            sizes = [GraphSize(True, count, form) for form in forms if form or count] if can else ()
            found.append(next((size for size in sizes if (lane, size) not in self._refused), None))
        return found

    def _holds_exchanges(self) -> bool:
        """Whether an exact graph of this step may hold its exchanges with other ranks: as few tokens as that takes are
        agreed on by all."""
        policy, exchange = self._policy, self._exchange
        if exchange is None or not self._break_exchanges or policy.break_exchanges or not policy.together:
            return False
        return 0 < exchange.recorded_tokens >= exchange.largest

    def steps(self, prepared: PreparedStep) -> Steps[Tensor]:
        """The forward pass: [T, D], its parts' rows one after another, valid until the next one begins."""
        inputs, graphs = prepared.inputs, prepared.graphs
        if len(inputs) == 1 and (self._policy.exact or graphs[0] is None):
            return (yield from self._part(inputs[0], graphs[0], 0))
        if graphs[0] is None or self._policy.exact:
            parts = zip(inputs, graphs, strict=True)
            hidden = yield from weave(*[self._part(step, size, lane) for lane, (step, size) in enumerate(parts)])
        else:
            hidden = yield from self._passes[len(inputs), graphs[0]].steps(inputs)
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def graph_of(self, num_tokens: int, lane: int) -> GraphSize | None:
        """The exact graph that a pass of so many decodes has, or gets when it is made; None: it runs eager."""
        if not self._policy.exact or self._watched():
            return None
        return self._exact([num_tokens], [True], lane)[0]

    def decodes(self, step: StepInput, lane: int, size: GraphSize | None) -> Steps[Tensor]:
        """A pass of decodes in a lane that no part of a step has, with what `graph_of` said."""
        return self._part(step, size, lane)

    def _part(self, step: StepInput, size: GraphSize | None, lane: int) -> Steps[Tensor]:
        if size is None:
            return (yield from self._forward(step, EAGER, lane))
        found = self._passes.get((lane, size))
        if found is None:
            return (yield from self._first(step, size, lane))
        (hidden_TD,) = yield from found.steps((step,))
        return hidden_TD

    # ---- capturing ----

    def _first(self, step: StepInput, size: GraphSize, lane: int) -> Steps[Tensor]:
        """The first step of its size, captured while it runs."""
        series = self._library.series(lane)
        breaks = self._break_exchanges and not size.exchanges
        recorder = _Recorder(series.new, break_exchanges=breaks, runs=True)
        recorder.begin()
        try:
            # With the lengths of this step: what reads them on the host computes in torch, and that is refused, but
            # right.
            forward = self._forward(self._buffers.widened(step, lane), recorder, lane)
            # No other rank of this thread may have a turn while it records.
            hidden_TD = (yield from forward) if breaks else drain(forward)
        finally:
            recorder.end()
        if series.refused:
            self._refused[lane, size] = series.refused
        else:
            self._passes[lane, size] = _Pass(recorder.parts, [], [hidden_TD])
        return hidden_TD

    def _ahead(self, full: bool, size: int, num_ubatches: int) -> _Pass:
        """It runs once before, with exchanges that a graph breaks at left out: no other rank takes part."""
        inputs = [self._buffers.scratch_step(lane, size, full) for lane in range(num_ubatches)]
        for new in (_Nothing, self._library.series(0).new):
            recorder = _Recorder(new, not full, not full and self._break_exchanges)
            recorder.begin()
            try:
                hidden = drain(weave(*[self._forward(step, recorder, lane) for lane, step in enumerate(inputs)]))
            finally:
                recorder.end()
        return _Pass(recorder.parts, recorder.prepares, hidden)


def _round_up(sizes: Sequence[int], count: int) -> int:
    """The smallest size that has room for so many, or -1."""
    index = bisect.bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else -1


class _Call(Struct, frozen=True):
    """A call of the index-th operation. arguments: of the captured pass, the first num_rows of which have a row per
    token. out_T: what the graph behind it reads."""

    index: int
    num_rows: int
    arguments: tuple[object, ...]
    out_T: Tensor


class _Exchange(Struct, frozen=True):
    """x: what the graph before leaves for it; out: where the one behind it finds what it gives."""

    steps: Callable[[Tensor, int], Steps[Tensor]]
    x_TD: Tensor
    lane: int
    out_TD: Tensor


class _Pass(Struct, frozen=True):
    """A forward pass: its graphs and what runs between them, in their order. prepares: of each operation, what makes it
    anew for a step. hidden: of each part, with padding."""

    parts: list[Graph | _Call | _Exchange]
    prepares: list[Prepare]
    hidden: list[Tensor]

    def steps(self, inputs: Sequence[StepInput]) -> Steps[list[Tensor]]:
        count = inputs[0].num_tokens
        operations = [prepare(inputs[0]) for prepare in self.prepares]
        for part in self.parts:
            if isinstance(part, _Call):
                rows = [_rows(x, count) for x in part.arguments[: part.num_rows]]
                given_T = operations[part.index](*rows, *part.arguments[part.num_rows :])
                _rows(part.out_T, count).copy_(given_T)
            elif isinstance(part, _Exchange):
                given_TD = yield from part.steps(_rows(part.x_TD, count), part.lane)
                _rows(part.out_TD, count).copy_(given_TD)
            else:
                part.replay()
        return [_rows(hidden_TD, step.num_tokens) for hidden_TD, step in zip(self.hidden, inputs, strict=True)]


def _rows(x: object, count: int) -> Tensor:
    assert isinstance(x, Tensor)
    return x if x.shape[0] == count else x[:count]


class _Recorder:
    """Implements models.graph_breaks.GraphBreaks: ends a graph where the forward pass is left, and begins one where
    it is entered again."""

    def __init__(
        self,
        new: Callable[[], Graph],
        break_operations: bool = False,
        break_exchanges: bool = False,
        runs: bool = False,
    ) -> None:
        """runs: what is captured is computed too, and exchanges take place."""
        self.parts: list[Graph | _Call | _Exchange] = []
        self.prepares: list[Prepare] = []
        self._new = new
        self._break_operations = break_operations
        self._break_exchanges = break_exchanges
        self._runs = runs
        self._graph: Graph | None = None

    def begin(self) -> None:
        self._graph = self._new()
        self._graph.begin()

    def end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.end()
            self.parts.append(graph)

    def operation(self, prepare: Prepare, step: StepInput, num_rows: int) -> Operation:
        if not self._break_operations:
            return prepare(step)
        self.prepares.append(prepare)
        prepared = cache(partial(prepare, step))  # at its first call, outside of the graphs
        return partial(self._call, prepared, len(self.prepares) - 1, num_rows)

    def exchange(self, steps: Callable[[Tensor, int], Steps[Tensor]], x_TD: Tensor, lane: int) -> Steps[Tensor]:
        if not self._break_exchanges:
            return (yield from steps(x_TD, lane))
        out_TD = torch.empty_like(x_TD)  # in the graphs' memory
        self.end()
        self.parts.append(_Exchange(steps, x_TD, lane, out_TD))
        if self._runs:
            out_TD.copy_((yield from steps(x_TD, lane)))
        else:
            out_TD.zero_()
        self.begin()
        return out_TD

    def _call(self, prepared: Callable[[], Operation], index: int, num_rows: int, *arguments: object) -> Tensor:
        self.end()
        out_T = prepared()(*arguments).zero_()  # of rows that stay padding until the first replays: finite
        self.parts.append(_Call(index, num_rows, arguments, out_T))
        self.begin()
        return out_T


class _Nothing:
    """A Graph of a pass that is not captured."""

    def begin(self) -> None:
        """Operations just run."""

    def end(self) -> None:
        """Nothing was begun."""

    def replay(self) -> None:
        raise AssertionError("there is nothing to replay")
