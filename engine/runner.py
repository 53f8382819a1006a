"""Runs schedules on the device: batch, model, sampler, one step after another.

Legend: T tokens of the step, D hidden size, P rows whose logits are wanted, S sequences sampled, V vocabulary.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from dbo.steps import Steps, drain
from engine.batch import Batch, PreparedStep
from engine.logprobs import prompt_logprobs
from engine.messages import Logprobs, LogprobsMode
from engine.sampler import Sampled, sample
from engine.sampling_table import SamplingTable
from engine.schedule import Schedule
from ep.protocol import PeerLost
from layers.paged_kv import PagedKV
from models.base import CausalLM

V = TypeVar("V")

PROMPT_ROWS_AT_ONCE = 256  # bounds the logits held for prompt_logprobs: [256, V] float32


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, as `Scheduler.update` takes it: one entry per entry of the schedule."""

    token_ids: list[list[int]]  # [] where nothing was sampled
    logprobs: list[list[Logprobs] | None] | None  # None when no row asked
    prompt_logprobs: list[list[Logprobs] | None] | None  # None when no row asked


class Flight(Protocol):
    """A step on its way."""

    @property
    def schedule(self) -> Schedule: ...

    def steps(self) -> Steps[StepResult]:
        """Its rest, as a generator; called once. Whatever went wrong is raised here."""
        ...


class Chores(Protocol):
    """What else the device thread does around a forward pass (engine/balance.py)."""

    def before(self) -> None: ...

    def after(self) -> Steps[None]: ...


class Runner:
    """Steps run in the order of `launch`, on one device thread when `threaded`, else where their result is asked for.

    Nothing but the steps touches model, cache, batch and table, so that no lock is needed. A failed step fails all that
    were launched after it, until `reset`.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: PagedKV,
        batch: Batch,
        table: SamplingTable,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        threaded: bool = False,
    ) -> None:
        self._model = model
        self._kv = kv
        self._batch = batch
        self._table = table
        self._logprobs_mode = logprobs_mode
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="device") if threaded else None
        self._failure: BaseException | None = None

    def launch(self, schedule: Schedule, chores: Chores | None = None) -> Flight:
        """Start a step (zero tokens are fine: this rank then only serves the others' exchanges)."""
        if self._threads is None:
            return _Inline(schedule, self, chores)
        return _Threaded(schedule, self._threads.submit(self._run, schedule, chores))

    def steps(self, schedule: Schedule, chores: Chores | None = None) -> Steps[StepResult]:
        """The step itself. May be resumed from any thread, but by one at a time."""
        return _in_inference_mode(self._steps(schedule, chores))

    def reset(self) -> None:
        """After a lost peer: wait for the steps launched, and forget them and how they ended. The next schedule must state
        every row anew (Scheduler.rollback). Raises what a step failed of, unless it was PeerLost."""
        if self._threads is not None:
            self._threads.submit(_nothing).result()  # one thread: whatever came before it is over
        failure, self._failure = self._failure, None
        if failure is not None and not isinstance(failure, PeerLost):
            raise failure

    def close(self) -> None:
        """Waits for the steps launched."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)

    def _run(self, schedule: Schedule, chores: Chores | None) -> StepResult:
        if self._failure is not None:
            raise RuntimeError("an earlier step failed") from self._failure
        try:
            with torch.inference_mode():
                return drain(self.steps(schedule, chores))
        except BaseException as error:
            self._failure = error
            raise

    def _steps(self, schedule: Schedule, chores: Chores | None) -> Steps[StepResult]:
        for row in schedule.freed_rows:
            self._table.clear(row)
        for new in schedule.new_rows:
            self._table.set(new.row, new)
        prepared = self._batch.apply(schedule)
        if chores is not None:
            chores.before()
        hidden_TD = yield from self._model.steps(prepared.input, self._kv)
        if chores is not None:
            yield from chores.after()
        token_ids: list[list[int]] = [[] for _ in range(prepared.num_entries)]
        logprobs = self._sample(prepared, hidden_TD, token_ids) if prepared.num_sampled else None
        return StepResult(token_ids, logprobs, self._prompt_logprobs(prepared, hidden_TD))

    def _sample(
        self, prepared: PreparedStep, hidden_TD: Tensor, token_ids: list[list[int]]
    ) -> list[list[Logprobs] | None] | None:
        """Fills token_ids; returns the log-probabilities."""
        rows = prepared.rows_S.tolist()
        hidden_SD = hidden_TD[prepared.input.logits_rows_P[: prepared.num_sampled]]
        sampling = self._table.gather(rows, prepared.positions_S.tolist())
        if sampling.needs:
            sampled = sample(self._model.logits(hidden_SD), sampling, self._logprobs_mode)
        else:
            sampled = Sampled(self._model.best_tokens(hidden_SD, sampling.num_valid_tokens), None)
        tokens_S = sampled.token_ids_P.cpu()
        self._table.note(rows, tokens_S)
        self._batch.note_sampled(prepared, tokens_S.numpy())
        for entry, token in zip(prepared.entries_S, tokens_S.tolist(), strict=True):
            token_ids[entry] = [token]
        if sampled.logprobs is None:
            return None
        logprobs: list[list[Logprobs] | None] = [None] * prepared.num_entries
        for entry, value in zip(prepared.entries_S, sampled.logprobs, strict=True):
            if value is not None:
                logprobs[entry] = [value]
        return logprobs

    def _prompt_logprobs(self, prepared: PreparedStep, hidden_TD: Tensor) -> list[list[Logprobs] | None] | None:
        if not prepared.prompt_parts:
            return None
        found: list[list[Logprobs] | None] = [None] * prepared.num_entries
        for part in prepared.prompt_parts:
            values: list[Logprobs] = []
            for first in range(0, len(part.target_ids), PROMPT_ROWS_AT_ONCE):
                targets = part.target_ids[first : first + PROMPT_ROWS_AT_ONCE]
                start = part.first_logit + first
                hidden_PD = hidden_TD[prepared.input.logits_rows_P[start : start + len(targets)]]
                logits_PV = self._model.logits(hidden_PD).float()
                values += prompt_logprobs(
                    logits_PV, targets, part.num_logprobs, self._logprobs_mode, self._table.num_valid_tokens
                )
            found[part.entry] = values
        return found


def _nothing() -> None:
    """A step that only has to have its turn."""


class _Inline:
    def __init__(self, schedule: Schedule, runner: Runner, chores: Chores | None) -> None:
        self.schedule = schedule
        self._runner = runner
        self._chores = chores

    def steps(self) -> Steps[StepResult]:
        return self._runner.steps(self.schedule, self._chores)


class _Threaded:
    def __init__(self, schedule: Schedule, future: Future[StepResult]) -> None:
        self.schedule = schedule
        self._future = future

    def steps(self) -> Steps[StepResult]:
        yield
        return self._future.result()  # every wait within the step is bounded (ep/protocol.py), so this one is too


def _in_inference_mode(steps: Steps[V]) -> Steps[V]:
    """Entered anew for every turn, because the mode belongs to the thread and others take turns on it between ours.

    Whoever drains the whole step enters it once around all turns instead: entering costs tens of microseconds.
    """
    try:
        while True:
            with contextlib.nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode():
                try:
                    next(steps)
                except StopIteration as done:
                    value: V = done.value
                    return value
            yield
    finally:
        steps.close()
