"""Runs schedules on the device: inputs, model, sampler, one step after another.

Legend: T tokens of the step, D hidden size, P rows whose logits are wanted, S sequences sampled, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

import torch
from msgspec import Struct
from torch import Tensor

from cache.memory import CacheMemory
from dbo import alive
from dbo.steps import Steps, drain, weave
from engine.capture import Capture
from engine.device import Arrival, AtOnce, Readback, use_device
from engine.hooks import StepHook
from engine.prepared import PreparedStep, drafts_before, runs
from engine.sampling.head import StepHead
from engine.sampling.sampler import Sampled, reads_on_the_host, sample
from engine.sampling.sampling_table import SamplingTable
from engine.schedule import Schedule
from engine.speculation.drafter import num_new
from engine.speculation.mtp import MtpPasses
from engine.step_buffers import StepBuffers
from ep.backends.dispatchers import Confirm, StepState
from ep.protocol import PeerLost
from ep.recorder import Kind
from front.messages import Logprobs, LogprobsMode
from models.base import CausalLM

V = TypeVar("V")

_PREPARING, _BALANCING, _SAMPLING = int(Kind.PREPARING), int(Kind.BALANCING), int(Kind.SAMPLING)


class StepResult(Struct, frozen=True):
    """What a step brought, as `Scheduler.update` takes it: one entry per entry of the schedule."""

    token_ids: list[list[int]]  # [] where nothing was sampled
    logprobs: list[list[Logprobs] | None] | None  # None when no row asked
    prompt_logprobs: list[list[Logprobs] | None] | None  # None when no row asked
    drafts: list[list[int]] | None = None  # for the next step; None: the model has made none


class Landing:
    """A step that has been queued on the device, and what it brings when that has been done. For two threads."""

    def __init__(
        self,
        prepared: PreparedStep,
        confirm: Confirm,
        arrival: Arrival,
        sampled: Sampled | None,
        prompt_logprobs: list[list[Logprobs] | None] | None,
    ) -> None:
        self.prepared = prepared
        self.arrival = arrival
        self._confirm = confirm
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self.drafts: list[list[int]] | None = None
        self.brought: StepResult | None = None  # as soon as it is known

    def drawn(self) -> tuple[list[int], list[list[int]]]:
        """The rows of the batch that have sampled, and the new tokens of each. Raises PeerLost."""
        self._confirm()
        prepared, tokens = self.prepared, self.arrival.take()[0].tolist()
        if prepared.drafts is None:
            return prepared.rows_S.tolist(), [[token] for token in tokens]
        parts = [(first, new[: num_new(new, drafts)]) for first, new, drafts in runs(prepared, tokens)]
        return prepared.rows_S[[first for first, _ in parts]].tolist(), [new for _, new in parts]

    def result(self) -> StepResult:
        """Raises PeerLost; RuntimeError when the device does not come to the step's end. Kept: it is asked for by
        one thread."""
        if self.brought is None:
            self._confirm()
            tensors = self.arrival.take()
            self.brought = self._read(None if self._sampled is None else self._sampled.moved(tensors))
        return self.brought

    def _read(self, sampled: Sampled | None) -> StepResult:
        prepared = self.prepared
        token_ids: list[list[int]] = [[] for _ in range(prepared.num_entries)]
        logprobs: list[list[Logprobs] | None] | None = None
        if sampled is not None:
            tokens = sampled.token_ids_P.tolist()
            if prepared.drafts is not None:
                for first, new, drafts in runs(prepared, tokens):
                    token_ids[prepared.entries_S[first]] = new[: num_new(new, drafts)]
            elif prepared.samples_all:
                token_ids = [[token] for token in tokens]
            else:
                for entry, token in zip(prepared.entries_S, tokens, strict=True):
                    token_ids[entry] = [token]
            values = sampled.logprobs
            if values is not None:
                logprobs = [None] * prepared.num_entries
                for first, run, _ in runs(prepared, list(values)):
                    entry = prepared.entries_S[first]
                    if run[0] is not None:
                        logprobs[entry] = [value for value in run[: len(token_ids[entry])] if value is not None]
        return StepResult(token_ids, logprobs, self._prompt_logprobs, self.drafts)


class StepHandle(Protocol):
    """A step on its way."""

    @property
    def schedule(self) -> Schedule: ...

    def steps(self) -> Steps[StepResult]:
        """Its rest, as a generator; called once. Whatever went wrong is raised here."""
        ...


class Runner:
    """Steps run in the order of `launch`, on one device thread when `threaded`, else where their result is asked for.

    Nothing but the steps touches model, cache, buffers and table, so that no lock is needed. A failed step fails all
    that were launched after it, until `reset`.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: CacheMemory,
        buffers: StepBuffers,
        table: SamplingTable,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        threaded: bool = False,
        capture: Capture | None = None,
        exchange: StepState | None = None,
        readback: Readback | None = None,
        passes: MtpPasses | None = None,
    ) -> None:
        """exchange: is told of every step, and confirms that what it brought is whole. readback: how what was sampled
        comes to the host; a late one wants buffers whose tokens stay on the device. passes: of the layer that
        drafts, which wants tokens at once."""
        assert passes is None or readback is None or not readback.late
        self._passes = passes
        self._readback = readback or AtOnce()
        self._unnoted: Landing | None = None  # its tokens are in no history yet
        self._capture = capture
        self._exchange = exchange or StepState()
        self._model = model
        self._kv = kv
        self._buffers = buffers
        self._table = table
        self._logprobs_mode = logprobs_mode
        self._threads: ThreadPoolExecutor | None = None
        if threaded:
            begin = partial(use_device, kv.device)
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="device", initializer=begin)
        self._failure: BaseException | None = None

    def launch(self, schedule: Schedule, hooks: Sequence[StepHook] = (), num_ubatches: int = 1) -> StepHandle:
        """Start a step (zero tokens are fine: it then only serves the others' exchanges). num_ubatches: all ranks
        compute it in so many parts, which take turns."""
        if self._threads is None:
            return _Inline(schedule, self, hooks, num_ubatches)
        return _Threaded(schedule, self._threads.submit(self._run, schedule, hooks, num_ubatches))

    def steps(self, schedule: Schedule, hooks: Sequence[StepHook] = (), num_ubatches: int = 1) -> Steps[StepResult]:
        """The step itself. May be resumed from any thread, but by one at a time."""
        steps = self._steps(schedule, hooks, num_ubatches)
        landing = yield from (steps if torch.is_inference_mode_enabled() else _in_inference_mode(steps))
        return landing.result()

    def between(self, work: Callable[[], V]) -> V:
        """Do this after the steps launched and before the next one; its result."""
        return work() if self._threads is None else self._threads.submit(work).result()

    def apart(self, steps: Steps[V]) -> Steps[V]:
        """Compute this after the steps launched and before the next one; its value."""
        if self._threads is None:
            return (yield from _in_inference_mode(steps))
        return self._threads.submit(lambda: drain(_in_inference_mode(steps))).result()

    def warm_up(self) -> None:
        """The ranks have met: capture the graphs anew, if there are to be any. All ranks do this at the same time."""
        if self._capture is not None:
            num_ranks = self._model.parallel.size if self._model.config.num_experts else 1
            with torch.inference_mode():
                self._capture.capture(num_ranks)
                if self._passes is not None:
                    self._passes.capture(num_ranks)

    def reset(self) -> None:
        """After a lost peer: wait for the steps launched, and forget them and how they ended. The next schedule must
        state every row anew (Scheduler.rollback). Raises what a step failed of, unless it was PeerLost."""
        if self._threads is not None:
            self._threads.submit(_nothing).result()  # one thread: whatever came before it is over
        if self._capture is not None:
            self._capture.forget()
        if self._passes is not None:
            self._passes.forget()
        self._unnoted = None
        failure, self._failure = self._failure, None
        if failure is not None and not isinstance(failure, PeerLost):
            raise failure

    def close(self) -> None:
        """Waits for the steps launched."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)

    def _run(self, schedule: Schedule, hooks: Sequence[StepHook], num_ubatches: int) -> Landing:
        if self._failure is not None:
            raise RuntimeError("an earlier step failed") from self._failure
        try:
            with torch.inference_mode():
                landing = drain(_in_inference_mode(self._steps(schedule, hooks, num_ubatches)))
                if not self._readback.late:
                    landing.result()
                return landing
        except BaseException as error:
            self._failure = error
            raise

    def _steps(self, schedule: Schedule, hooks: Sequence[StepHook], num_ubatches: int) -> Steps[Landing]:
        alive.place(alive.COMPUTING, schedule.agreed_step, _PREPARING)
        for hook in hooks:
            hook.begin(schedule)
        if self._unnoted is not None and (not self._table.has_history or self._unnoted.arrival.done()):
            self._note()  # before rows go to others, as they may when the results are known
        for row in schedule.freed_rows:
            self._table.clear(row)
        for new in schedule.new_rows:
            self._table.set(new.row, new)
        self._exchange.begin(schedule.most_tokens)
        prepared = self._lay_out(schedule, num_ubatches)
        for hook in hooks:
            hook.before()
        _ended(hooks, Kind.PREPARING, schedule.num_tokens)
        whole = None  # tokens and drafts, where they came with the forward pass
        own = self._exchange.vocab is None and schedule.resumed is None  # it computes all of its step, and alone
        if self._passes is not None and schedule.draft_depth and self._table.all_greedy and own:
            whole = yield from self._passes.whole(schedule, prepared)
        hidden_TD = None if whole is not None else (yield from self._forward(prepared))
        _ended(hooks, Kind.FORWARD, schedule.num_tokens)
        alive.place(alive.COMPUTING, schedule.agreed_step, _BALANCING)
        for hook in hooks:
            yield from hook.after()
        if not all(hook.watches for hook in hooks):
            _ended(hooks, Kind.BALANCING, 0)
        alive.place(alive.COMPUTING, schedule.agreed_step, _SAMPLING)
        head = None if hidden_TD is None else self._head(prepared, hidden_TD, schedule.most_tokens)
        confirm = self._exchange.seal()
        if prepared.prompt_parts or not self._readback.late:
            confirm()  # before anything is read: reading waits for the device without a bound
            self._buffers.computed(schedule)
        sampled = None
        if head is not None and prepared.num_sampled:
            sampled = self._sample(prepared, head, confirm)
        arrival = self._readback.fetch(() if sampled is None else sampled.tensors)
        logprobs = None if head is None else head.prompt_logprobs(prepared, self._logprobs_mode, self._table)
        landing = Landing(prepared, confirm, arrival, sampled, logprobs)
        if sampled is not None:
            self._unnoted = landing
            if not self._readback.late:
                self._note()
        elif whole is not None:  # the kernels have told the buffers of a verification, and no row has a history
            if prepared.drafts is None:
                self._buffers.write_tokens(prepared, whole.tokens_T[: prepared.num_sampled])
            landing.brought = StepResult(whole.token_ids, None, None, whole.drafts)
        _ended(hooks, Kind.SAMPLING, prepared.num_sampled)
        if whole is not None:
            landing.drafts = whole.drafts
        elif self._passes is not None and hidden_TD is not None and schedule.draft_depth:
            self._exchange.begin(schedule.most_tokens)
            tokens_P = prepared.logits_rows_P[:0] if sampled is None else sampled.token_ids_P
            landing.drafts = yield from self._passes.steps(schedule, prepared, hidden_TD, tokens_P)
            self._exchange.seal()()
        if landing.drafts is not None:
            _ended(hooks, Kind.DRAFTING, sum(map(len, landing.drafts)))
        return landing

    def _lay_out(self, schedule: Schedule, num_ubatches: int) -> PreparedStep:
        """Graphs begin at the embedding."""
        if schedule.resumed is not None:
            return schedule.resumed.laid_out(self._buffers.fill(schedule))
        return self._buffers.fill(schedule, num_ubatches, None if self._capture is None else self._capture.choose)

    def _forward(self, prepared: PreparedStep) -> Steps[Tensor]:
        """The hidden states of all parts, one after another.

        Parts read what earlier ones have written to the cache, as the rest of a prompt does. Each layer writes before
        it attends, all parts yield equally often, and `weave` gives the earlier one its turn first: so in every layer
        the earlier part has written when the later one attends.
        """
        if self._capture is not None:
            return (yield from self._capture.steps(prepared))
        if len(prepared.inputs) == 1:
            return (yield from self._model.steps(prepared.inputs[0], self._kv))
        parts = [self._model.steps(step, self._kv, lane) for lane, step in enumerate(prepared.inputs)]
        return torch.cat((yield from weave(*parts)))

    def _head(self, prepared: PreparedStep, hidden_TD: Tensor, most_tokens: int) -> StepHead:
        """Of the rows that are sampled. A rank that has none may have a part in the others'. Raises PeerLost."""
        hidden_SD = hidden_TD
        if not prepared.samples_all:
            hidden_SD = hidden_TD[prepared.logits_rows_P[: prepared.num_sampled]]
        together_SV = self._exchange.logits(hidden_SD, self._model.logits_part, most_tokens)
        return StepHead(self._model, hidden_TD, hidden_SD, together_SV)

    def _sample(self, prepared: PreparedStep, head: StepHead, confirm: Confirm) -> Sampled:
        """The next step finds the tokens in the buffers. Reads nothing on the host, unless confirmed."""
        if self._table.all_greedy:
            sampled = Sampled(head.greedy_tokens(self._table.num_valid_tokens), None)
            self._buffers.write_tokens(prepared, sampled.token_ids_P)
            return sampled
        self._note()
        drafts = [] if prepared.drafts is None or not self._table.has_history else drafts_before(prepared)
        sampling = self._table.gather(prepared.rows_S.tolist(), prepared.positions_S.tolist(), drafts)
        if sampling.needs:
            if reads_on_the_host(sampling, self._logprobs_mode):
                confirm()
            sampled = sample(head.logits(), sampling, self._logprobs_mode)
        else:
            sampled = Sampled(head.greedy_tokens(sampling.num_valid_tokens), None)
        self._buffers.write_tokens(prepared, sampled.token_ids_P)
        return sampled

    def _note(self) -> None:
        """Histories learn the tokens of the last step that sampled; only rows that have one wait for them."""
        landing, self._unnoted = self._unnoted, None
        if landing is not None and self._table.has_history:
            self._table.note(*landing.drawn())


def _ended(hooks: Sequence[StepHook], kind: Kind, num_tokens: int) -> None:
    for hook in hooks:
        hook.ended(kind, num_tokens)


def _nothing() -> None:
    """A step that only has to have its turn."""


class _Inline:
    def __init__(self, schedule: Schedule, runner: Runner, hooks: Sequence[StepHook], num_ubatches: int) -> None:
        self.schedule = schedule
        self._runner = runner
        self._hooks = hooks
        self._num_ubatches = num_ubatches

    def steps(self) -> Steps[StepResult]:
        return self._runner.steps(self.schedule, self._hooks, self._num_ubatches)


class _Threaded:
    def __init__(self, schedule: Schedule, future: Future[Landing]) -> None:
        self.schedule = schedule
        self._future = future

    def steps(self) -> Steps[StepResult]:
        yield
        # Every wait within the step is bounded (ep/protocol.py), so these are too. The next step may be queued
        # meanwhile.
        return self._future.result().result()


def _in_inference_mode(steps: Steps[V]) -> Steps[V]:
    """Entered anew for every turn, because the mode belongs to the thread and others take turns on it between ours.

    A caller that drains the whole step enters it once around all turns instead: entering costs tens of microseconds.
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
