"""The process of a rank in fake time, which runs the real Rank."""

from __future__ import annotations

import functools
import signal
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from cache.manager import PAGED
from configs.engine import Plan
from dbo.steps import Steps
from engine.build import _scheduler
from engine.process.rank_loop import WEIGHTS_SECONDS
from engine.rank import Rank
from engine.recovery.reading import Reading
from engine.scheduler import Scheduler
from engine.team import Opening as OpeningProtocol
from engine.team import Team
from ep.protocol import PeerLost
from ep.transport.group import LocalGroup
from eplb.repair import SlotUpdate
from front.messages import (
    EXIT_WEIGHTS,
    FrontToRank,
    Membership,
    Outputs,
    RankFailed,
    RankReady,
    RankToFront,
    TokenOutput,
    Waiting,
)
from launch.signs import Signs
from tests.simulation.disk import SimReading
from tests.simulation.fakes import FakePopen
from tests.simulation.house import House
from tests.simulation.standin import VOCABULARY, StandIn, StandInRunner
from tests.simulation.transport import Channel, Exchange, LocalLane, Opening, SimGroup
from tests.simulation.world import Violation

BEAT_SECONDS = 0.25  # engine/process/heartbeat.py
SLEEP_SECONDS = 10.0  # longer than that of engine/process/rank_loop.py, so that a call that wakes no rank is found out


class SimBell:
    """engine.rank.Doorbell: what was rung while a rank was away waits for it, as on a socket that connects again."""

    def __init__(self, process: RankProcess) -> None:
        self._process = process
        self.rings: list[int] = []

    def ring(self, generation: int) -> None:
        self._process.ring(generation)

    def heard(self, generation: int) -> bool:
        heard = generation in self.rings
        self.rings.clear()
        return heard


