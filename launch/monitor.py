"""Watches the ranks of a server: sees one end or hang, fences it, says so, and starts it again. Starts more of
them, and sees off those that are not wanted any more.

Heartbeats: the loop of a rank that has loaded writes time.monotonic() as one float64 into the file beat-RANK
(engine/process/places.py), whenever it gets on: also while it sleeps, and while it waits for other ranks, so that it is
never taken for the one that it waits for. One that has not written yet is loading, and a thread of it writes into
loading-RANK; when it is started into a running server it may take ten times as long for that as the first ranks took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from configs.engine import Plan
from configs.env import child_environment
from engine.process.console import say
from engine.process.heartbeat import Sign, idle_beat, last_beat, read_sign, sign_bytes
from front.messages import EXIT_WEIGHTS, RankLost
from launch.processes import RANK_MODULE, Child, Children, RuntimeDir
from launch.signs import WINDOW_SECONDS, Look, Window, signs_of, state_of
from launch.standby import Standby
from launch.waits import WaitWatch
from launch.weights import WeightsKept

HANG_SECONDS = 2.0  # a heartbeat that is older means a hung rank, unless its process is at work ...
SUSPECT_SECONDS = 1.0  # ... which is asked from this age on (launch/signs.py)
# The most that work may take between two marks, or --exchange-timeout, if the others wait longer: of the processor's
# time, because many processes may share a core, and in a STARVED_FACTOR of that by the clock.
WORK_SECONDS = 10.0
STARVED_FACTOR = 6
DEVICE_HANG_SECONDS = {"cuda": 10.0}  # where a library may wait for the device without taking processor time
LOAD_HANG_SECONDS = 10.0  # the same while it loads, when a long operation may hold up its heartbeat
STALL_SECONDS = 1.0  # when this process itself was not run for so long, the ranks get their time anew
LOAD_FACTOR = 10  # a restarted rank may load for so many times what the first start took ...
LOAD_SECONDS = 30.0  # ... or for this long, if that is more
# Seconds after a loss: the survivors recover before one that starts takes their cores. One that waits
# (launch/standby.py) has less need of them, and starts when they have computed their first step, if that is earlier.
RESTART_PAUSE = 0.5
FORK_SECONDS = 120.0  # until there is what the first ranks are forked from
BECOME_SECONDS = 5.0  # for one that waits to give a first sign of life as a rank
LONGEST_PAUSE = 30.0  # each failed try in a row doubles the pause, up to this ...
LONGEST_PAUSE_ALONE = 10.0  # ... or this, when no rank is left
CALM_SECONDS = 0.2  # an idle rank's loop turns twice a second
SERVED_SECONDS = 1.0  # a rank that beat for so long was no failed try
STANDBY_SECONDS = 10.0  # after the first start, before a process gets ready beside ranks that have work
QUIET_TRIES = 3  # so many failed tries are not worth a word of their own
MAX_TRIES = 15  # of every rank in a row, when none is left: then none will be started again
LEAVE_SECONDS = 10.0  # a rank that is not wanted any more is killed when it has not left by then


class _Place(Struct):
    """One rank, whatever process it is just now. child None: it is down."""

    rank: int
    child: Child | None = None
    joins: bool = False
    wanted: bool = True
    added: bool = False  # to a running server, and not started yet
    leaves: float | None = None  # since when this process is to leave
    started: float = 0.0
    stood_by: bool = False  # this process has waited to become a rank
    load_seconds: float = 0.0  # from the first start to the first heartbeat
    verdict: str = ""  # why it was killed
    last_life: float = 0.0  # then: when it last gave a sign
    served_since: float = 0.0  # the first heartbeat of this process; 0: it has not loaded
    tries: int = 0  # in a row that have failed
    ended: float = 0.0
    reason: str = ""  # of the last end
    said_down: bool = False
    worked: float = 0.0  # when its process was last seen to be at work though its loop stood still
    window: Window | None = None  # the looks at that since then
    spent: float = 0.0  # processor time of its process when its loop was first seen to stand still

    @property
    def serves(self) -> bool:
        return self.child is not None and self.served_since > 0


class RankMonitor:
    """`start` starts one process per rank. `restarts`: whether an ended one is started again; off until all have
    been ready."""

    def __init__(
        self,
        children: Children,
        plan: Plan,
        runtime: RuntimeDir,
        startup_timeout: float,
        module: str = RANK_MODULE,
        clock: Callable[[], float] = time.monotonic,
        ranks: range | None = None,
        options: Sequence[str] = (),
        signs: Look = signs_of,
        standby: bool = False,
        watches: bool = True,
    ) -> None:
        """startup_timeout: the most seconds that a restarted rank may take to load; the first start is the caller's to
        bound. module: what a rank's process runs; options: more words of its command line. ranks: those of this
        machine; None: all, and only then may their number change. standby: keep processes that become the next ranks.
        watches: say which ranks wait for which (launch/waits.py); off where another machine does."""
        self.restarts = False
        self.left = False  # a rank has ended by itself with exit code 0, as the front told it to
        self._children = children
        self._runtime = runtime
        self._plan = plan
        self._plan_path = runtime.write("plan.json", plan)
        self._weights = WeightsKept(plan, runtime)
        self._environment = child_environment(plan.threads_per_rank, plan.spin_threads, plan.device == "cuda")
        forks = plan.device == "cpu"  # a library for a device has threads, and handles that a fork would share
        self._standby = Standby(children, module, plan.architecture, self._environment, forks) if standby else None
        self._alone = ranks is None
        self._startup_timeout = startup_timeout
        self._module = module
        self._options = options
        self._clock = clock
        self._signs = signs
        self._hang_seconds = DEVICE_HANG_SECONDS.get(plan.device, HANG_SECONDS)
        self._longest_work = max(WORK_SECONDS, plan.exchange_timeout)
        self.front: Child | None = None  # whose loop is looked at too
        self.elsewhere: dict[int, Sign] = {}  # of the ranks of other machines
        self.waits = WaitWatch(plan.wait_warning_seconds if watches else 0.0, self._state, clock)
        self._looked = self._awake_since = clock()
        self._last_loss = self._looked - RESTART_PAUSE
        self._places = [_Place(rank) for rank in ranks or range(plan.data_parallel_size)]
        for place in self._places:  # each rank may look at the others' files
            self._prepare(place.rank)

    def start(self, join: bool = False) -> None:
        """join: the ranks of other machines are at work."""
        if self._standby is not None and self._alone:  # other machines may hear from this process meanwhile
            self._standby.fork_from_now_on(FORK_SECONDS)
        for place in self._places:
            place.joins = join
            self._start(place)

    @property
    def processes(self) -> dict[int, int]:
        """The process of each rank that has one."""
        return {place.rank: place.child.process.pid for place in self._places if place.child is not None}

    @property
    def loading(self) -> bool:
        """Some rank is not where it can be told to leave."""
        return any(place.child is not None and self._beat(place.rank) is None for place in self._places)

    @property
    def hopeless(self) -> str:
        """Why no rank is left, and none will be; "": one is, or may be. To be asked once all have been ready."""
        wanted = [place for place in self._places if place.wanted]
        if not self.restarts:
            return "" if any(place.child for place in wanted) else "ranks are not started again now"
        if any(place.tries < MAX_TRIES or place.serves for place in wanted):
            return ""
        last = max(wanted, key=lambda place: place.ended)
        return f"none could be started again in {MAX_TRIES} tries; rank {last.rank}: {last.reason}"

    def resize(self, count: int) -> None:
        """Ranks 0 to count - 1 are wanted. The next `look`s start those that are missing, once `restarts` is set; the
        front tells those beyond to leave."""
        now = self._clock()
        while len(self._places) < count:
            self._prepare(len(self._places))
            self._places.append(_Place(len(self._places), joins=True, wanted=False))
            # A rank builds its part of the placement by the number of all ranks there ever were (eplb/repair.py).
            self._plan = replace(self._plan, data_parallel_size=len(self._places))
            self._plan_path = self._runtime.write(f"plan-{len(self._places)}.json", self._plan)
        for place in self._places:
            place.added = place.rank < count and (place.added or not place.wanted)
            place.wanted = place.rank < count
            if place.wanted or place.leaves is not None or place.child is None:
                continue
            place.leaves = now
            if self._beat(place.rank) is None:  # it is loading and cannot hear that it is to leave
                place.child.process.kill()

    def look(self, dead: list[Child]) -> list[RankLost]:
        """Call it a few times per second, with the children that have ended since. What has ended, for the front to
        know: the ranks that are lost, and those that have left because they are not wanted any more."""
        now = self._clock()
        if now - self._looked > STALL_SECONDS:
            self._awake_since = now
        self._looked = now
        if self.restarts:
            self._weights.look()
        if self._standby is not None:
            self._standby.look(dead, now)
        self._look_at_waits()
        lost: list[RankLost] = []
        for place in self._places:
            if place.child is not None and place.child in dead:
                message = self._on_end(place, place.child, now)
                lost += [] if message is None else [message]
            elif place.child is not None and not place.verdict:
                self._check(place, place.child, now)
        for place in self._places:
            if place.child is None and place.wanted and self.restarts and not self.left:
                if place.added:
                    self._add(place)
                else:
                    self._restart(place, now)
        if self._standby is not None and self.restarts and self._settled(now):
            self._standby.keep(self._words(self._places[-1]), now, sum(place.wanted for place in self._places))
        return lost

    def fence(self, process: int) -> None:
        """Kill this process of a rank, because the others wait for it in vain. Not if it has ended."""
        for place in self._places:
            if place.child is not None and place.child.process.pid == process and not place.verdict:
                place.verdict, place.last_life = "the others waited for it in vain, killed", self._clock()
                place.child.process.kill()

    def kill_loading(self) -> None:
        """At the end of the server: who still loads cannot hear it, nor may who comes back and has met no other."""
        for place in self._places:
            deaf = self._beat(place.rank) is None or (place.joins and self._beat(place.rank, "joined") is None)
            if place.child is not None and deaf:
                place.child.process.kill()

    def _prepare(self, rank: int) -> None:
        self._runtime.add_cache(rank)
        for name in ("beat", "loading", "loaded", "joined"):
            self._runtime.clear(f"{name}-{rank}")

    def _start(self, place: _Place) -> None:
        for name in ("beat", "loading"):
            self._runtime.clear(f"{name}-{place.rank}")
        name, words = f"rank {place.rank}", self._words(place)
        waited = None if self._standby is None else self._standby.become(name, place.rank, words)
        place.stood_by = waited is not None
        place.child = waited or self._children.start(name, place.rank, self._module, words, self._environment)
        place.started = self._clock()
        place.verdict = ""
        place.served_since = 0.0
        place.leaves = None
        place.window = None

    def _words(self, place: _Place) -> list[str]:
        """Of its command line."""
        words = ["--plan", str(self._plan_path), "--rank", str(place.rank), *self._runtime.options, *self._options]
        return [*words, "--join"] if place.joins else words

    def _on_end(self, place: _Place, child: Child, now: float) -> RankLost | None:
        self._children.forget(child)
        place.child = None
        if place.leaves is not None:
            place.leaves = None
            say("rank_left", rank=place.rank, pid=child.process.pid, end=repr(place.verdict or child.exit_text()))
            return RankLost(place.rank, "it was not wanted any more", now, child.process.pid)
        if child.process.returncode == 0:
            self.left = True
            return None
        self._last_loss = place.ended = now
        reason = place.reason = place.verdict or child.exit_text()
        if place.served_since and now - place.served_since >= SERVED_SECONDS:
            place.tries = 0
        elif (
            child.process.returncode != EXIT_WEIGHTS
        ):  # that one has waited, and is to be tried again as long as it takes
            place.tries += 1
        last_life = place.last_life if place.verdict else now
        say("rank_lost", rank=place.rank, pid=child.process.pid, reason=repr(reason))
        return RankLost(place.rank, reason, last_life, child.process.pid, child.intact)

    def _check(self, place: _Place, child: Child, now: float) -> None:
        """Kill it when it hangs; its end is then seen as every other end is."""
        beat = self._beat(place.rank)
        if beat is not None and not place.served_since:
            place.served_since = now
        if beat is not None and not place.joins and not place.load_seconds:
            place.load_seconds = now - place.started
        if beat is None:
            self._check_loading(place, now)
        elif self._hangs(place, child, beat, now):
            place.verdict, place.last_life = (
                f"hung: no heartbeat for {now - beat:.1f} s{self._where(place)}, killed",
                beat,
            )
        elif place.leaves is not None and now - max(place.leaves, self._awake_since) > LEAVE_SECONDS:
            place.verdict, place.last_life = f"has not left within {LEAVE_SECONDS:g} s, killed", beat
        if place.verdict:
            self.waits.tell(place.rank)
            child.process.kill()

    def _where(self, place: _Place) -> str:
        """Where it was last seen."""
        sign = read_sign(sign_bytes(self._runtime.file(f"beat-{place.rank}")))
        return "" if sign is None else f" since {max(sign.agreeing, sign.computing).text}"

    def sign_payloads(self) -> dict[int, bytes]:
        """The signs of life of the ranks that have one, as they are written."""
        found = {}
        for place in self._places:
            if place.child is not None:
                name = "beat" if place.served_since else "loading"
                found[place.rank] = sign_bytes(self._runtime.file(f"{name}-{place.rank}"))
        return found

    def _look_at_waits(self) -> None:
        signs = dict(self.elsewhere)
        for rank, payload in self.sign_payloads().items():
            sign = read_sign(payload)
            if sign is not None:
                signs[rank] = sign
        front, state = None, ""
        if self.front is not None and self.front.process.returncode is None:
            front, state = last_beat(self._runtime.file("beat-front")), state_of(self.front.process.pid)
        self.waits.look(signs, front, state)

    def _state(self, rank: int) -> str:
        """The state letter of its process."""
        processes = self.processes
        return state_of(processes[rank]) if rank in processes else ""

    def _hangs(self, place: _Place, child: Child, beat: float, now: float) -> bool:
        """Its loop has stood still for too long, and its process is not at work; or for longer than any work takes."""
        since = max(beat, self._awake_since)
        if now - since < SUSPECT_SECONDS:
            place.window = None
            return False
        signs = self._signs(child.process.pid)
        if signs is None:
            return now - since > self._hang_seconds
        if place.window is None:
            place.window, place.worked, place.spent = Window(now, signs.seconds), since, signs.seconds
        window = place.window
        window.look(signs, now)
        if now - window.began >= WINDOW_SECONDS:
            if window.at_work:
                place.worked = now
            place.window = Window(now, signs.seconds)
        idle = now - max(since, place.worked) > self._hang_seconds and not window.at_work
        worked = min(now - since, SUSPECT_SECONDS + signs.seconds - place.spent)
        return idle or max(worked, (now - since) / STARVED_FACTOR) > self._longest_work

    def _check_loading(self, place: _Place, now: float) -> None:
        beat = self._beat(place.rank, "loading")
        longest = max(other.load_seconds for other in self._places)
        usual = max(LOAD_SECONDS, LOAD_FACTOR * longest) if longest else self._startup_timeout
        limit = min(self._startup_timeout, usual * 2**place.tries)
        if beat is not None and now - max(beat, self._awake_since) > LOAD_HANG_SECONDS:
            place.verdict, place.last_life = f"hung while loading: no heartbeat for {now - beat:.1f} s, killed", beat
        elif place.joins and now - place.started > limit:
            place.verdict, place.last_life = f"not loaded within {limit:.3g} s, killed", place.started
        elif beat is None and place.stood_by and now - max(place.started, self._awake_since) > BECOME_SECONDS:
            place.verdict, place.last_life = "it did not begin as a rank, killed", place.started

    def _add(self, place: _Place) -> None:
        place.added, place.joins, place.said_down = False, True, False
        place.tries = 0
        self._start(place)
        assert place.child is not None
        say("rank_added", rank=place.rank, pid=place.child.process.pid)

    def _restart(self, place: _Place, now: float) -> None:
        alone = not any(other.serves for other in self._places)
        pause = min(RESTART_PAUSE * 2**place.tries, LONGEST_PAUSE_ALONE if alone else LONGEST_PAUSE)
        if place.tries > QUIET_TRIES and not place.said_down:
            say("rank_stays_down", rank=place.rank, restarts=place.tries, next_try_seconds=round(pause))
            place.said_down = True
        calm = RESTART_PAUSE
        if self._standby is not None and self._standby.ready and not place.tries and self._recovered:
            calm = pause = 0.0
        # The first try after the loss of all of them has no survivor to wait for.
        if now - place.ended < (0.0 if alone and not place.tries else pause):
            return
        if not alone and now - self._last_loss < calm:
            return
        place.said_down = False
        place.joins = True
        self._start(place)
        assert place.child is not None
        say("rank_restarted", rank=place.rank, pid=place.child.process.pid, restart=place.tries + 1)

    def _settled(self, now: float) -> bool:
        """All ranks that are wanted serve, and have no work, or have served for a while: getting ready takes a core for
        a second or two, and caches. After a loss another one may be near, so that the while is short."""
        wanted = [place for place in self._places if place.wanted]
        least = SERVED_SECONDS if any(place.joins for place in wanted) else STANDBY_SECONDS
        serve = all(place.serves for place in wanted)
        return serve and (self._calm(now) or all(now - place.served_since >= least for place in wanted))

    @property
    def _recovered(self) -> bool:
        """Every rank that serves has computed a step since the last loss."""
        joined = [self._beat(place.rank, "joined") for place in self._places if place.serves]
        return all(when is not None and when >= self._last_loss for when in joined)

    def _calm(self, now: float) -> bool:
        """No rank computes, and no loop has turned just now: it turns all the time while there is memory to get."""
        beats = [idle_beat(self._runtime.file(f"beat-{place.rank}")) for place in self._places if place.serves]
        return all(when is not None and now - when > CALM_SECONDS for when in beats)

    def _beat(self, rank: int, name: str = "beat") -> float | None:
        """When the rank last wrote. None: it has not (or is just writing)."""
        return last_beat(self._runtime.file(f"{name}-{rank}"))
