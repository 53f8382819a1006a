"""Speculation of one rank: which drafts a request gets, and what became of them. Its scheduler asks. No torch here."""

from __future__ import annotations

from typing import Any

from engine.request import Request
from engine.speculation.drafter import Drafter
from engine.speculation.prediction import PredictionDrafter


class Speculation:
    """drafter: for all requests; None: only the predictions that requests bring. max_drafts: of a request in a step;
    max_in_step: of all; 0: nobody has any. depth: of a request, how many are wanted now (engine/speculation/gate.py).
    lookahead: tokens behind the drafts for which the drafter wants room in the cache."""

    def __init__(
        self, drafter: Drafter | None = None, max_drafts: int = 0, max_in_step: int = 0, lookahead: int = 0
    ) -> None:
        self.depth = self.max_drafts = max_drafts
        self.max_in_step = max_in_step
        self.lookahead = lookahead
        self._drafter = drafter
        self._predictions = PredictionDrafter()
        self._sources: dict[int, Drafter] = {}  # of the drafts under way
        self.forget_counts()

    def forget_counts(self) -> None:
        """Count from here on."""
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_pos = [0] * self.max_drafts

    @property
    def counts(self) -> dict[str, Any]:
        """Fields of RankStats."""
        return {
            "spec_drafts": self.num_drafts,
            "spec_draft_tokens": self.num_draft_tokens,
            "spec_accepted_tokens": self.num_accepted_tokens,
            "spec_accepted_per_pos": self.accepted_per_pos,
        }

    def takes(self, request: Request) -> bool:
        """Whether that request may ever have drafts. They wait until all its tokens are known."""
        return self.max_drafts > 0 and (self._drafter is not None or bool(request.message.params.prediction_token_ids))

    def propose(self, request: Request, limit: int) -> list[int]:
        """At most `limit` drafts, and no more than are wanted now."""
        limit = min(limit, self.depth)
        if limit <= 0:
            return []
        for source in (self._predictions, self._drafter):
            drafts = [] if source is None else source.propose(request, limit)[:limit]
            if drafts:
                assert source is not None
                self._sources[request.request_id] = source
                return drafts
        return []

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """So many of the request's drafts have come back, and so many were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_pos[position] += 1
        request.num_accepted += num_accepted
        request.num_rejected += num_drafts - num_accepted
        source = self._sources.pop(request.request_id, None)
        if source is not None:
            source.observe(request, num_accepted)

    def forget(self, request: Request) -> None:
        self._sources.pop(request.request_id, None)
        self._predictions.forget(request)
        if self._drafter is not None:
            self._drafter.forget(request)
