"""One schedule from its start to its end, and what must hold meanwhile."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from ep.protocol import PeerLost
from front.accusations import SILENT_SECONDS
from front.members import State
from front.outputs import Prompt
from front.params import SamplingParams
from launch.monitor import RankMonitor
from launch.supervisor import Supervisor
from tests.simulation import checks
from tests.simulation.fakes import FakeFile, FakePopen, FakeRuntime, SimChildren
from tests.simulation.front_side import Client, FakeRanks, FrontSide
from tests.simulation.house import House
from tests.simulation.processes import RankProcess
from tests.simulation.schedules import DISK, EXCHANGE_TIMEOUT, Fault, Request, Schedule
from tests.simulation.transport import Channel
from tests.simulation.world import Over, Violation, World

STARTUP_TIMEOUT = 60.0
MOST_SECONDS = 400.0  # of fake time: then the server hangs
QUIET_SECONDS = 4.0  # the longest time without a token, when ranks enough serve and nothing has happened to any
LOOK_SECONDS = 0.25


class SimSupervisor(Supervisor):
    """The real loop and the real monitor; its children, its directory and its socket are fakes."""

    def __init__(
        self,
        schedule: Schedule,
        children: SimChildren,
        runtime: FakeRuntime,
        world: World,
        up: Channel,
        ranks: FakeRanks,
    ) -> None:
        self.plan = schedule.plan
        self.server = cast(Any, None)
        self.runtime = cast(Any, runtime)
        self.startup_timeout = STARTUP_TIMEOUT
        self.saw_ready = False
        self.on_ready = self._on_ready
        self.children = children
        self.front = None
        self.signals = {}
        self.stopped_by = 0
        self.ready = False
        self.clock = world.clock
        self.monitor = RankMonitor(
            children, schedule.plan, self.runtime, STARTUP_TIMEOUT, clock=world.clock, signs=ranks.house.signs
        )
        self.reporter = cast(Any, up)
        self.resizes, self.fences = cast(Any, ranks.resizes), cast(Any, ranks.fences)

    def _on_ready(self, url: str) -> None:
        self.saw_ready = True

    def run(self) -> int:
        self.monitor.start()
        self._start_front()
        return self._watch()


class Simulation:
    """`run` raises Violation when something happens that must not."""

    def __init__(self, schedule: Schedule, trace: Callable[[str], None] | None = None) -> None:
        self.schedule = schedule
        self.counts: Counter[str] = Counter()
        self.world = World(schedule.seed, trace)
        self.house = House(self.world, schedule.delays, schedule.plan, schedule.facts, self._heard)
        self.house.watch = self._on_phase
        self.house.on_fence = self._on_fence
        self.front = FrontSide(self.house, self._on_progress, self._on_failed)
        self.front_process = FakePopen(999, lambda: None)
        runtime = FakeRuntime(self._file)
        up = Channel(self.world, schedule.delays, self.front.ranks.hear)
        children = SimChildren(self.world, self._start)
        self.runtime = runtime
        self.supervisor = SimSupervisor(schedule, children, runtime, self.world, up, self.front.ranks)
        self.last_news = 0.0  # when something last happened to a rank, or a client got something
        self.ended = ""  # why the server has ended
        self.crashes: Counter[int] = Counter()  # how often each rank still dies while it loads
        self._blind_until = 0.0
        self._phases: Counter[str] = Counter()
        self._early_phases: Counter[str] = Counter()
        self._fault_times: dict[int, float] = {}
        self._still_until = 0.0  # no token has to come
        self._missing_until = 0.0  # waits of ranks that are well may come to their bound
        self._to_come = 0  # faults and requests that are certain to come
        self._probed = False

    def run(self) -> None:
        self.world.at(LOOK_SECONDS, self._look)
        with contextlib.suppress(Over):
            code = self.supervisor.run()
            self._on_end(code)
        for client in self.front.clients:
            self.counts["refused"] += client.num_refused
        self.counts["requests"] += len(self.front.clients)
        self.counts["replayed"] += self.front.llm.num_replayed
        self.counts["losses"] += self.front.llm.members.num_losses
        self.counts["events"] += self.world.num_events

    # ---- what the fakes ask ----

    def _heard(self, message: Any) -> None:
        self.front.ranks.hear(message)

    def _start(self, rank: int, arguments: list[str]) -> FakePopen:
        if rank < 0:
            return self.front_process
        plan = self.runtime.written[arguments[arguments.index("--plan") + 1]]
        process = RankProcess(self.house, plan, rank, "--join" in arguments)
        self.house[rank] = process
        self.world.tell(f"rank {rank} starts as process {process.pid}")
        return process.popen

    def _file(self, name: str) -> FakeFile:
        if name == "ready":
            return FakeFile(lambda: b"http://fake" if self.front.ready_since >= 0 else None)
        if "-" not in name or name == "beat-front":
            return FakeFile(lambda: None)
        kind, _, number = name.partition("-")
        rank = int(number)

        def beat() -> bytes | None:
            process: RankProcess | None = self.house[rank]
            if process is None:
                return None
            return process.last_beat(process.beats_since if kind == "beat" else process.loading_since)

        return FakeFile(beat)

    # ---- what happens ----

    def _on_progress(self) -> None:
        self.last_news = self.world.now
        checks.no_wrong_token(self.front.clients, self.schedule.facts)

    def _on_failed(self, reason: str) -> None:
        """server.process leaves with exit code 3."""
        self.ended = reason
        self.world.at(self.world.now + 0.1, self._front_leaves)

    def _front_leaves(self) -> None:
        self.front_process.exit_code = 3
        self.world.interrupted = True

    def _on_phase(self, what: str, rank: int) -> None:
        ready = self.front.ready_since >= 0
        self.world.tell(f"rank {rank} {what}")
        self.last_news = self.world.now
        if what == "starts" and ready and self.crashes[rank]:
            self.crashes[rank] -= 1
            self.world.at(self.world.now + self.world.between(0.0, 0.3), self._kill, self.house[rank])
        phases = self._phases if ready else self._early_phases
        phases[what] += 1
        for index, fault in enumerate(self.schedule.faults):
            if (
                fault.phase == what
                and fault.early != ready
                and fault.count == phases[what]
                and index not in self._fault_times
            ):
                self._fault_times[index] = self.world.now
                self.world.at(self.world.now + fault.delay, self._strike, index, fault, rank)

    def _on_ready(self) -> None:
        """Requests and faults are timed from here."""
        now = self.world.now
        for request in self.schedule.requests:
            self._to_come += 1
            self.world.at(now + request.arrival, self._arrive, request)
        for index, fault in enumerate(self.schedule.faults):
            if not fault.phase and fault.after < 0:
                self._to_come += 1
                self._fault_times[index] = now
                self.world.at(now + fault.delay, self._strike_timed, index, fault)

    def _arrive(self, request: Request) -> None:
        self._to_come -= 1
        client = Client(request)
        self.front.clients.append(client)
        self.front.submit(client)

    def _strike_timed(self, index: int, fault: Fault) -> None:
        self._to_come -= 1
        self._strike(index, fault, -1)

    def _strike(self, index: int, fault: Fault, of_phase: int) -> None:
        for later, other in enumerate(self.schedule.faults):
            if other.after == index and not other.phase:
                self._to_come += 1
                self.world.at(self.world.now + other.delay, self._strike_timed, later, other)
        self.last_news = self.world.now
        if fault.kind == "resize":
            done = self.front.resize(fault.times)
            self.world.tell(f"fault {index}: resize to {fault.times}" + ("" if done else ": refused"))
            self.counts["resize"] += done
            return
        if fault.kind == "front":
            self.front.deaf_until = self.world.now + fault.seconds
        elif fault.kind == "supervisor":
            self._blind_until = self.world.now + fault.seconds
        elif fault.kind in DISK:
            self._strike_disk(fault)
        elif fault.kind == "all":
            for process in self.house:
                if process is not None:
                    self.world.at(self.world.now + self.world.between(0.0, fault.seconds), process.kill)
        else:
            self._strike_rank(fault, of_phase)
            return
        self.world.tell(f"fault {index}: {fault.kind} for {fault.seconds:.3f} s")
        if fault.kind not in DISK:
            self.last_news += fault.seconds
        self.counts[fault.kind] += 1

    def _strike_disk(self, fault: Fault) -> None:
        disk, until = self.house.disk, self.world.now + fault.seconds
        if fault.kind == "away":
            disk.away_until = max(disk.away_until, until)
        elif fault.kind == "changed":
            disk.changed_until = max(disk.changed_until, until)
        else:
            disk.stalled_until = max(disk.stalled_until, until)

    def _strike_rank(self, fault: Fault, of_phase: int, tries: int = 1000) -> None:
        victim = fault.victim
        if fault.kind in ("cut", "aloof") and not any(
            process is not None and process.in_lockstep for process in self.house
        ):
            if tries:  # soon somebody asks for something
                self.world.at(self.world.now + 0.005, self._strike_rank, fault, of_phase, tries - 1)
            return
        if victim == -2:
            victim = of_phase
        if victim < 0:
            live = [process for process in self.house if process is not None and process.gets_on]
            if not live:
                return
            process = self.world.random.choice(live)
        else:
            process = self.house[victim]
        if process is None:
            return
        self.world.tell(f"{fault.kind} rank {process.rank_id}, process {process.pid}")
        self.counts[fault.kind] += 1
        if fault.kind == "slow":
            self.house.slow_until[process.rank_id] = self.last_news = self.world.now + fault.seconds
        elif fault.kind == "pause":
            process.stop()
            self.last_news += fault.seconds
            self.world.at(self.world.now + fault.seconds, process.go_on)
        elif fault.kind == "stop":
            process.stop()
        elif fault.kind == "hang":
            process.hang("hang")
        elif fault.kind == "busy":
            process.work(fault.seconds)
            self._still_until = max(self._still_until, self.world.now + fault.seconds)
        elif fault.kind in ("cut", "aloof"):
            self._strike_peer(process, fault.kind)
        else:
            self.crashes[process.rank_id] += fault.times - 1
            process.kill()

    def _strike_peer(self, process: RankProcess, kind: str) -> None:
        """The others find it out, by waiting for it: in the exchange, and when it is aloof once more when they meet."""
        if kind == "aloof":
            process.hang("aloof")
        else:
            process.cut()
        until = self._still_until = self._missing_until = (
            self.world.now + 2 * (EXCHANGE_TIMEOUT + SILENT_SECONDS) + 10.0
        )
        if kind == "aloof":  # an idle one is missed by none
            self.world.at(until, process.kill)

    def _may_go(self, process: RankProcess, fault: Fault) -> bool:
        """The last rank that serves is never taken away, unless the schedule allows for it."""
        if fault.kind in ("hang", "busy", "cut", "aloof") and process.beats_since < 0:
            return False  # it loads: there is no loop yet
        # Ranks outside of the lockstep are waited for by none.
        return fault.kind not in ("cut", "aloof") or process.in_lockstep

    def _serves(self, process: RankProcess | None) -> bool:
        """It is a member, and it goes on."""
        if process is None or not process.gets_on:
            return False
        ready = self.front.llm.members.ready.get(process.rank_id)
        return ready is not None and ready.process == process.pid

    def _on_fence(self, process: RankProcess) -> None:
        if self._serves(process):
            raise Violation(f"rank {process.rank_id} is killed though it is well; {self._state()}")

    def _kill(self, process: RankProcess) -> None:
        if process is self.house[process.rank_id]:
            process.kill()

    # ---- looking at it all, now and then ----

    def _look(self) -> None:
        now = self.world.now
        if self.front.ready_since >= 0 and self._to_come == 0 and not self._phases["began"]:
            self._phases["began"] = 1
            self._on_ready()
        self._bounds()
        if now > MOST_SECONDS:
            raise Violation(f"no end after {now:.0f} s; {self._state()}")
        if self._phases["began"] and not self._to_come and self._settled():
            if self._probed:
                checks.at_the_end(self)
                raise Over
            self._probed = True
            self._probe()
        self.world.at(now + LOOK_SECONDS, self._look)

    def _bounds(self) -> None:
        now, members = self.world.now, self.front.llm.members
        for process in self.house:
            if process is None or not process.gets_on:
                continue
            waits = process.waits_for
            if waits is not None and now - waits.since > EXCHANGE_TIMEOUT and not waits.over():
                if now < self._missing_until:
                    waits.give_up()
                    continue
                raise Violation(f"rank {process.rank_id} waits in an exchange for {now - waits.since:.1f} s")
            if process.openings and process._opens() and now - process.openings[-1].since > EXCHANGE_TIMEOUT:
                if members.started and now > self._missing_until:
                    raise Violation(
                        f"rank {process.rank_id} waits for others to meet, longer than {EXCHANGE_TIMEOUT} s"
                    )
                process.openings[-1].resolve(
                    PeerLost((), "they did not come")
                )  # as ep/transport/shm_rendezvous.py does
        waiting = any(not client.ended for client in self.front.clients)
        able = members.started and members.shortage is None and not self.ended
        if not able:
            self._still_until = max(self._still_until, now)
        if waiting and now - max(self.last_news, self._still_until) > QUIET_SECONDS:
            raise Violation(f"no token for {now - self.last_news:.1f} s; {self._state()}")

    def _settled(self) -> bool:
        """Every request has ended, all ranks are back and sleep, and nothing is known to come."""
        members = self.front.llm.members
        return (
            all(client.ended for client in self.front.clients)
            and all(state is State.UP for state in members.states[: members.count])
            and not any(self.house[members.count :])
            and not members.open
            and all(
                process is not None
                and process.gets_on
                and process.rank is not None
                and process.rank.idle
                and not process.rank.has_work
                and not process.inbox
                and process.team is not None
                and process.team.working
                and members.ready[process.rank_id].process == process.pid
                for process in self.house[: members.count]
            )
        )

    def _probe(self) -> None:
        """Once more, now that all is well: do all ranks still serve?"""
        self.last_news = self.world.now
        for number in range(self.front.llm.members.count):
            params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, seed=1)
            prompt = Prompt(request_id=f"last-{number}", token_ids=[1 + number, 5, 7], params=params)
            client = Client(Request(prompt, 0.0))
            self.front.clients.append(client)
            self.front.submit(client)

    def _state(self) -> str:
        members = self.front.llm.members
        ranks = []
        for rank, process in enumerate(self.house[: len(members.states)]):
            says = members.states[rank].value
            if process is None or process.team is None:
                ranks.append(f"rank {rank} {says}: no process" if process is None else f"rank {rank} {says}: loads")
                continue
            what = (
                "stopped"
                if process.stopped
                else process.hung
                if process.hung
                else "busy"
                if process.busy
                else "idle"
                if process.rank.idle
                else "awake"
            )
            what += " working" if process.team.working else " opening" if process.team.opening else " out"
            ranks.append(f"rank {rank} {says}: {what}, epoch {process.team.epoch}")
        open_requests = sum(not client.ended for client in self.front.clients)
        return f"epoch {members.epoch}, {open_requests} requests open; " + "; ".join(ranks)

    def _on_end(self, code: int) -> None:
        """The supervisor has left its loop."""
        self.counts["ended"] += 1
        if not self.supervisor.saw_ready:
            return  # a rank was lost before: there is nothing to go on with
        if not self.ended:
            raise Violation(f"the supervisor ended with {code}; {self._state()}")
        raise Violation(f"the server ended: {self.ended}")
