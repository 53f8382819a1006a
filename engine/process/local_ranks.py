"""One rank in the process of its front."""

from __future__ import annotations

import queue
import sys
import threading
import time

from configs.engine import Plan
from engine.build import build_rank
from engine.process.progress import LoadProgress
from engine.process.warm_up import practise, take_lessons
from engine.rank import Rank
from front.messages import FrontToRank, Outputs, RankToFront
from store.memory import Store

CLOSE_SECONDS = 10.0  # for what is being prepared; a piece of it takes milliseconds


def start_local(plan: Plan, store: Store | None) -> LocalRanks:
    """The only rank of a plan, loaded. store: where its weights lie; None: in memory of its own. Raises ValueError as
    `build_rank` does."""
    progress = LoadProgress("moesaic", sys.stderr)
    rank = build_rank(plan, progress=progress, store=store)
    progress.finish(rank.ready.bytes_read)
    return LocalRanks(rank, stored=store is not None)


class LocalRanks:
    """front.wire.Ranks for one rank in this process: `receive` runs its steps. `send` may come from another thread.

    While the rank has no work, a thread does what a rank's process does then: it prepares for requests to come.
    """

    def __init__(self, rank: Rank, stored: bool = False) -> None:
        """stored: its weights lie in a store."""
        self._rank = rank
        self._stored = stored
        self._inbox: queue.SimpleQueue[FrontToRank] = queue.SimpleQueue()
        self._said_ready = False
        self._resting = True
        self._at_rest = threading.Event()
        self._closing = False
        self._preparing = threading.Thread(target=self._prepare, name="prepare", daemon=True)
        self._preparing.start()

    @property
    def size(self) -> int:
        return 1

    def send(self, rank: int, message: FrontToRank) -> None:
        if rank != 0:
            raise ValueError(f"rank {rank} is not in 0..0")
        self._inbox.put(message)

    def fence(self, rank: int, process: int) -> None:
        """A rank that is alone is accused by none."""

    def receive(self, timeout: float) -> list[RankToFront]:
        """RankReady at first. Then the outputs of the next step that has any; an idle rank waits for a message, at most
        `timeout` seconds. Errors of the rank pass through."""
        if not self._said_ready:
            self._said_ready = True
            if self._stored:
                practise(self._rank, alone=True)
            while self._rank.forming:  # it meets no other: so graphs are captured before the first request
                self._rank.step()
            if not self._stored:
                practise(self._rank)
            take_lessons(self._rank)
            self._at_rest.set()
            return [self._rank.ready]
        deadline = time.monotonic() + timeout
        while not self._rank.done:
            self._drain_inbox()
            if self._resting and self._rank.has_work:
                self._resting = False
                self._at_rest.clear()
            outputs = self._rank.step()
            if not self._resting and not self._rank.has_work:
                self._resting = True
                self._at_rest.set()
            events = self._rank.take_events()
            if outputs:
                events.append(Outputs(0, outputs, self._rank.stats, time.monotonic()))
            if events:
                return events
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if self._rank.pause(left) > 0:
                try:
                    self._rank.submit(self._inbox.get(timeout=left))
                except queue.Empty:
                    break
        return []

    def close(self) -> None:
        self._closing = True
        self._at_rest.set()
        self._preparing.join(CLOSE_SECONDS)
        self._rank.close()

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():  # no other thread takes from it
            self._rank.submit(self._inbox.get_nowait())

    def _prepare(self) -> None:
        """Work that has come meanwhile does not wait for the piece that is under way: that one touches nothing of a
        step."""
        while self._at_rest.wait() and not self._closing:
            if not self._rank.prepare():
                return
