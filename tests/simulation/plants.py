"""Bugs to plant, so that it shows that they would be found. Each wraps a piece of the real code, here only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from engine.members import Members
from engine.messages import AddRequest
from engine.rank import Rank
from engine.scheduler import Scheduler
from engine.sequences import Sequence
from tests.simulation.standin import StandIn


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
    """A real one of once: a rank that fell asleep, or lost a peer, after it had heard of a new epoch slept on."""
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
def _replaced(owner: type, name: str, value: Callable[..., object]) -> Iterator[None]:
    real = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


PLANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "keep-steps": keep_steps,
    "open-recovery": open_recovery,
    "repeat-token": repeat_token,
    "skip-expert": skip_expert,
    "sleep-on": sleep_on,
}
