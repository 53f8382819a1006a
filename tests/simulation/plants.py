"""Bugs to plant, so that it shows that they would be found. Each wraps a piece of the real code, here only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from dbo.steps import Steps
from engine.rank import Rank
from engine.recovery.reading import StagedExpert
from engine.request import Request
from engine.scheduler import Scheduler
from engine.team import Team
from front.accusations import NOTHING, Accusations, Finding
from front.members import Members
from front.messages import AddRequest, Joined
from front.sequences import Sequence
from launch.signs import Window
from layers.identity import CheckpointError
from tests.simulation.disk import SimReading
from tests.simulation.processes import RankProcess
from tests.simulation.standin import Characters, StandIn


@contextlib.contextmanager
def repeat_token() -> Iterator[None]:
    """The replay forgets the last token that was released, so that it comes twice."""
    real = Sequence.message

    def message(self: Sequence, eos_token_ids: tuple[int, ...]) -> AddRequest:
        add = real(self, eos_token_ids)
        return msgspec.structs.replace(add, token_ids=add.token_ids[:-1]) if self.num_output else add

    with _replaced(Sequence, "message", message):
        yield


@contextlib.contextmanager
def keep_steps() -> Iterator[None]:
    """A rank that loses a peer does not forget the steps in flight."""
    with _replaced(Scheduler, "rollback", lambda self: None):
        yield


@contextlib.contextmanager
def skip_expert() -> Iterator[None]:
    """A repaired rank does not read the experts that are new to it."""
    with _replaced(StandIn, "read_expert", lambda *arguments: None):
        yield


@contextlib.contextmanager
def sleep_on() -> Iterator[None]:
    """A real one of once: a rank that fell asleep, or lost a peer, after it had heard of a new epoch slept on (now it would be for
    half a second)."""
    real = Rank.pause

    def pause(self: Rank, longest: float) -> float:
        wanted, self._wanted = self._wanted, None
        try:
            return real(self, longest)
        finally:
            self._wanted = wanted

    with _replaced(Rank, "pause", pause):
        yield


@contextlib.contextmanager
def open_recovery() -> Iterator[None]:
    """A real one of once: a recovery of a dense model stayed open while nobody asked for anything."""
    with _replaced(Members, "on_idle", lambda self: None):
        yield


@contextlib.contextmanager
def thread_beats() -> Iterator[None]:
    """A real one of once: a thread beat for the loop, so that a hung loop was not noticed, and those that waited for it gave up."""
    real = RankProcess.last_beat

    def last_beat(self: RankProcess, since: float) -> bytes | None:
        hung, self.hung = self.hung, ""
        try:
            return real(self, since)
        finally:
            self.hung = hung

    with _replaced(RankProcess, "last_beat", last_beat):
        yield


@contextlib.contextmanager
def end_with_the_last() -> Iterator[None]:
    """A real one of once: the loss of all ranks ended the server."""
    real = Members._lose

    def lose(self: Members, rank: int, reason: str, last_life: float) -> bool:
        changed = real(self, rank, reason, last_life)
        if self.started and not any(self.alive):
            self.failed = reason
        return changed

    with _replaced(Members, "_lose", lose):
        yield


@contextlib.contextmanager
def work_is_a_hang() -> Iterator[None]:
    """The monitor does not look whether a process is at work."""
    with _replaced(Window, "at_work", property(lambda self: False)):
        yield


@contextlib.contextmanager
def fail_unread() -> Iterator[None]:
    """A real one of once: a rank that could not read an expert ended."""

    def take(self: SimReading, timeout: float) -> StagedExpert | None:
        if self.trouble:
            raise CheckpointError(self.trouble)
        return real(self, timeout)

    real = SimReading.take
    with _replaced(SimReading, "take", take):
        yield


@contextlib.contextmanager
def work_is_never_a_hang() -> Iterator[None]:
    """The monitor takes every process for one at work."""
    with _replaced(Window, "at_work", property(lambda self: True)):
        yield


@contextlib.contextmanager
def take_other_weights() -> Iterator[None]:
    """A real one of once: what lies on the disk now is read, whatever lay there at the start."""
    with _replaced(SimReading, "refused", lambda self: "" if self._disk.changed else self._disk.trouble):
        yield


@contextlib.contextmanager
def nobody_is_accused() -> Iterator[None]:
    """Nothing comes of ranks that lose each other when no process has ended."""
    with _replaced(Accusations, "look", lambda self: NOTHING):
        yield


@contextlib.contextmanager
def forget_filled() -> Iterator[None]:
    """Slots that an epoch filled before it was broken off are taken to hold what they held before."""
    real = Team.close

    def close(self: Team) -> None:
        real(self)
        self._filled.clear()

    with _replaced(Team, "close", close):
        yield


@contextlib.contextmanager
def accusers_are_accused() -> Iterator[None]:
    """Those are killed that have said whom they miss."""
    real = Accusations.look

    def look(self: Accusations) -> Finding:
        finding = real(self)
        return Finding(False, sorted(self._lost)) if finding.meet_again else finding

    with _replaced(Accusations, "look", look):
        yield


@contextlib.contextmanager
def wait_unsaid() -> Iterator[None]:
    """A rank that waits for its weights does not say so: requests are taken though nothing can be computed."""
    with _replaced(Rank, "_say_trouble", lambda self: None):
        yield


@contextlib.contextmanager
def new_detokenizer() -> Iterator[None]:
    """A replay begins the text anew, so that half a character that had come is forgotten."""
    real = Sequence.message

    def message(self: Sequence, eos_token_ids: tuple[int, ...]) -> AddRequest:
        self.detokenizer = cast(Any, Characters())
        return real(self, eos_token_ids)

    with _replaced(Sequence, "message", message):
        yield


@contextlib.contextmanager
def form_alone() -> Iterator[None]:
    """A rank that has all its experts goes on though another one still reads."""
    real = Team.form

    def form(self: Team) -> Steps[Joined | None]:
        joined = yield from real(self)
        if joined is None and self._forming is not None and not self._forming.reading.left:
            assert self._groups is not None
            return self._formed(self._forming, self._groups)
        return joined

    with _replaced(Team, "form", form):
        yield


@contextlib.contextmanager
def min_tokens_anew() -> Iterator[None]:
    """min_tokens counts from the replay."""
    real = Request.__init__

    def init(self: Request, message: AddRequest, *arguments: Any) -> None:
        real(self, message, *arguments)
        self.min_length = len(message.token_ids) + message.params.min_tokens

    with _replaced(Request, "__init__", init):
        yield


@contextlib.contextmanager
def _replaced(owner: type, name: str, value: object) -> Iterator[None]:
    real = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


PLANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "accusers-are-accused": accusers_are_accused,
    "end-with-the-last": end_with_the_last,
    "fail-unread": fail_unread,
    "forget-filled": forget_filled,
    "form-alone": form_alone,
    "keep-steps": keep_steps,
    "min-tokens-anew": min_tokens_anew,
    "new-detokenizer": new_detokenizer,
    "nobody-is-accused": nobody_is_accused,
    "open-recovery": open_recovery,
    "repeat-token": repeat_token,
    "skip-expert": skip_expert,
    "sleep-on": sleep_on,
    "thread-beats": thread_beats,
    "work-is-a-hang": work_is_a_hang,
    "work-is-never-a-hang": work_is_never_a_hang,
    "take-other-weights": take_other_weights,
    "wait-unsaid": wait_unsaid,
}
