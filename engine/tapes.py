"""Decode steps without Python, on a CPU: what graphs are on a GPU (engine/graphs.py).

The first step of so many sequences is recorded while it runs (native/tape.py), later ones of as many are played: one
call, or one between any two exchanges of rows with other ranks. Recording costs next to nothing, so there is a tape for
every number of sequences and no padding. A step that cannot be recorded, because torch computes something in it, has
lost nothing: it has run as it is written, and so do all others of its size from then on.

Legend: T tokens of the step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dbo.steps import Steps, drain
from engine.graphs import Forward
from engine.static_step import CutExperts, StaticDecodes
from layers.step import StepInput
from models.graph_breaks import EAGER, Operation, Prepare
from native.tape import Memory, Recording, Tape


class Tapes:
    """Implements engine.graphs.Captured. Not thread-safe: the thread that runs the steps records and plays.

    forward(step, breaks, lane): the model's. sizes: most sequences of a step, and the blocks of the longest.
    cut_experts: they exchange with others, or what they are given is counted, so they run as they are written.
    as_written(): is asked before every step whether what its layers do is watched.
    """

    def __init__(
        self,
        forward: Forward,
        max_sequences: int,
        max_blocks: int,
        block_size: int,
        num_parts: int = 1,
        cut_experts: bool = False,
        as_written: Callable[[], bool] = lambda: False,
    ) -> None:
        self._forward = forward
        self._max_sequences = max_sequences
        self._always_cut = cut_experts
        self._cut_experts = True
        self._as_written = as_written
        cpu = torch.device("cpu")
        self._lanes = [
            _Lane(Memory(), StaticDecodes(max_sequences, max_blocks, block_size, 0, cpu)) for _ in range(num_parts)
        ]

    def recorded(self, lane: int = 0) -> list[int]:
        """The numbers of sequences of which there are tapes."""
        return sorted(self._lanes[lane].steps)

    def refused(self, lane: int = 0) -> dict[int, str]:
        """The numbers of sequences whose steps run as they are written, and why."""
        return dict(self._lanes[lane].refused)

    def capture(self, num_ranks: int = 1) -> None:
        """Begin anew. num_ranks: that exchange rows with each other."""
        self.forget()
        self._cut_experts = self._always_cut or num_ranks > 1

    def forget(self) -> None:
        """What was recorded is void: what it reads may have moved."""
        for lane in self._lanes:
            lane.steps.clear()
            lane.refused.clear()

    def woven(self, parts: Sequence[StepInput]) -> Tensor | None:
        """Parts that take turns are played one by one (`part`)."""
        return None

    def steps(self, step: StepInput) -> Steps[Tensor]:
        """The forward pass: [T, D], valid until the next one begins."""
        return self._steps(step, 0)

    def part(self, step: StepInput, lane: int) -> Steps[Tensor]:
        """The same for a part of a step, whose results are valid until the next one of this lane begins. Parts have to
        take turns after every exchange, because one may read what another has written; uncut tapes do not."""
        return self._steps(step, lane) if self._cut_experts else self._forward(step, EAGER, lane)

    def _steps(self, step: StepInput, lane: int) -> Steps[Tensor]:
        count = step.num_tokens
        plain = not step.more_tables and step.state is None
        usable = plain and 0 < count <= self._max_sequences and step.num_decodes == step.num_sequences
        own = self._lanes[lane]
        if not usable or count in own.refused or self._as_written():
            return self._forward(step, EAGER, lane)
        own.inputs.fill(step)
        found = own.steps.get(count)
        return self._record(own, step, lane) if found is None else found.play()

    def _record(self, own: _Lane, step: StepInput, lane: int) -> Steps[Tensor]:
        count = step.num_tokens
        breaks = _Recorder(Recording(own.memory), self._cut_experts)
        recording = breaks.recording
        recording.begin()
        try:
            # With the lengths of this step: who reads them on the host computes in torch, and that is refused, but
            # right.
            forward = self._forward(replace(own.inputs.step(count, 0), kv_lens=step.kv_lens), breaks, lane)
            # No other part may have a turn while this thread records, and there is no exchange to wait for.
            hidden_TD = (yield from forward) if self._cut_experts else drain(forward)
            breaks.finish()
        finally:
            recording.abandon()
        if recording.refused:
            own.refused[count] = recording.refused
        else:
            own.steps[count] = _Taped(recording, breaks.parts, hidden_TD)
        return hidden_TD


@dataclass(frozen=True, slots=True)
class _Lane:
    """steps: by the number of their sequences; refused: why there is none of so many."""

    memory: Memory
    inputs: StaticDecodes
    steps: dict[int, _Taped] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Taped:
    """recording: owns the memory of all the tensors."""

    recording: Recording
    parts: list[Tape | CutExperts]
    hidden_TD: Tensor

    def play(self) -> Steps[Tensor]:
        for part in self.parts:
            if isinstance(part, Tape):
                part.play()
            else:
                part.out_TD.copy_((yield from part.steps(part.x_TD, part.lane)))
        return self.hidden_TD


class _Recorder:
    """Implements models.graph_breaks.GraphBreaks: a tape ends where experts that are cut begin, and the next one
    begins behind them."""

    def __init__(self, recording: Recording, cut_experts: bool) -> None:
        self.recording = recording
        self.parts: list[Tape | CutExperts] = []
        self._cut_experts = cut_experts

    def operation(self, prepare: Prepare, step: StepInput, num_rows: int) -> Operation:
        return prepare(step)

    def exchange(self, steps: Callable[[Tensor, int], Steps[Tensor]], x_TD: Tensor, lane: int) -> Steps[Tensor]:
        if not self._cut_experts:
            return (yield from steps(x_TD, lane))
        out_TD = self.recording.empty_like(x_TD)
        self.finish()
        self.parts.append(CutExperts(steps, x_TD, lane, out_TD))
        out_TD.copy_((yield from steps(x_TD, lane)))
        self.recording.begin()
        return out_TD

    def finish(self) -> None:
        self.parts.append(self.recording.end())
