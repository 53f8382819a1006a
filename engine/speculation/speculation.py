"""Speculation of one rank: which drafts a request gets, and what became of them. Its scheduler asks. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cache.manager import CacheManager
from engine.request import Request, Status
from engine.schedule import Schedule
from engine.speculation.drafter import Drafter
from engine.speculation.looks import Looks, is_answering
from engine.speculation.model_drafts import ModelDrafts
from engine.speculation.prediction import PredictionDrafter
from engine.speculation.rights import FIRST_RIGHT, Rights

FEW = 4  # drafts that came back, by which it begins to be known
RECENT = 1 / 64  # of a draft that came back
RECENT_REQUEST = 1 / 8


class Speculation:
    """drafter: for all requests; None: only the predictions that requests bring. max_drafts: of a request in a step;
    max_in_step: of all; 0: nobody has any. depth: of a request, how many are wanted now (engine/speculation/gate.py).
    lookahead: tokens behind the drafts for which the drafter wants room in the cache. forced: tokens that a request's
    grammar makes certain are drafts too, before all others and whatever depth is, where nothing else drafts only of a
    request that runs alone: each takes a row that it would have taken a step later, so all that is gained is steps.

    A model that drafts (`ModelDrafts`) has a cache of its own, a layer more. Steps may leave it out, where drafts are
    not worth their while; a request that was in such a step is *cold*, and gets no drafts any more, and so are requests
    that begin with a prefix of which a block was computed so. Its row for the last token of a block depends on the
    token behind it, which the block's key does not tell: such a row may be that of another text. Both bear on what is
    drafted, never on what is sampled.
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        max_drafts: int = 0,
        max_in_step: int = 0,
        lookahead: int = 0,
        block_size: int = 1,
        forced: bool = False,
    ) -> None:
        self._block_size = block_size
        self._forced = forced
        self.depth = self.max_drafts = max_drafts
        self.max_in_step = max_in_step
        self.lookahead = lookahead
        self._drafter = drafter
        self._predictions = PredictionDrafter()
        self._model = drafter if isinstance(drafter, ModelDrafts) else None
        self.models = self._model is not None  # the model drafts
        self.rights = Rights(max_drafts)
        self.looks = None if self.models else Looks(self.rights)
        self._open: dict[int, Request] = {}  # requests that may have drafts
        self._cold: set[int] = set()
        self._warm_blocks: set[int] = set()
        self._sources: dict[int, Drafter] = {}  # of the drafts under way
        self.forget_counts()

    def forget_counts(self) -> None:
        """Count from here on."""
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_pos = [0] * self.max_drafts
        self.usual_output = 0.0  # tokens of a request that ended lately; 0: none has
        self._right = [0.0] * self.max_drafts  # of each place, of those lately that all before were right of
        self._seen = [0.0] * self.max_drafts
        self._acceptance: list[float] | None = None

    @property
    def acceptance(self) -> Sequence[float]:
        """Of each place, if all before it were right; lately. What few have come of is taken to be as of the place
        before."""
        if self._acceptance is None:
            self._acceptance, last = [], FIRST_RIGHT
            for right, seen in zip(self._right, self._seen, strict=True):
                last = (right + FEW * last) / (seen + FEW)
                self._acceptance.append(last)
        return self._acceptance

    @property
    def busy(self) -> bool:
        """There is a request that may have drafts."""
        return bool(self._open)

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
        if not self.max_drafts:
            return False
        params = request.message.params
        if self._drafter is not None or params.prediction_token_ids:
            self._open[request.request_id] = request
            return True
        return self._forced and params.grammar is not None

    @property
    def quiet(self) -> bool:
        """No request without a grammar is to be asked for drafts."""
        return not self.depth and self._forced

    def asks(self, request: Request, num_running: int) -> bool:
        """Whether a request that may have drafts is to be asked for some, all its tokens being known; always where a
        step that had some may still be under way."""
        wanted = request.guide is not None or not self.quiet
        return (wanted and request.request_id in self._open) or (num_running == 1 and request.guide is not None)

    def propose(self, request: Request, limit: int) -> list[int]:
        """At most `limit` drafts, and no more than are wanted now."""
        if self._forced and request.guide is not None and limit > 0:
            certain = request.guide.forced()
            if certain:
                return certain[: min(limit, self.max_drafts)]
        limit = min(limit, self.depth)
        if limit <= 0:
            return []
        looks = None
        if self.looks is not None:
            looks = self.looks if self.looks.over(request) else None
            limit = min(limit, self.looks.limit(request))
            if not limit and looks is None:
                return []
        first: list[int] = []
        drafts: list[int] = []
        for source, found in self._look_up(request, limit if looks is None else self.max_drafts):
            first, drafts = first or found, found[:limit]
            if request.guide is not None:
                drafts = drafts[: request.guide.num_valid(drafts)]
            if drafts:
                self._sources[request.request_id] = source
                break
        if looks is not None:
            looks.begin(request, first)
        return drafts

    def _look_up(self, request: Request, limit: int) -> Iterator[tuple[Drafter, list[int]]]:
        """What is found, first the prediction's."""
        for source in (self._predictions, self._drafter):
            if source is not None and (found := source.propose(request, limit)[:limit]):
                yield source, found

    def look(self) -> None:
        """What would be right of drafts, while none are wanted."""
        looks = self.looks
        if looks is None:
            return
        for request in self._open.values():
            if is_answering(request) and looks.over(request):
                looks.begin(request, next((found for _, found in self._look_up(request, self.max_drafts)), []))

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """So many of the request's drafts have come back, and so many were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        source = self._sources.pop(request.request_id, None)  # None: its grammar
        for position in range(min(num_accepted + 1, num_drafts)):
            right = position < num_accepted
            self.accepted_per_pos[position] += right
            if source is not None:
                self._right[position] += right - RECENT * self._right[position]
                self._seen[position] += 1 - RECENT * self._seen[position]
                self._acceptance = None
        request.num_accepted += num_accepted
        request.num_rejected += num_drafts - num_accepted
        if source is not None:
            source.observe(request, num_accepted)

    def allocate(self, request: Request, num_tokens: int, cache: CacheManager) -> list[list[int]] | None:
        """Blocks for so many tokens, and for as many more as the drafter wants room for and no other request has to
        give it. As of CacheManager."""
        if request.speculates and self.lookahead:
            most = min(cache.room(request), request.max_length - 1)
            num_tokens = max(num_tokens, min(num_tokens + self.lookahead, most))
        new = cache.allocate(request, num_tokens)
        if new and self._warm_blocks:
            self._warm_blocks.difference_update(new[0])  # what they held is gone
        return new

    def warm(self, requests: Sequence[Request]) -> list[bool]:
        """Of each whether the model can draft for it; []: of all."""
        cold = self._cold
        warms = [request.request_id not in cold for request in requests] if cold else []
        return [] if all(warms) else warms

    def admit(self, request: Request) -> None:
        """It begins, or begins again, with the blocks of a prefix."""
        if self._model is not None:
            self._cold.discard(request.request_id)
            if not self._warm_blocks.issuperset(request.held.tables[0]):
                self._cold.add(request.request_id)

    def offer(
        self,
        step: Schedule,
        requests: Sequence[Request],
        token_ids: Sequence[list[int]],
        drafts: Sequence[list[int]] | None,
    ) -> None:
        """The step is over, and the requests will get these tokens. drafts: behind them; None: the model has made
        none."""
        if self._model is None:
            return
        size, running = self._block_size, Status.RUNNING
        if drafts is None:
            if not step.warm or any(step.warm):
                self._cold.update(request.request_id for request in requests if request.status is running)
            return
        for index, (request, start, count) in enumerate(zip(requests, step.starts, step.counts, strict=True)):
            if drafts[index] and request.status is running:
                self._model.offer(request, len(request.tokens) + len(token_ids[index]), drafts[index])
            full = (start + count) % size < count  # a block
            if full and request.status is running and request.request_id not in self._cold:
                self._warm_blocks.update(request.held.tables[0][start // size : (start + count) // size])

    def forget(self, request: Request) -> None:
        """It has ended."""
        tokens = len(request.tokens) - request.prompt_len
        if tokens > 0:
            self.usual_output += (RECENT_REQUEST if self.usual_output else 1.0) * (tokens - self.usual_output)
        self._open.pop(request.request_id, None)
        self._cold.discard(request.request_id)
        self._sources.pop(request.request_id, None)
        self._predictions.forget(request)
        if self.looks is not None:
            self.looks.forget(request)
        if self._drafter is not None:
            self._drafter.forget(request)
