"""What LLM and AsyncLLM share: the front, its ranks, and what travels between the two. Each has its own way to wait."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

from front.front import Front, FrontOutput
from front.messages import FrontToRank, Outputs, RankLost, RankReady, RankToFront, ResetPrefixCache
from front.profiling import EVENTS_PER_RANK
from front.text.tokenizer import Tokenizer
from front.wire import NotConnected, Ranks

R = TypeVar("R", bound=Ranks)

log = logging.getLogger("moesaic.front")


def in_order(messages: list[RankToFront]) -> list[RankToFront]:
    """What came from ranks together with the news of a loss is taken before it: tokens need not be computed again. A
    process that is ready is taken behind it, with what it says then: it may follow the one that is lost."""
    first: list[RankToFront] = []
    losses: list[RankToFront] = []
    behind: list[RankToFront] = []
    ready: set[int] = set()
    for message in messages:
        if isinstance(message, RankReady):
            ready.add(message.rank)
        if isinstance(message, RankLost):
            losses.append(message)
        else:
            (behind if getattr(message, "rank", -1) in ready else first).append(message)
    return [*first, *losses, *behind]


class Driver(ABC, Generic[R]):
    def __init__(
        self, ranks: R, tokenizer: Tokenizer, *, block_size: int = 16, num_experts: int = 0, slots_per_rank: int = 0
    ) -> None:
        """num_experts, slots_per_rank: of one layer; they decide which losses are survived."""
        self.tokenizer = tokenizer
        self.front = Front(
            ranks.size, tokenizer, block_size=block_size, num_experts=num_experts, slots_per_rank=slots_per_rank
        )
        self._ranks = ranks
        self._closed = False

    @abstractmethod
    def _do(self, work: FrontOutput) -> None:
        """Give the requests what they got, and `_send` the messages."""

    def _on_event(self, message: RankToFront) -> None:
        """Something about the ranks themselves, which the front knows by now."""
        return

    @abstractmethod
    def _cut_off(self, error: str) -> None:
        """The ranks cannot be reached."""

    def reset_prefix_cache(self) -> None:
        """What was computed of prompts is computed anew from the next step on."""
        self.front.router.forget_prefixes()
        for rank in self.front.members.up:
            self._send(rank, ResetPrefixCache())

    def start_profile(self, path: Path, capacity: int = EVENTS_PER_RANK) -> list[int]:
        """Record from now on what every rank does when, at most `capacity` events each; the ranks that do.

        ProfileRefused: one is being taken already, or `path` cannot be written.
        """
        messages = self.front.profiling.start(path, self.front.members.up, capacity)
        for rank, message in messages:
            self._send(rank, message)
        return [rank for rank, _ in messages]

    def _take(self, timeout: float) -> list[RankToFront]:
        """What has come is done, waiting at most `timeout` seconds for the first; then returned."""
        messages = self._ranks.receive(timeout)
        if any(isinstance(message, RankLost | RankReady) for message in messages):
            messages = in_order(messages + self._ranks.receive(0))
        for message in messages:
            self._do(self.front.on_message(message))
            if not isinstance(message, Outputs):
                self._on_event(message)
        return messages

    def _look(self) -> None:
        """Do what time alone makes necessary; ranks that others wait for in vain are killed."""
        self._do(self.front.look())
        for rank, process in self.front.accused:
            log.warning("event=rank_accused rank=%d epoch=%d: the others wait for it", rank, self.front.members.epoch)
            self._ranks.fence(rank, process)
        self.front.accused.clear()

    def _send(self, rank: int, message: FrontToRank) -> None:
        try:
            self._ranks.send(rank, message)
        except NotConnected as error:
            # A rank that was up and is not there any more is lost: word of it is on its way, and will move its
            # requests.
            if not self.front.members.started:
                self._cut_off(str(error))
        except ConnectionError as error:
            self._cut_off(str(error))

    def _not_ready(self, timeout: float) -> TimeoutError:
        missing = [rank for rank in range(self._ranks.size) if rank not in self.front.ready]
        return TimeoutError(f"ranks {missing} were not ready within {timeout:g} s")
