"""The front's side of a profile: which ranks record, and what they recorded. Pure bookkeeping; front/trace_file.py
writes it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from front.messages import FrontToRank, ProfileCommand, ProfilePart

EVENTS_PER_RANK = 1 << 16  # 2 MiB in a rank, about 12 MB of JSON; a hundred steps of a large model, split in two
MAX_EVENTS = 1 << 20
ANSWER_SECONDS = 10.0  # a rank that has not sent its part by then is left out


class ProfileRefused(ValueError):
    """A profile is being taken already, or none is, or its file cannot be written."""


class Profile(NamedTuple):
    """parts: of the ranks that recorded to the end, by rank; lost: those that began and did not."""

    path: Path
    parts: list[ProfilePart]
    lost: list[int]
    seconds: float


class Profiling:
    """start -> stop -> (parts come) -> finish. One profile at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ids = itertools.count(1)
        self._profile_id = 0
        self._path: Path | None = None
        self._began = self._ended = 0.0
        self._stopping = False
        self._recording: set[int] = set()  # ranks whose part is still to come
        self._parts: dict[int, ProfilePart] = {}
        self._lost: set[int] = set()

    @property
    def path(self) -> Path | None:
        """Where the profile that is being taken will be written; None: none is."""
        return self._path

    @property
    def complete(self) -> bool:
        """No part is still to come."""
        return not self._recording

    def start(self, path: Path, ranks: Iterable[int], capacity: int = EVENTS_PER_RANK) -> list[tuple[int, FrontToRank]]:
        """What to send to whom. ProfileRefused; nothing has changed then."""
        if self._path is not None:
            raise ProfileRefused(f"a profile is being taken already, into {self._path}")
        if not 1 <= capacity <= MAX_EVENTS:
            raise ProfileRefused(f"a profile keeps 1 to {MAX_EVENTS} events of each rank, not {capacity}")
        recording = set(ranks)
        if not recording:
            raise ProfileRefused("no rank serves now that could be profiled")
        try:
            path.open("ab").close()
        except OSError as error:
            raise ProfileRefused(f"{path}: {error.strerror}") from None
        self._profile_id = next(self._ids)
        self._path, self._began, self._stopping = path, self._clock(), False
        self._recording, self._parts, self._lost = recording, {}, set()
        command = ProfileCommand(profile_id=self._profile_id, kind="start", capacity=capacity)
        return [(rank, command) for rank in sorted(recording)]

    def stop(self) -> list[tuple[int, FrontToRank]]:
        """What to send to whom. ProfileRefused."""
        if self._path is None:
            raise ProfileRefused("no profile is being taken")
        if self._stopping:
            raise ProfileRefused(f"the profile into {self._path} is being stopped already")
        self._stopping, self._ended = True, self._clock()
        command = ProfileCommand(profile_id=self._profile_id, kind="stop")
        return [(rank, command) for rank in sorted(self._recording)]

    def take(self, part: ProfilePart) -> None:
        """One has come."""
        if part.profile_id != self._profile_id or part.rank not in self._recording:
            return
        self._recording.discard(part.rank)
        if part.started:
            self._parts[part.rank] = part
        else:
            self._lost.add(part.rank)

    def lose(self, rank: int) -> None:
        """The rank is gone, and its part with it, if that has not come."""
        if rank in self._recording:
            self._recording.discard(rank)
            self._lost.add(rank)

    def finish(self) -> Profile:
        """After `stop`. Those whose part has not come are lost."""
        assert self._path is not None and self._stopping
        for rank in list(self._recording):
            self.lose(rank)
        profile = Profile(
            self._path,
            [self._parts[rank] for rank in sorted(self._parts)],
            sorted(self._lost),
            self._ended - self._began,
        )
        self._path, self._parts = None, {}
        return profile
