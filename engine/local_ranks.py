"""One rank in the process of its front."""

from __future__ import annotations

import queue
import time

from engine.messages import FrontToRank, Outputs, RankToFront
from engine.rank import Rank


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
            news = self._rank.take_news()
            if outputs:
                news.append(Outputs(0, outputs, self._rank.stats, time.monotonic()))
            if news:
                return news
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
        self._rank.close()

    def _drain_inbox(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._rank.submit(message)
