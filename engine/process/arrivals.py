"""What comes from the front between two steps of a rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

from front.messages import AddRequest, FrontToRank, Membership, TokenOutput
from front.wire import RankSocket

LONG_STEP = 0.1  # seconds: a step that clients may answer within a small part of
WAIT_SHARE = 0.03  # of a step's time, and so much of a second at most: for what they answer
TRIED_AGAIN = 8  # after a wait in which no request came, of so many one


class Arrivals:
    """Behind a long step in which requests ended, as many new ones are waited for, a moment at most: a client that asks
    again at once would else wait for the step that begins now, and then for its own."""

    def __init__(self, socket: RankSocket, process: int = 0) -> None:
        """process: this one, as the front knows it. What was meant for the one before it, when the front did not know
        yet that it had ended, is no membership of this one: it leaves out whoever was known to be lost, and a rank that
        took it would serve alone. (Requests of that time are taken back by the front.)"""
        self._socket, self._process = socket, process
        self._began, self._took = 0.0, 0.0  # the step
        self._num_ended, self._num_skipped, self._in_vain = 0, 0, False

    def note(self, outputs: Sequence[TokenOutput]) -> None:
        """What the step gave that began when `take` returned."""
        self._took = time.monotonic() - self._began
        self._num_ended = sum(output.finish_reason is not None for output in outputs)

    def take(self) -> list[FrontToRank]:
        """Everything that has come."""
        messages = self._taken()
        self._began = time.monotonic()
        return messages

    def _poll(self, seconds: float) -> list[FrontToRank]:
        messages = self._socket.poll(seconds)
        return [one for one in messages if not isinstance(one, Membership) or one.process in (0, self._process)]

    def _taken(self) -> list[FrontToRank]:
        messages = self._poll(0)
        num_ended, took = self._num_ended, self._took
        if num_ended == 0 or took < LONG_STEP or self._skips():
            return messages
        deadline = time.monotonic() + WAIT_SHARE * min(took, 1.0)
        while (num_new := sum(isinstance(message, AddRequest) for message in messages)) < num_ended:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            messages += self._poll(left)
        self._num_skipped, self._in_vain = 0, num_new == 0
        return messages

    def _skips(self) -> bool:
        if not self._in_vain:
            return False
        self._num_skipped += 1
        return self._num_skipped < TRIED_AGAIN
