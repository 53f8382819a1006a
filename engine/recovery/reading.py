"""Experts that are read while the ranks are at work, on a thread of their own: a disk that stalls must not keep a rank
from hearing the front, and a file that is away or was changed is waited for.

The thread brings copies into memory, a few at a time; the rank's own thread fills the slots from them. So a rank that
breaks a reading off (a new epoch) knows which slots have changed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eplb.repair import SlotUpdate
from layers.identity import CheckpointError, Identities, check
from layers.stored import StoredForm, StoredWeight
from layers.weights import Checkpoint
from models.base import CausalLM, ExpertSource

log = logging.getLogger("moesaic.weights")

AHEAD = 4  # experts that wait in memory to be filled in
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two tries; each is twice the one before
STALLED_SECONDS = 2.0  # one expert that takes longer is said to be waited for


class StagedExpert(NamedTuple):
    """One expert, in memory."""

    update: SlotUpdate
    source: ExpertSource
    bytes_read: int


class Reading(Protocol):
    """Some experts on their way. left: those that have not been taken."""

    left: int

    @property
    def trouble(self) -> str:
        """Why nothing comes just now; "": nothing is wrong."""
        ...

    def take(self, timeout: float) -> StagedExpert | None:
        """The next one, waiting at most so long for it."""
        ...

    def drop(self) -> None:
        """The rest is not wanted any more. Does not wait."""
        ...


Read = Callable[[Sequence[SlotUpdate]], Reading]


class ReadingThread:
    """Tries again, with growing pauses and without end, as long as what it cannot read is wanted.

    stage(update): reads one expert; raises CheckpointError."""

    def __init__(
        self,
        updates: Sequence[SlotUpdate],
        stage: Callable[[SlotUpdate], StagedExpert],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.left = len(updates)
        self._stage = stage
        self._clock = clock
        self._error = ""
        self._since = clock()  # when it began with the expert that it reads
        self._staged: queue.Queue[StagedExpert] = queue.Queue(AHEAD)
        self._dropped = threading.Event()
        self._failure: BaseException | None = None
        if updates:
            threading.Thread(target=self._run, args=(updates,), name="reading", daemon=True).start()

    @property
    def trouble(self) -> str:
        if self._error or not self.left or not self._staged.empty():
            return self._error
        stalled = self._clock() - self._since > STALLED_SECONDS
        return f"reading an expert takes longer than {STALLED_SECONDS:g} s" if stalled else ""

    def take(self, timeout: float) -> StagedExpert | None:
        if self._failure is not None:
            raise self._failure
        try:
            expert = self._staged.get(timeout=timeout) if timeout > 0 else self._staged.get_nowait()
        except queue.Empty:
            return None
        self.left -= 1
        return expert

    def drop(self) -> None:
        self._dropped.set()

    def _run(self, updates: Sequence[SlotUpdate]) -> None:
        try:
            for update in updates:
                expert = self._read(update)
                while expert is not None and not self._dropped.is_set():
                    try:
                        self._staged.put(expert, timeout=0.1)
                        break
                    except queue.Full:
                        continue
                if self._dropped.is_set():
                    return
        except BaseException as error:
            self._failure = error

    def _read(self, update: SlotUpdate) -> StagedExpert | None:
        """None: it is not wanted any more."""
        pause = FIRST_PAUSE
        while not self._dropped.is_set():
            self._since = self._clock()
            try:
                expert = self._stage(update)
            except CheckpointError as error:
                if str(error) != self._error:
                    log.warning("event=weights_unavailable reason=%r", str(error))
                self._error = str(error)
                self._dropped.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if self._error:
                log.info("event=weights_back")
            self._error = ""
            return expert
        return None


class Unread:
    """Implements models.base.WeightSource: a checkpoint of which nothing is read, as all weights are in a store."""

    bytes_read = 0

    def has(self, name: str) -> bool:
        return False

    def form_of(self, name: str) -> StoredForm:
        raise AssertionError(f"{name} is in the store")

    def dtype_of(self, name: str) -> torch.dtype:
        raise AssertionError(f"{name} is in the store")

    def names(self) -> Iterable[str]:
        return ()

    def finish(self) -> None:
        """There is nothing that could be left over."""

    def skip(self, name: str) -> None: ...

    def give_back(self, name: str) -> None: ...

    def read(self, name: str, out: Tensor, index: int | None = None) -> None:
        raise AssertionError(f"{name} is in the store")

    def borrow(self, name: str, shape: tuple[int, ...], index: int | None = None) -> StoredWeight:
        raise AssertionError(f"{name} is in the store")


def reader(model: CausalLM, checkpoint: Checkpoint | Unread) -> Read:
    """How a rank reads experts of its own checkpoint."""

    def stage(update: SlotUpdate) -> StagedExpert:
        assert not isinstance(checkpoint, Unread), f"{update} is in the store"
        source, bytes_read = checkpoint.stage(model.expert_keys(checkpoint, update.layer, update.expert))
        return StagedExpert(update, source, bytes_read)

    return lambda updates: ReadingThread(updates, stage)


def await_checkpoint(
    path: str | Path,
    known: Identities,
    seconds: float,
    notify: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until all files are there and are those that are known. notify(why not): once for each reason. Raises
    CheckpointError with the last reason when they are not within `seconds`."""
    deadline, pause, last = clock() + seconds, FIRST_PAUSE, ""
    while True:
        try:
            return check(path, known)
        except CheckpointError as error:
            if str(error) != last:
                last = str(error)
                notify(last)
            if clock() + pause > deadline:
                raise
        sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
