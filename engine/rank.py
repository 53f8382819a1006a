"""A rank: its requests, its scheduler, its model, and the lockstep with the other ranks (docs/design.md, D3 and 4).

`Rank.steps()` is a generator, so that `drain` makes a process of it and `weave` a whole cluster in one thread.

Sleep: when a step's record says that nobody has work, all ranks leave the lockstep together and sleep. Whoever gets
work rings every other rank before it proposes the next step. A ring carries the number of sleeps so far, the same on
all ranks; so a ring that was meant for a sleep that is already over is not taken for a new one.
"""

from __future__ import annotations

import functools
import logging
import queue
import time
import zlib
from collections.abc import Callable
from typing import Protocol

import torch

from configs.engine import Plan
from dbo.steps import Steps, drain
from engine.agreement import Agreement, StepPlan, Wish
from engine.batch import Batch
from engine.messages import (
    Abort,
    AddRequest,
    FrontToRank,
    Outputs,
    RankReady,
    RankStats,
    RankToFront,
    ResetPrefixCache,
    TokenOutput,
)
from engine.runner import Flight, Runner
from engine.sampling_table import SamplingTable
from engine.schedule import Schedule
from engine.scheduler import Scheduler
from ep.group import Group, LocalGroup
from ep.parallel import Parallel
from ep.table import make_lanes
from eplb.placement import linear_placement
from layers.paged_kv import PagedKV
from layers.weights import Checkpoint
from models.base import CausalLM
from models.facts import ModelFacts
from models.registry import build, read_config

log = logging.getLogger("moesaic.rank")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Doorbell(Protocol):
    """Wakes the other ranks (engine/wire.py has the one between processes)."""

    def ring(self, generation: int) -> None: ...

    def heard(self, generation: int) -> bool:
        """Whether somebody has rung for this sleep; older rings are forgotten. Does not wait."""
        ...


class SharedDoorbell:
    """The doorbell of ranks that live in one thread: all of them hold the same object."""

    def __init__(self) -> None:
        self._rung = -1

    def ring(self, generation: int) -> None:
        self._rung = generation

    def heard(self, generation: int) -> bool:
        return self._rung == generation


class Rank:
    """Not thread-safe: one thread submits and steps."""

    def __init__(
        self, scheduler: Scheduler, agreement: Agreement, runner: Runner, bell: Doorbell, ready: RankReady
    ) -> None:
        self.ready = ready
        self._scheduler = scheduler
        self._agreement = agreement
        self._runner = runner
        self._bell = bell
        self._pipelined = scheduler.async_depth > 0
        self._flight: Flight | None = None  # the step that runs while the next one is scheduled (pipelined only)
        self._early: list[TokenOutput] = []  # outputs that need no step
        self._shutdown = False  # told to leave
        self._done = False  # has left, with all others
        self._failed = False  # a step was left half way: what scheduler and device know no longer fits together
        self._asleep = True  # at first too: ranks that load for different times do not wait for each other in a step
        self._num_sleeps = 0

    @property
    def done(self) -> bool:
        """All ranks have left for good, as a Shutdown message told one of them."""
        return self._done

    @property
    def asleep(self) -> bool:
        """Nothing to do until a message or a ring comes; `step` then returns at once."""
        return self._asleep

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_unfinished or self._flight is not None or self._shutdown

    @property
    def stats(self) -> RankStats:
        return self._scheduler.stats()

    def submit(self, message: FrontToRank) -> None:
        """Takes effect with the next step. A request that cannot run is an output with finish_reason "error"."""
        if isinstance(message, AddRequest):
            try:
                output = self._scheduler.add(message)
            except ValueError as error:
                log.error("request %d refused: %s", message.request_id, error)
                output = TokenOutput(message.request_id, [], "error")
            if output is not None:
                self._early.append(output)
        elif isinstance(message, Abort):
            self._scheduler.abort(message.request_ids)
        elif isinstance(message, ResetPrefixCache):
            self._scheduler.reset_prefix_cache()
        else:
            self._shutdown = True

    def step(self) -> list[TokenOutput]:
        """One step to its end. Raises PeerLost when another rank is gone, RuntimeError when the ranks disagree."""
        with torch.inference_mode():
            return drain(self.steps())

    def steps(self) -> Steps[list[TokenOutput]]:
        """One step: schedule, agree, compute, and what came out. Pipelined, what came out of the step before."""
        if self._failed:
            raise RuntimeError("this rank cannot go on: an earlier step failed or was interrupted")
        self._failed = True
        outputs = yield from self._step()
        self._failed = False
        return outputs

    def _step(self) -> Steps[list[TokenOutput]]:
        if self._done:
            return []
        if self._asleep:
            if self.has_work:
                self._bell.ring(self._num_sleeps)
            yield  # in a weave the others ring now
            if not self.has_work and not self._bell.heard(self._num_sleeps):
                return self._take_early()
            self._asleep = False
        schedule = self._scheduler.schedule()
        agreed = self._agreement.propose(
            Wish(schedule.num_tokens, self.has_work, self._shutdown, self._scheduler.kv.num_free_blocks)
        )
        yield
        plan = agreed.wait()
        if plan.shutdown or not plan.busy:
            self._leave(plan)
            return self._take_early()
        return (yield from self._compute(schedule, plan))

    def close(self) -> None:
        """Wait for a step that still runs, and end the device thread."""
        self._runner.close()

    def _leave(self, plan: StepPlan) -> None:
        if plan.shutdown:
            self._done = True
            self._flight = None  # its tokens are dropped with the requests
        else:
            self._asleep = True
            self._num_sleeps += 1

    def _compute(self, schedule: Schedule, plan: StepPlan) -> Steps[list[TokenOutput]]:
        flight = self._runner.launch(schedule) if plan.runs else None
        if self._pipelined:
            flight, self._flight = self._flight, flight
        outputs = self._take_early()
        if flight is not None:
            result = yield from flight.steps()
            if flight.schedule.rows:
                outputs += self._scheduler.update(
                    flight.schedule, result.token_ids, result.logprobs, result.prompt_logprobs
                )
        return outputs

    def _take_early(self) -> list[TokenOutput]:
        outputs, self._early = self._early, []
        return outputs


