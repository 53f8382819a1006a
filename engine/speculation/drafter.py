"""Draft tokens: guesses of what a request samples next, computed together with its next token and checked by it.

A step gives a request its next token and, behind it, the drafts; it samples after each of them. What was drawn after
the last known token is certain. The draw after a draft counts only if that draft, and all before it, equal what was
drawn: since a draw depends on logits, seed, position and the tokens before it alone, the stream is the one that would
have come without drafts. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.request import Request


class Drafter(Protocol):
    """Proposes tokens for the requests of one rank. What it proposes may be wrong, and may differ from rank to rank."""

    def propose(self, request: Request, limit: int) -> list[int]:
        """At most `limit` tokens that may follow the tokens of the request, all of which are known."""
        ...

    def observe(self, request: Request, num_accepted: int) -> None:
        """So many of what was last proposed turned out right; the request has its new tokens."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended, or is aborted; it may never have been seen."""
        ...


def num_new(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of the sampled tokens are part of the stream: one, and one for every leading draft that was right."""
    count = 1
    for draft, token in zip(drafts, sampled, strict=False):
        if draft != token:
            break
        count += 1
    return count
