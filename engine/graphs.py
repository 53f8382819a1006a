"""Forward passes captured once and replayed, so that a step costs the host one launch, or a few, instead of hundreds.

Full: a whole decode step of B sequences is one graph, also when it is split in parts that take turns. Piecewise: a step
of T tokens, of whatever mix, is graphs with what cannot be captured in between (models/graph_breaks.py): attention over
the step's own lengths, and experts whose rows are counted on the host. Graphs read and write the same memory at every
replay, so a step is copied into it and padded to the captured size. Rows of padding write to a scratch block that no
sequence owns, and attend to it.

The library that captures is injected: torch.cuda.CUDAGraph, or anything that behaves like it.

Legend: T tokens of the step, B sequences, N blocks of a sequence, D hidden size.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dbo.steps import Steps, drain, weave
from engine.static_step import CutExperts, StaticDecodes, StaticTokens
from ep.backends.dispatchers import StepState
from ep.protocol import PeerLost
from layers.step import StepInput
from models.graph_breaks import EAGER, GraphBreaks, Operation, Prepare

Forward = Callable[[StepInput, GraphBreaks, int], Steps[Tensor]]
MANY = 1 << 30


class Graph(Protocol):
    """What torch.cuda.CUDAGraph does."""

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class GraphLibrary(Protocol):
    def new(self) -> Graph: ...

    def session(self) -> AbstractContextManager[None]:
        """Around everything that is captured together, and what runs in between."""
        ...


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Ascending numbers of rows. full: sequences of decode steps; piecewise: tokens of any step."""

    full: Sequence[int] = ()
    piecewise: Sequence[int] = ()


class Captured(Protocol):
    """How a runner has its forward passes: graphs on a GPU, tapes on a CPU (engine/tapes.py)."""

    def capture(self, num_ranks: int = 1) -> None:
        """The ranks have met: begin anew. num_ranks: that exchange rows with each other."""
        ...

    def forget(self) -> None:
        """Steps run as they are written until the next `capture`, or are captured anew."""
        ...

    def steps(self, step: StepInput) -> Steps[Tensor]:
        """The forward pass: [T, D], valid until the next one begins."""
        ...

    def woven(self, parts: Sequence[StepInput]) -> Tensor | None:
        """That of a step whose parts take turns, or None: then `part` has it."""
        ...

    def part(self, step: StepInput, lane: int) -> Steps[Tensor]:
        """That of one part."""
        ...


