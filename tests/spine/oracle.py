"""A drafter that knows the answers and tells them with a chosen probability; and the rows that its lies leave behind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from cache.spec import state_groups
from engine.rank import Rank
from engine.request import Request
from engine.speculation.speculation import Speculation

POISON = 1e30  # finite, so that a mask discards it; any other use of it shows


class Oracle:
    """answers: per request id its prompt and the tokens that follow. right: the probability that a draft is. accepted: how often
    so many drafts of a step were right, and of how many."""

    def __init__(self, answers: Mapping[int, tuple[Sequence[int], Sequence[int]]], right: float, seed: int = 0) -> None:
        self._answers, self._right, self._rng = answers, right, random.Random(seed)
        self.accepted: Counter[tuple[int, int]] = Counter()
        self._num_drafts: dict[int, int] = {}

    def propose(self, request: Request, limit: int) -> list[int]:
        prompt, answer = self._answers[request.request_id]
        tokens = request.tokens
        assert list(tokens) == [*prompt, *answer][: len(tokens)], "the stream has left the plain one"
        following = [*prompt, *answer][len(tokens) :]
        count = self._rng.randint(0, min(limit, len(following)))
        drafts = [token if self._rng.random() < self._right else (token + 1) % 90 for token in following[:count]]
        self._num_drafts[request.request_id] = count
        return drafts

    def observe(self, request: Request, num_accepted: int) -> None:
        self.accepted[self._num_drafts[request.request_id], num_accepted] += 1

    def forget(self, request: Request) -> None:
        """It knows all answers for ever."""


def take_drafts(rank: Rank, oracle: Oracle, max_drafts: int) -> None:
    rank._scheduler.speculation = Speculation(oracle, max_drafts, 256)


def poison_what_nobody_may_read(rank: Rank) -> None:
    """Rows of running requests behind what is computed, and every row that no request has: between two steps nothing of them
    may ever be read again."""
    scheduler, cache = rank._scheduler, rank._runner._kv
    good = torch.zeros(cache.num_blocks * cache.block_size, dtype=torch.bool)
    pool = scheduler.kv._pools[0]
    for block in [*pool._cached, *(block for block, refs in enumerate(pool._refs) if refs)]:
        good[block * cache.block_size : (block + 1) * cache.block_size] = pool._block_to_key[block] is not None
    for request in scheduler.running:
        (table,) = request.held.tables
        for position in range(request.num_computed):
            good[table[position // cache.block_size] * cache.block_size + position % cache.block_size] = True
    for group in cache.spec:
        for layer in group.layers:
            for field in cache.layers[layer]:
                if group.kind != "state":
                    field[~good] = POISON
                else:
                    assert scheduler.kv._records is not None
                    field[scheduler.kv._records._free] = POISON


def poison_kept_inputs(rank: Rank) -> None:
    """Of drafts that were refused."""
    cache = rank._runner._kv
    states = [request.held.state for request in rank._scheduler.running]
    for group in state_groups(cache.spec):
        for layer in group.layers:
            for field in cache.layers[layer][2:]:
                for state in filter(None, states):
                    if state.current:
                        field[state.current, state.num_kept :] = POISON