def build_rank(
    plan: Plan,
    rank: int = 0,
    group: Group | None = None,
    exchange: Group | None = None,
    bell: Doorbell | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Rank:
    """Read the config, build and load the model, allocate the cache.

    group: where the ranks agree; exchange: where tokens travel to experts (with asynchronous scheduling both are in
    use at the same time; a MailboxGroup may be both). None: a single rank. progress(bytes_done, bytes_total).
    Raises ValueError, one line, for a checkpoint or a plan that cannot run.
    """
    began = time.monotonic()
    group, exchange = group or LocalGroup(), exchange or LocalGroup()
    torch.set_num_threads(plan.threads_per_rank)
    device = torch.device(plan.device)
    lanes = functools.partial(make_lanes, plan.all2all_backend, exchange, dtype=DTYPES[plan.dtype])
    facts = read_config(plan.model_path)
    placement = None
    if facts.num_moe_layers:
        placement = linear_placement(
            facts.num_moe_layers, facts.num_experts, plan.data_parallel_size, plan.slots_per_rank
        )
    model, bytes_read = _load(plan, facts, Parallel(rank, plan.data_parallel_size, placement, lanes), device, progress)
    scheduler = Scheduler(
        num_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=plan.enable_prefix_caching,
        enable_chunked_prefill=plan.enable_chunked_prefill,
        policy=plan.scheduling_policy,
        async_depth=int(plan.async_scheduling),
    )
    runner = Runner(
        model,
        PagedKV.allocate(model.kv_spec(), plan.num_kv_blocks, plan.block_size, device),
        Batch(plan.max_num_seqs, plan.max_model_len, plan.block_size, device),
        SamplingTable(plan.max_num_seqs, facts.vocab_size, device),
        plan.logprobs_mode,
        # Ranks that share one thread take turns within a step, so it cannot run on another.
        threaded=plan.async_scheduling and plan.all2all_backend != "mailbox",
    )
    checksum = zlib.crc32(f"{plan.dtype} {facts}".encode()) ^ (0 if placement is None else placement.checksum())
    # Without routed experts no rank needs another: each agrees with itself only.
    agreement = Agreement(LocalGroup() if placement is None else group, epoch=0, checksum=checksum)
    ready = RankReady(
        rank=rank,
        num_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
        max_model_len=scheduler.max_length,
        vocab_size=facts.vocab_size,
        load_seconds=time.monotonic() - began,
        bytes_read=bytes_read,
        reasons=plan.reasons,
    )
    return Rank(scheduler, agreement, runner, bell or SharedDoorbell(), ready)


def _load(
    plan: Plan, facts: ModelFacts, parallel: Parallel, device: torch.device, progress: Callable[[int, int], None] | None
) -> tuple[CausalLM, int]:
    """The model with its weights, and how many bytes of the checkpoint were read."""
    model = build(facts, parallel, DTYPES[plan.dtype], device, plan.mla_prefill)
    checkpoint = Checkpoint(plan.model_path, progress)
    model.load(checkpoint)
    checkpoint.finish()
    return model, checkpoint.bytes_read


class LocalRanks:
    """engine.wire.Ranks for one rank in this process: `receive` runs its steps. `send` may come from another thread."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._inbox: queue.SimpleQueue[FrontToRank] = queue.SimpleQueue()
        self._said_ready = False

    @property
    def size(self) -> int:
        return 1

    def send(self, rank: int, message: FrontToRank) -> None:
        if rank != 0:
            raise ValueError(f"rank {rank} is not in 0..0")
        self._inbox.put(message)

    def receive(self, timeout: float) -> list[RankToFront]:
        """RankReady at first. Then the outputs of the next step that has any; an idle rank waits for a message, at most
        `timeout` seconds. Errors of the rank pass through."""
        if not self._said_ready:
            self._said_ready = True
            return [self._rank.ready]
        deadline = time.monotonic() + timeout
        while not self._rank.done:
            self._drain_inbox()
            outputs = self._rank.step()
            if outputs:
                return [Outputs(0, outputs, self._rank.stats, time.monotonic())]
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not self._rank.has_work:
                try:
                    self._rank.submit(self._inbox.get(timeout=left))
                except queue.Empty:
                    break
        return []

    def close(self) -> None:
        self._rank.close()

    def _drain_inbox(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._rank.submit(message)
