"""A rank: its requests, its scheduler, its model, and the lockstep with the other ranks (docs/design.md, D3 and 4).

`Rank.steps()` is a generator, so that `drain` makes a process of it and `weave` a whole cluster in one thread.

Sleep: when a step's record says that no rank has work, all leave the lockstep together and sleep. One that gets
work rings every other rank before it proposes the next step. A ring carries the number of sleeps so far, the same on
all ranks; so a ring that was meant for a sleep that is already over is not taken for a new one.

Epochs: see engine/team.py, and docs/surviving.md for the whole.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from dbo.steps import Steps, drain
from engine.agreement import Proposal, StepPlan
from engine.doorbell import Doorbell
from engine.hooks import LOOK_SECONDS, Companions, Lesson, StepCompanion
from engine.overlap.policy import Overlap
from engine.rebalance.follower import refuse
from engine.runner import Runner, StepHandle
from engine.schedule import Schedule
from engine.scheduler import Scheduler
from engine.team import Team
from engine.timeline import Timeline
from ep.protocol import PeerLost
from front.messages import (
    Abort,
    AddRequest,
    BalanceCommand,
    EpochLost,
    FrontToRank,
    Joined,
    Membership,
    ProfileCommand,
    RankReady,
    RankStats,
    RankToFront,
    ResetPrefixCache,
    Shutdown,
    TokenOutput,
    Waiting,
)

log = logging.getLogger("moesaic.rank")

FENCE_SECONDS = 10.0  # for the one that hangs to be found and killed, whatever a rank's patience is


class Rank:
    """Not thread-safe: one thread submits and steps.

    A lost peer (PeerLost out of any wait) ends the epoch for this rank: steps in flight are forgotten, requests and
    their cache stay, and `step` does nothing until a Membership of a higher epoch comes. Then the live ones meet again
    and go on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        team: Team,
        runner: Runner,
        bell: Doorbell,
        ready: RankReady,
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        companions: Sequence[StepCompanion] = (),
        overlap: Overlap | None = None,
        timeline: Timeline | None = None,
        preparation: Iterator[int] | None = None,
        practice_tokens: int = 1,
        forget_former: Callable[[], None] = lambda: None,
    ) -> None:
        """patience: seconds (and ten more) that a rank which has lost a peer waits to be told who is left. companions:
        what else goes with its steps, in an order that is the same on all ranks. overlap: None: no step is split.
        preparation: what `prepare` does, a little with each number that it gives. practice_tokens: of prompts in a step
        of practice (engine/process/warm_up.py). forget_former: to be called once nobody wants any more what the process
        before this one has left of its cache."""
        self.ready = ready
        self.forget_former = forget_former
        self.practice_tokens = practice_tokens
        self._scheduler = scheduler
        self._team = team
        self._runner = runner
        self._bell = bell
        self._patience = patience
        self._clock = clock
        self._timeline = timeline or Timeline(ready.rank)
        self._overlap = overlap
        self._companions = Companions([*companions, self._timeline, *([] if overlap is None else [overlap])])
        self._preparation = iter(()) if preparation is None else preparation
        self._pipelined = scheduler.async_depth > 0
        self._in_flight: StepHandle | None = None  # the step that runs while the next one is scheduled (pipelined only)
        self._inference = torch.inference_mode()
        self._early: list[TokenOutput] = []  # outputs that need no step
        self._shutdown = False  # told to leave
        self._done = False  # has left, with all others
        self._failed = False  # a step was left half way: what scheduler and device know no longer fits together
        self._idle = True  # at first too: ranks that load for different times do not wait for each other in a step
        self._sleep = 0  # epoch and number of the sleep: equal on all ranks
        self._wanted: Membership | None = None  # the newest, when it is newer than the team's
        self._loss: tuple[PeerLost, float] | None = None  # and until when a Membership may come
        self._formed: Joined | None = None  # becomes _joined when the first record of the epoch is agreed on
        self._joined: Joined | None = None
        self._events: list[RankToFront] = []
        self._waits_for = ""  # what the front knows of it
        # Called with the number of ranks that are alive, before the first step of an epoch.
        self.on_formed: Callable[[int], object] = lambda num_ranks: None

    @property
    def done(self) -> bool:
        """All ranks have left for good, as a Shutdown message told one of them."""
        return self._done

    @property
    def idle(self) -> bool:
        """Nothing to do until a message or a ring comes; `step` then returns at once."""
        return self._idle

    @property
    def has_work(self) -> bool:
        own = self._scheduler.has_unfinished or self._in_flight is not None or self._shutdown
        return own or self._companions.has_work

    @property
    def stats(self) -> RankStats:
        stats = self._scheduler.stats()
        for companion in self._companions.members:
            stats = companion.add_to(stats)
        return stats

    @property
    def forming(self) -> bool:
        """The ranks of an epoch are about to meet; `step` goes on with it."""
        return self._team.opening

    @property
    def serving(self) -> bool:
        """It has met the others of this epoch, and has lost none of them."""
        return self._team.working

    @contextlib.contextmanager
    def practising(self, alone: bool) -> Iterator[None]:
        """What is computed meanwhile counts for nothing and is forgotten; requests have ended by then. alone:
        without the others, as long as it has not met them."""
        overlap, self._overlap, self._companions.muted = self._overlap, None, True
        if alone:
            self._team.work_alone()
            self._idle = False
        yield
        self._overlap, self._companions.muted = overlap, False
        if alone:
            self._team.stop_alone()
            self._idle, self._in_flight = True, None
            self._runner.reset()
            self._scheduler.rollback()
        self._scheduler.kv.reset_prefix_cache()
        self._scheduler.forget_counts()
        self._scheduler.kv.forget_counts()

    def lessons(self) -> Iterator[Lesson]:
        """What its companions want to be practised."""
        return (lesson for companion in self._companions.members for lesson in companion.lessons())

    def pause(self, longest: float) -> float:
        """Seconds for which there is nothing to do, unless a message or a ring comes; at most `longest`."""
        if self._done:
            return 0.0
        if self._wanted is not None and self._may_change(self._wanted):  # it came before the ranks fell asleep
            return 0.0
        if self._team.opening:
            return min(longest, self._team.look_seconds)
        if not self._team.working and not self._shutdown:
            return longest if self._loss is None else max(0.0, min(longest, self._loss[1] - self._clock()))
        if not self._idle or self.has_work:
            return 0.0
        return min(longest, LOOK_SECONDS) if self._companions.busy else longest

    def prepare(self) -> bool:
        """A moment's work for requests to come, to be done while there is nothing else to do. False: none was left, or
        the others are waited for: what then begins would still take time from the first step that they do together."""
        return self._team.working and next(self._preparation, 0) > 0

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
            self._scheduler.kv.reset_prefix_cache()
        elif isinstance(message, Membership):
            if message.epoch > (self._team.epoch if self._wanted is None else self._wanted.epoch):
                self._wanted = message
        elif isinstance(message, ProfileCommand):
            self._events += self._runner.between(partial(self._timeline.obey, message))
        elif isinstance(message, Shutdown):
            self._shutdown = True
        elif not any(companion.take(message) for companion in self._companions.members):
            assert isinstance(message, BalanceCommand)
            self._events.append(refuse(message, "experts are not balanced (--enable-eplb)"))

    def take_joined(self) -> Joined | None:
        """Once for every epoch but the first: this rank serves again."""
        joined, self._joined = self._joined, None
        return joined

    def take_events(self) -> list[RankToFront]:
        """What else is to be told to the front."""
        events, self._events = self._events, []
        for companion in self._companions.members:
            events += companion.take_events()
        return events

    def step(self) -> list[TokenOutput]:
        """One step to its end. Raises PeerLost when another rank is gone and the front does not say who is left,
        RuntimeError when this one disagrees with the others."""
        if torch.is_inference_mode_enabled():
            return drain(self.steps())
        with self._inference:
            return drain(self.steps())

    def steps(self) -> Steps[list[TokenOutput]]:
        """One step: schedule, agree, compute, and what came out. Pipelined, what came out of the step before."""
        if self._failed:
            raise RuntimeError("this rank cannot go on: an earlier step failed or was interrupted")
        if self._loss is not None and self._wanted is None and self._clock() > self._loss[1]:
            raise self._loss[0]
        self._failed = True
        try:
            outputs = yield from self._step()
        except PeerLost as loss:
            self._lose(loss)
            outputs = []
        self._failed = False
        return outputs

    def _step(self) -> Steps[list[TokenOutput]]:
        if self._wanted is not None and self._may_change(self._wanted):
            self._change(self._wanted)
        if self._done or not (self._team.working or (yield from self._form())):
            return self._take_early()
        if self._idle:
            if self.has_work:
                self._bell.ring(self._sleep)
            yield  # in a weave the others ring now
            if not self.has_work and not self._bell.heard(self._sleep):
                return self._take_early()
            self._idle = False
        companions = self._companions
        companions.scheduling()
        schedule = self._scheduler.schedule()
        num_tokens = schedule.num_tokens
        words = companions.propose(schedule)
        known_epoch = self._team.epoch if self._wanted is None else self._wanted.epoch
        free_blocks = self._scheduler.kv.num_free_blocks
        parts = 1 if self._overlap is None else self._overlap.propose_parts(schedule, num_tokens)
        agreed = self._team.agreement.propose(
            Proposal(num_tokens, self.has_work, self._shutdown, free_blocks, known_epoch, parts, words)
        )
        yield
        plan = agreed.wait()
        companions.agreed(plan)
        if self._formed is not None:
            self._joined, self._formed = self._formed, None
        if plan.shutdown:
            self._leave()
        elif plan.known_epoch > self._team.epoch:
            outputs = yield from self._land()
            assert self._wanted is not None
            self._change(self._wanted)
            return self._take_early() + outputs
        elif plan.busy:
            return (yield from self._compute(schedule, plan))
        elif (overlap := self._overlap) is not None and overlap.to_be_measured(companions.said(overlap, plan)):
            yield from overlap.measure(self._team.experts_group)
        else:
            self._idle = True
            self._sleep += 1
        return self._take_early()

    def close(self) -> None:
        """Wait for a step that still runs, end the device thread, and leave the other ranks."""
        self._runner.close()
        self._scheduler.grammars.close()
        self._team.close()
        for companion in self._companions.members:
            companion.close()

    # ---- who takes part ----

    def _may_change(self, wanted: Membership) -> bool:
        """At once, or (no rank is lost, and steps are under way) when all ranks have heard of it?"""
        return not self._team.working or self._idle or not all(wanted.alive[rank] for rank in self._team.live)

    def _change(self, wanted: Membership) -> None:
        """The epoch is over: begin the wanted one."""
        if self._team.working:
            self._drop_steps()
        self._wanted = self._loss = self._formed = None
        if not wanted.alive[self.ready.rank]:
            log.info("epoch %d goes on without this rank", wanted.epoch)
            self._leave()
        else:
            self._team.begin(wanted.epoch, wanted.alive)

    def _form(self) -> Steps[bool]:
        """Go on with the epoch that has begun. False: it takes more time, or there is none."""
        if self._team.epoch > 0 or not self._team.opening:  # in the first epoch others may be quicker than this rank
            self._bell.heard(-1)  # rings of an epoch that is over
        if self._shutdown and (not self._team.opening or self._waits_for):
            self._leave()
        if self._done or not self._team.opened:
            return False
        joined = yield from self._team.form()
        self._say_trouble()
        if joined is None:
            return False
        self._runner.warm_up()
        if self._overlap is not None:
            yield from self._overlap.begin(self._team.experts_group, joined.epoch > 0)
            self._idle = self._idle and not self._overlap.waits
        self.on_formed(self._team.num_alive)
        for companion in self._companions.members:
            companion.formed()
        if joined.epoch > 0:
            self._formed = joined
            self._idle = False  # all are here: the first record follows at once, and proves that all have the same
            self._sleep = joined.epoch << 32
            log.info("epoch %d: ranks %s, %d expert(s) read", joined.epoch, self._team.live, joined.experts_loaded)
        return True

    def _say_trouble(self) -> None:
        """The front is told when this rank begins to wait for weights, and when it does not any more."""
        trouble = self._team.trouble
        if trouble != self._waits_for:
            self._waits_for = trouble
            self._events.append(Waiting(self.ready.rank, trouble))

    def _lose(self, loss: PeerLost) -> None:
        log.warning("epoch %d: lost rank(s) %s: %s", self._team.epoch, self._team.names(loss), loss.reason)
        self._loss = (loss, self._clock() + self._patience + FENCE_SECONDS)
        self._events.append(EpochLost(self.ready.rank, self._team.epoch, loss.reason))
        self._drop_steps()

    def _drop_steps(self) -> None:
        """Leave the others, and forget every step whose tokens are not out: it is computed again in the next epoch."""
        self._team.close()  # the device thread learns of it too
        self._in_flight = None
        self._runner.reset()
        self._scheduler.rollback()
        for companion in self._companions.members:
            companion.dropped()

    def _leave(self) -> None:
        self._done = True
        self._in_flight = None  # its tokens are dropped with the requests

    # ---- one step ----

    def _compute(self, schedule: Schedule, plan: StepPlan) -> Steps[list[TokenOutput]]:
        hooks = self._companions.join(plan)
        schedule.most_tokens, schedule.agreed_step = max(plan.num_tokens), plan.step
        runs = plan.runs or any(hook.needed for hook in hooks)
        self._team.agreement.passes += runs
        handle = self._runner.launch(schedule, hooks, plan.parts) if runs else None
        if self._pipelined:
            handle, self._in_flight = self._in_flight, handle
        outputs = [] if handle is None else (yield from self._result(handle))
        return self._take_early() + outputs

    def _land(self) -> Steps[list[TokenOutput]]:
        """What the step that still runs brings."""
        handle, self._in_flight = self._in_flight, None
        return [] if handle is None else (yield from self._result(handle))

    def _result(self, handle: StepHandle) -> Steps[list[TokenOutput]]:
        result = yield from handle.steps()
        if not handle.schedule.rows:
            return []
        prompts, drafts = result.prompt_logprobs, result.drafts
        return self._scheduler.update(handle.schedule, result.token_ids, result.logprobs, prompts, drafts)

    def _take_early(self) -> list[TokenOutput]:
        outputs, self._early = self._early + self._scheduler.refused, []
        self._scheduler.refused = []
        return outputs
