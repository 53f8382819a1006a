"""What one rank records while a profile is taken: its lanes (ep/instrumented.py) and the parts of its steps.

Off, which it nearly always is, the exchanges are untouched, and no hook of it goes with a step.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns

from engine.agreement import StepPlan
from engine.hooks import StepCompanion, StepHook
from engine.schedule import Schedule
from ep.instrumented import recorded, unrecorded
from ep.recorder import Kind, Recorder
from front.messages import ProfileCommand, ProfilePart
from models.base import CausalLM

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


class Timeline(StepCompanion, StepHook):
    """`obey` is called between two steps, by the thread that runs them."""

    watches = True

    def __init__(self, rank: int, model: CausalLM | None = None) -> None:
        """model: whose exchanges are recorded; None: only the steps are."""
        self._rank = rank
        self._model = model
        self._recorder: Recorder | None = None
        self._profile_id = 0
        self._scheduling = 0  # since when
        self._agreeing = 0
        self._computing = 0  # since when the part of the step that is now computed

    @property
    def on(self) -> bool:
        return self._recorder is not None

    # ---- start and stop ----

    def obey(self, command: ProfileCommand) -> list[ProfilePart]:
        """What is to be told to the front."""
        if command.kind == "start":
            self._start(command)
            return []
        return [self._stop(command)]

    def formed(self) -> None:
        """The model has new lanes."""
        recorder = self._recorder
        if recorder is not None and self._model is not None:
            for layer, moe in self._model.moe_layers:
                moe.lanes = tuple(recorded(moe.lanes, recorder, layer))

    def _start(self, command: ProfileCommand) -> None:
        """Begin anew, also when a record is under way: the client that wanted that one is gone."""
        self._profile_id = command.profile_id
        self._computing = self._scheduling = self._agreeing = 0
        self._recorder = Recorder(command.capacity)
        self.formed()

    def _stop(self, command: ProfileCommand) -> ProfilePart:
        """What was recorded; nothing when that profile was not started here (the rank has come later)."""
        recorder, profile_id = self._recorder, command.profile_id
        if recorder is None or profile_id != self._profile_id:
            return ProfilePart(profile_id=profile_id, rank=self._rank, started=False)
        self._recorder = None
        if self._model is not None:
            for _, moe in self._model.moe_layers:
                moe.lanes = tuple(unrecorded(moe.lanes))
        events, num_dropped = recorder.finish()
        return ProfilePart(
            profile_id=profile_id, rank=self._rank, started=True, events=events, num_dropped=num_dropped, **_node()
        )

    # ---- what the thread that schedules does ----

    def scheduling(self) -> None:
        if self._recorder is not None:
            self._scheduling = perf_counter_ns()

    def propose(self, schedule: Schedule) -> Sequence[int]:
        """And the agreement begins."""
        if self._recorder is not None and self._scheduling:
            now = perf_counter_ns()
            self._recorder.add(Kind.SCHEDULING, self._scheduling, now, schedule.step_id, schedule.num_tokens)
            self._agreeing = now
        return ()

    def agreed(self, plan: StepPlan) -> None:
        if self._recorder is not None and self._agreeing:
            self._recorder.add(Kind.AGREEMENT, self._agreeing, perf_counter_ns(), plan.step, plan.epoch)
            self._scheduling = self._agreeing = 0

    def join(self, plan: StepPlan, proposals: Sequence[Sequence[int]]) -> StepHook | None:
        return self if self.on else None

    # ---- what the thread that computes does ----

    def begin(self, schedule: Schedule) -> None:
        """Its first part does."""
        if self._recorder is not None:
            self._recorder.step = schedule.step_id
            self._computing = self._recorder.resumed = perf_counter_ns()

    def ended(self, kind: Kind, num_tokens: int) -> None:
        """A part of the step has ended, and the next one begins."""
        recorder = self._recorder
        if recorder is not None and self._computing:
            now = perf_counter_ns()
            recorder.add(kind, self._computing, now, recorder.step, num_tokens)
            self._computing = recorder.resumed = now


def _node() -> dict[str, str]:
    """Where this process runs. Ranks with the same `clock` have read the same one; hosts that are made of network
    namespaces of one machine (benchmarks/bench_dbo.py) differ by `network`."""
    try:
        clock, network = BOOT_ID.read_text().strip(), str(os.stat(NETWORK).st_ino)
    except OSError:  # not Linux: one machine, as far as can be told
        clock = network = ""
    return {"host": socket.gethostname(), "clock": clock, "network": network}