class Graphs:
    """Implements Captured. Not thread-safe: the thread that runs the steps captures and replays."""

    def __init__(
        self,
        forward: Forward,
        library: GraphLibrary,
        sizes: GraphSizes,
        max_model_len: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
        cut_experts: bool = False,
        exchange: StepState | None = None,
        few_tokens: int = MANY,
        together: bool = True,
        num_parts: int = 1,
    ) -> None:
        """forward(step, breaks, lane): the model's. scratch_block: of the cache, no sequence's. cut_experts: in
        piecewise graphs they run outside, with the rows that there really are. exchange: None: this rank is alone; full
        graphs are for steps in which no rank has more than few_tokens. together: they can hold the exchange of several
        ranks. num_parts: of a step that is split; full graphs are captured of those too, with a lane for each part."""
        self._together = together
        self._exchange = exchange
        self._few_tokens = few_tokens
        self._forward = forward
        self._library = library
        self._sizes = sizes
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._cut_experts = cut_experts
        most = max([*sizes.full, 0])
        columns = -(-max_model_len // block_size) if most else 0
        self._decodes = [StaticDecodes(most, columns, block_size, scratch_block, device) for _ in range(num_parts)]
        self._tokens = StaticTokens(max([*sizes.piecewise, 0]), scratch_block * block_size, device)
        self._full: dict[tuple[int, int], _Full] = {}  # by number of parts and rows of each
        self._pieces: dict[int, _Pieces] = {}

    @property
    def captured(self) -> tuple[list[int], list[int]]:
        """The sizes of full and of piecewise graphs that there are."""
        return sorted(size for num_parts, size in self._full if num_parts == 1), sorted(self._pieces)

    def forget(self) -> None:
        """Steps run as they are written until the next `capture`: what graphs read may have moved."""
        self._full.clear()
        self._pieces.clear()

    def capture(self, num_ranks: int = 1) -> None:
        """Capture every size anew. num_ranks: that exchange rows with each other; all of them do this at the same time,
        because each size runs once before it is captured, so that kernels are compiled and libraries have their
        workspaces.

        PeerLost; RuntimeError when the library cannot capture something.
        """
        self.forget()
        cut_experts = self._cut_experts or num_ranks > 1
        size = 0
        try:
            with self._library.session():
                # The largest first: the others fit into its memory.
                for size in sorted(self._sizes.full if num_ranks == 1 or self._together else (), reverse=True):
                    if self._exchange is not None:
                        self._exchange.begin(size)
                    for num_parts in sorted({len(self._decodes), 1}, reverse=True):
                        self._full[num_parts, size] = self._capture_full(size, num_parts)
                for size in sorted(self._sizes.piecewise, reverse=True):
                    self._pieces[size] = self._capture_pieces(size, cut_experts)
            if self._exchange is not None:
                self._exchange.ended()
        except PeerLost:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RuntimeError(f"a step of {size} rows cannot be captured ({reason}); --cudagraph-mode none") from error

    def steps(self, step: StepInput) -> Steps[Tensor]:
        """The forward pass: [T, D], valid until the next one begins."""
        count = step.num_tokens
        if count == 0 or step.more_tables or step.state is not None:
            return (yield from self._forward(step, EAGER, 0))
        hidden_TD = self.woven([step])
        if hidden_TD is not None:
            return hidden_TD
        pieces = self._pieces.get(_round_up(self._sizes.piecewise, count))
        if pieces is None:
            return (yield from self._forward(step, EAGER, 0))
        self._tokens.fill(step)
        return (yield from pieces.steps(step))

    def woven(self, parts: Sequence[StepInput]) -> Tensor | None:
        """The forward pass of a step whose parts take turns: [T, D], theirs one after another, valid until the next one
        begins. None: no graph has it, and it is to run as it is written. All parts are padded to the largest."""
        counts = [part.num_tokens for part in parts]
        if parts[0].more_tables or parts[0].state is not None:
            return None
        if sum(counts) == 0 or (self._exchange is not None and self._exchange.largest > self._few_tokens):
            return None
        if any(part.num_decodes < part.num_sequences for part in parts):
            return None
        found = self._full.get((len(parts), _round_up(self._sizes.full, max(counts))))
        if found is None:
            return None
        for static, part in zip(self._decodes, parts, strict=False):  # a step in one part needs one of them
            static.fill(part)
        found.graph.replay()
        rows = [hidden_TD[:count] for hidden_TD, count in zip(found.hidden, counts, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def part(self, step: StepInput, lane: int) -> Steps[Tensor]:
        """The forward pass of one of the parts that `woven` has no graph of, as it is written."""
        return self._forward(step, EAGER, lane)

    def _capture_full(self, size: int, num_parts: int) -> _Full:
        parts = [static.step(size, self._max_model_len) for static in self._decodes[:num_parts]]
        drain(self._turns(parts))
        graph = self._library.new()
        graph.capture_begin()
        try:
            hidden = drain(self._turns(parts))
        finally:
            graph.capture_end()
        return _Full(graph, hidden)

    def _turns(self, parts: Sequence[StepInput]) -> Steps[list[Tensor]]:
        return weave(*[self._forward(part, EAGER, lane) for lane, part in enumerate(parts)])

    def _capture_pieces(self, size: int, cut_experts: bool) -> _Pieces:
        step = self._tokens.step(size, self._block_size)
        # Attention runs here too, but experts that are cut do not: no other rank takes part.
        drain(self._forward(step, _Recorder(_Nothing, cut_experts), 0))
        recorder = _Recorder(self._library.new, cut_experts)
        recorder.begin()
        try:
            hidden_TD = drain(self._forward(step, recorder, 0))
        finally:
            recorder.end()
        return recorder.pieces(hidden_TD)


@dataclass(frozen=True, slots=True)
class _Full:
    """hidden: of each part, [rows, D]."""

    graph: Graph
    hidden: list[Tensor]


def _round_up(sizes: Sequence[int], count: int) -> int:
    """The smallest size that has room for so many, or -1."""
    index = bisect.bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else -1


# ---- piecewise ----


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the index-th operation. arguments: of the captured pass, the first num_rows of which have a row per
    token. out_T: what the graph behind it reads."""

    index: int
    num_rows: int
    arguments: tuple[object, ...]
    out_T: Tensor


class _Pieces:
    """The parts of a forward pass in their order."""

    def __init__(self, parts: list[Graph | _Call | CutExperts], prepares: list[Prepare], hidden_TD: Tensor) -> None:
        """prepares: of each operation, what makes it anew for a step."""
        self._parts = parts
        self._prepares = prepares
        self._hidden_TD = hidden_TD

    def steps(self, step: StepInput) -> Steps[Tensor]:
        count = step.num_tokens
        operations = [prepare(step) for prepare in self._prepares]
        for part in self._parts:
            if isinstance(part, _Call):
                rows = [_rows(x, count) for x in part.arguments[: part.num_rows]]
                part.out_T[:count].copy_(operations[part.index](*rows, *part.arguments[part.num_rows :]))
            elif isinstance(part, CutExperts):
                part.out_TD[:count].copy_((yield from part.steps(part.x_TD[:count], part.lane)))
            else:
                part.replay()
        return self._hidden_TD[:count]


def _rows(x: object, count: int) -> Tensor:
    assert isinstance(x, Tensor)
    return x[:count]


class _Recorder:
    """Implements models.graph_breaks.GraphBreaks: ends a graph where the forward pass is left, and begins one where
    it is entered again."""

    def __init__(self, new: Callable[[], Graph], cut_experts: bool) -> None:
        self._new = new
        self._cut_experts = cut_experts
        self._parts: list[Graph | _Call | CutExperts] = []
        self._graph: Graph | None = None
        self._prepares: list[Prepare] = []

    def begin(self) -> None:
        self._graph = self._new()
        self._graph.capture_begin()

    def end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()
            self._parts.append(graph)

    def pieces(self, hidden_TD: Tensor) -> _Pieces:
        return _Pieces(self._parts, self._prepares, hidden_TD)

    def operation(self, prepare: Prepare, step: StepInput, num_rows: int) -> Operation:
        self.end()
        self._prepares.append(prepare)
        operation = prepare(step)
        self.begin()
        return partial(self._call, operation, len(self._prepares) - 1, num_rows)

    def exchange(self, steps: Callable[[Tensor, int], Steps[Tensor]], x_TD: Tensor, lane: int) -> Steps[Tensor]:
        if not self._cut_experts:
            return (yield from steps(x_TD, lane))
        self.end()
        out_TD = torch.zeros_like(x_TD)
        self._parts.append(CutExperts(steps, x_TD, lane, out_TD))
        self.begin()
        return out_TD

    def _call(self, operation: Operation, index: int, num_rows: int, *arguments: object) -> Tensor:
        self.end()
        out_T = operation(*arguments).zero_()  # of rows that stay padding until the first replays: finite
        self._parts.append(_Call(index, num_rows, arguments, out_T))
        self.begin()
        return out_T


class _Nothing:
    """A Graph of a pass that is not captured."""

    def capture_begin(self) -> None:
        """Operations just run."""

    def capture_end(self) -> None:
        """Nothing was begun."""

    def replay(self) -> None:
        raise AssertionError("there is nothing to replay")
