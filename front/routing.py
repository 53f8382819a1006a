"""Which rank takes a request: the least loaded, unless another one already holds enough of its prompt.

Load is in tokens: KV that the rank's requests hold or will likely hold, plus prompt tokens not computed yet. A rank
that has seen the beginning of the prompt is credited with the tokens it need not compute again, so affinity decides
exactly when the ranks' loads differ by less than that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_FIRST_GUESS = 128  # output tokens of a request, before any has finished
_SMOOTHING = 1 / 16  # weight of the newest finished request in the running mean


class RequestRouter:
    def __init__(self, num_ranks: int, block_size: int, max_prefixes: int = 65536) -> None:
        """max_prefixes bounds what is remembered; the least recently used go first."""
        self.loads = [0] * num_ranks
        self.open = [True] * num_ranks  # whether a rank takes new work
        self._block_size = block_size
        self._max_prefixes = max_prefixes
        self._prefix_to_ranks: OrderedDict[int, int] = OrderedDict()  # hash of a prefix -> bit mask of ranks
        self._mean_output = float(_FIRST_GUESS)
        self._next = 0

    def choose(self, token_ids: Sequence[int], cache_salt: str, wanted: int | None = None) -> int:
        """The open rank for this prompt, of which there must be one; remembered as a holder of its prefix. wanted: that
        one if it is open."""
        num_ranks = len(self.loads)
        if num_ranks == 1:
            return 0
        prefixes = self._prefixes(token_ids, cache_salt)
        saved = [0] * num_ranks
        for length, key in prefixes:
            mask = self._prefix_to_ranks.get(key, 0)
            for rank in range(num_ranks):
                if mask >> rank & 1:
                    saved[rank] = length
        first = self._next
        ranks = [rank for rank in range(num_ranks) if self.open[rank]]
        ranks = [wanted] if wanted in ranks else ranks
        chosen = min(ranks, key=lambda rank: (self.loads[rank] - saved[rank], (rank - first) % num_ranks))
        self._next = (chosen + 1) % num_ranks
        for _, key in prefixes:
            self._prefix_to_ranks[key] = self._prefix_to_ranks.get(key, 0) | 1 << chosen
            self._prefix_to_ranks.move_to_end(key)
        while len(self._prefix_to_ranks) > self._max_prefixes:
            self._prefix_to_ranks.popitem(last=False)
        return chosen

    def expected_tokens(self, prompt_len: int, max_tokens: int) -> int:
        """KV that a sequence will likely hold."""
        return prompt_len + min(max_tokens, round(self._mean_output))

    def finished(self, num_output_tokens: int) -> None:
        self._mean_output += (num_output_tokens - self._mean_output) * _SMOOTHING

    def grow(self, num_ranks: int) -> None:
        """There are at least so many ranks; new ones take no work until `open` says so."""
        num_new = num_ranks - len(self.loads)
        self.loads += [0] * num_new
        self.open += [False] * num_new

    def forget_prefixes(self) -> None:
        """The ranks' prefix caches were emptied."""
        self._prefix_to_ranks.clear()

    def forget_rank(self, rank: int) -> None:
        """This rank's prefix cache is gone."""
        for key, mask in self._prefix_to_ranks.items():
            self._prefix_to_ranks[key] = mask & ~(1 << rank)

    def _prefixes(self, token_ids: Sequence[int], cache_salt: str) -> list[tuple[int, int]]:
        """(length, hash) of the prompt's first 1, 2, 4, 8, ... blocks, shortest first."""
        found = []
        key = hash(cache_salt)
        start, end = 0, self._block_size
        while end <= len(token_ids):
            key = hash((key, tuple(token_ids[start:end])))
            found.append((end, key))
            start, end = end, 2 * end
        return found
