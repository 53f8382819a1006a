"""Draft tokens: guesses of what a request samples next, computed together with its next token and checked by it.

A step gives a request its next token and, behind it, the drafts; it samples after each of them. What was drawn after
the last known token is certain. The draw after a draft counts only if that draft, and all before it, equal what was
drawn: since a draw depends on logits, seed and position alone, the stream is the one that would have come without
drafts. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # as in engine/schedule.py
    from front.messages import SamplingParams


class Drafter(Protocol):
    """Proposes tokens for the requests of one rank. What it proposes may be wrong, and may differ from rank to rank."""

    def propose(self, request_id: int, tokens: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `tokens`, which are all known tokens of the request."""
        ...

    def observe(self, request_id: int, num_drafts: int, num_accepted: int) -> None:
        """So many of the drafts of the request's last step turned out right."""
        ...


def may_draft(params: SamplingParams) -> bool:
    """Whether the draws of this request depend on logits, seed and position only, not on its earlier output."""
    plain = params.presence_penalty == 0 and params.frequency_penalty == 0 and params.repetition_penalty == 1
    return plain and not params.min_tokens and not params.bad_words_token_ids and params.prompt_logprobs is None


def num_new(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of the sampled tokens are part of the stream: one, and one for every leading draft that was right."""
    count = 1
    for draft, token in zip(drafts, sampled, strict=False):
        if draft != token:
            break
        count += 1
    return count