class RankProcess:
    """What engine/process/rank_loop.py does around a Rank, one event at a time.

    Between two events it may be killed or stopped. A turn of the rank's generator ends where it would wait for others.
    """

    def __init__(self, house: House, plan: Plan, rank_id: int, joins: bool) -> None:
        self.house = house
        self.plan = plan
        self.world = house.world
        self.rank_id = rank_id
        self.joins = joins
        house.next_pid += 1
        self.popen = FakePopen(house.next_pid, lambda: self._fenced())
        self.up = Channel(self.world, house.delays, house.hear)
        self.inbox: list[FrontToRank] = []
        self.bell = SimBell(self)
        self.bells: dict[int, Channel] = {}
        self.reaches: Sequence[int] = range(plan.data_parallel_size)  # whom it rings
        self.connected = False  # the front reaches it
        self.alive = True
        self.stopped = False
        self.stopped_since = 0.0
        self.hung = (
            ""  # its loop stands still for ever: "hang", and so does its heartbeat; "aloof": and its heartbeat goes on
        )
        self.busy_until = 0.0  # its loop stands still, in one long operation
        self.still_since = 0.0  # then
        self.frozen: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.beats_since = -1.0
        self.loading_since = -1.0
        self.waits_for: Exchange | None = None
        self.openings: list[Opening] = []
        self.rank: Rank | None = None
        self.model: StandIn | None = None
        self.scheduler: Scheduler | None = None
        self.team: Team | None = None
        self._steps: Steps[list[TokenOutput]] | None = None
        self._was_asleep = True
        self._next = 0  # the number of the event that resumes it; others are out of date
        self._next_when = 0.0
        self._sleeping = False
        self._waits_until = -1.0
        self._call(self.world.now + self.world.between(0.05, 0.2), self._build)

    @property
    def pid(self) -> int:
        return self.popen.pid

    # ---- its life ----

    def _call(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self.world.at(when, self._do, call, arguments)

    def _do(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.stopped:
            self.frozen.append((call, arguments))
        elif self.alive:
            call(*arguments)

    def kill(self) -> None:
        self._end(-signal.SIGKILL)

    def _fenced(self) -> None:
        """The monitor kills it."""
        if self.alive:
            self.house.on_fence(self)
        self.kill()

    @property
    def gets_on(self) -> bool:
        """Its loop does, or will."""
        return not self.stopped and not self.hung

    @property
    def busy(self) -> bool:
        return self.busy_until > self.world.now and not self.hung

    def hang(self, how: str) -> None:
        if not self.busy:
            self.still_since = self.world.now
        self.hung = how

    def work(self, seconds: float) -> None:
        self.still_since, self.busy_until = self.world.now, self.world.now + seconds

    @property
    def in_lockstep(self) -> bool:
        """Other ranks wait for it now, or will in a moment."""
        team = self.team
        alone = team is None or not team.working or len(team.live) < 2
        return not alone and self.rank is not None and not self.rank.idle

    def cut(self) -> None:
        """What it sends in exchanges of this epoch reaches none of the others; one that is in no epoch sends nothing."""
        if self.team is None or self.team._groups is None:
            return
        for group in self.team._groups:
            cast(SimGroup, group).net.cut.add(cast(SimGroup, group).rank)

    def signs(self) -> Signs:
        """As the kernel would tell them (launch/signs.py)."""
        works = self.busy and not self.stopped
        return Signs(self.world.now if works else 0.0, works)

    def stop(self) -> None:
        if self.alive and not self.stopped:
            self.stopped, self.stopped_since = True, self.world.now
            for channel in (self.up, *self.bells.values()):
                channel.cut(keep=True)

    def go_on(self) -> None:
        if self.alive and self.stopped:
            self.stopped = False
            frozen, self.frozen = self.frozen, []
            for channel in (self.up, *self.bells.values()):
                channel.go_on()
            for call, arguments in frozen:
                self.world.at(self.world.now, self._do, call, arguments)

    def _end(self, code: int) -> None:
        if not self.alive:
            return
        self.alive = self.stopped = self.connected = False
        self.popen.exit_code = code
        self.world.interrupted = True
        for channel in (self.up, *self.bells.values()):
            if code < 0:
                channel.cut()
        for opening in self.openings:
            opening.meeting.go(opening, died=True)
        self._steps = None
        if self.house[self.rank_id] is self:
            self.house[self.rank_id] = None

    def last_beat(self, since: float) -> bytes | None:
        """What the heartbeat that began then has written."""
        if since < 0:
            return None
        last = self.stopped_since if self.stopped else self.world.now
        if since == self.beats_since and (self.hung == "hang" or self.busy):  # this one comes from the loop
            last = min(last, self.still_since)
        beat = since + int((last - since) / BEAT_SECONDS) * BEAT_SECONDS
        return struct.pack("=d", beat)

    # ---- its start ----

    def _build(self) -> None:
        """As engine/build.py: the ranks of the first epoch begin to meet before they load."""
        house, plan = self.house, self.plan
        self.house.watch("starts", self.rank_id)
        self.loading_since = self.world.now
        placement = house.placement(plan.data_parallel_size)
        self.model = StandIn(house.facts, self.rank_id, placement)
        self.team = Team(
            self.rank_id,
            plan.data_parallel_size,
            placement,
            cast(Any, self.model),
            7,
            self._meet,
            cast(Any, _lanes),
            self._read,
            clock=self.world.clock,
        )
        self.scheduler = _scheduler(plan, PAGED, VOCABULARY, torch.device("cpu"), None)
        runner = StandInRunner(self.model, plan.num_kv_blocks, plan.block_size)
        ready = RankReady(
            rank=self.rank_id,
            num_blocks=plan.num_kv_blocks,
            block_size=plan.block_size,
            max_model_len=plan.max_model_len,
            vocab_size=VOCABULARY,
            load_seconds=0.0,
            bytes_read=0,
            process=self.pid,
        )
        if not self.joins:
            self.team.begin(0, (True,) * plan.data_parallel_size)
        clock = self.world.clock
        self.rank = Rank(self.scheduler, self.team, runner, self.bell, ready, plan.exchange_timeout, clock)
        self._call(self.world.now + self.world.between(0.0, 0.05), self._connect)
        self._call(self.world.now + self.world.between(*house.delays.load) * self._slowness(), self._loaded)

    def _wait_for_weights(self, trouble: str) -> None:
        if self._waits_until < 0:
            self._waits_until = self.world.now + WEIGHTS_SECONDS
            self.send(Waiting(self.rank_id, trouble))
        if self.world.now > self._waits_until:
            self.send(RankFailed(self.rank_id, trouble))
            self._end(EXIT_WEIGHTS)
            return
        self._call(self.world.now + self.world.between(0.1, 1.0), self._loaded)

    def _meet(self, epoch: int, index: int, size: int) -> OpeningProtocol:
        self.house.watch("meets", self.rank_id)
        return Opening(self.house.meeting(epoch, size), index, self)

    def _read(self, updates: Sequence[SlotUpdate]) -> Reading:
        if updates:
            self.house.watch("reads", self.rank_id)
        return SimReading(self.house.disk, updates, self.world)

    def _connect(self) -> None:
        """The sockets: the front's and the doorbells'."""
        self.connected = True
        rings, self.house.rings[self.rank_id] = self.house.rings[self.rank_id], []
        self.bell.rings += rings

    def _loaded(self) -> None:
        """As engine/process/rank_loop.py: a rank that was started again waits for its weights, and ends when they do not come."""
        assert self.rank is not None
        trouble = self.house.disk.trouble
        if self.joins and trouble:
            self._wait_for_weights(trouble)
            return
        self.house.watch("loaded", self.rank_id)
        self.beats_since = self.world.now
        self.send(self.rank.ready)
        self._loop()

    # ---- its loop ----

    def _slowness(self) -> float:
        return 40.0 if self.house.slow_until[self.rank_id] > self.world.now else 1.0

    def wake(self, when: float) -> None:
        """Go on at that time, unless it is to go on before."""
        if when < self._next_when or self._next_when < self.world.now:
            self._resume_at(when)

    def _resume_at(self, when: float) -> None:
        self._next += 1
        self._next_when = when
        self.world.at(when, self._do, self._resume, (self._next,))

    def _resume(self, number: int) -> None:
        if number != self._next or self.hung:
            return
        if self.busy:
            self._resume_at(self.busy_until)
            return
        self._next_when = -1.0
        if self._steps is None:
            self._sleeping = False
            self._loop()
        elif self.waits_for is None or self.waits_for.over():
            self._advance()

    def _loop(self) -> None:
        rank = self.rank
        assert rank is not None
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            if isinstance(message, Membership):
                self._reach([other for other, lives in enumerate(message.alive) if lives])
            rank.submit(message)
        self._steps = rank.steps()
        self._advance()

    def _advance(self) -> None:
        """One turn of the step."""
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration as done:
            self._steps = None
            self._after_step(done.value)
            return
        except (PeerLost, Exception) as error:
            self._fail(error)
            return
        if self.waits_for is None:
            self._resume_at(self.world.now + 0.00001)
        elif self.waits_for.over():
            self._resume_at(self.world.now)

    def _fail(self, error: Exception) -> None:
        """As rank_loop._report: the front is told, and the process ends."""
        code = 4 if isinstance(error, PeerLost) else 3
        self.house.ended.append(f"rank {self.rank_id} ended with {code}: {type(error).__name__}: {error}")
        if isinstance(error, Violation | AssertionError):
            raise error
        self.send(RankFailed(self.rank_id, f"rank {self.rank_id}: {error}"))
        self._end(code)

    def _after_step(self, outputs: Sequence[TokenOutput]) -> None:
        rank = self.rank
        assert rank is not None
        joined = rank.take_joined()
        if joined is not None:
            self.house.watch("joined", self.rank_id)
            self.send(joined)
        for news in rank.take_events():
            self.send(news)
        if outputs or rank.idle != self._was_asleep:
            self.send(Outputs(self.rank_id, list(outputs), rank.stats, self.world.now))
        self._was_asleep = rank.idle
        for news in rank.take_events():
            self.send(news)
        if rank.done:
            rank.close()
            self._end(0)
            return
        pause = rank.pause(SLEEP_SECONDS)
        if pause > 0 and not self.inbox and not self.bell.rings:
            self._sleeping = True
            if self._opens():
                self._next_when = -1.0  # `on_opened` and `hear` wake it; it looks every 2 ms, and finds nothing before
            else:
                self._resume_at(self.world.now + pause)
        else:
            self._resume_at(self.world.now + self.world.between(*self.house.delays.step) * self._slowness())

    def _opens(self) -> bool:
        opening = self.openings[-1] if self.openings else None
        return self.team is not None and self.team.opening and opening is not None and not opening.done()

    def on_opened(self, opening: Opening) -> None:
        self.house.watch("opened", self.rank_id)
        if self._sleeping:
            self.wake(self.world.now + self.world.between(0.0, 0.002))

    # ---- messages ----

    def send(self, message: RankToFront) -> None:
        self.up.send(message)

    def hear(self, message: FrontToRank) -> None:
        """From the front's socket."""
        if self.alive:
            if self.world.tells:
                self.world.tell(f"  rank {self.rank_id} gets {message!r}"[:150])
            self.inbox.append(message)
            self._called()

    def _called(self) -> None:
        if self._sleeping:
            self.wake(self.world.now)

    def ring(self, generation: int) -> None:
        for other in self.reaches:
            if other == self.rank_id:
                continue
            if other not in self.bells:
                self.bells[other] = Channel(self.world, self.house.delays, functools.partial(self._rung, other))
            self.bells[other].send(generation)

    def _reach(self, others: Sequence[int]) -> None:
        """front.wire.ZmqDoorbell.reach."""
        self.reaches = others
        for other in list(self.bells):
            if other not in others:
                self.bells.pop(other).closed = True

    def _rung(self, other: int, generation: int) -> None:
        there: RankProcess | None = self.house[other]
        if there is None or not there.connected:
            self.house.rings[other].append(generation)
            return
        there.bell.rings.append(generation)
        there._called()


def _lanes(group: object, num_slots: int, hidden_size: int) -> Sequence[Any]:
    if isinstance(group, LocalGroup):
        return [LocalLane()]
    assert isinstance(group, SimGroup)
    return [group]
