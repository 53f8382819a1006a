"""What a request has of the cache when it is let in: a prefix that is known here, or what a rank that was lost had
computed of it (cache/shared.py), so that a loss costs its requests no step but, at most, the one that was under way. No
torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from cache.manager import CacheManager, Prefix, Sequence
from cache.rows import CacheRows

if TYPE_CHECKING:
    from cache.memory import CacheMemory
    from cache.residuals import Kept
    from cache.shared import FormerCache, Found


class Moved(Sequence, Protocol):
    """What `Takeover` needs of a request. formers: as AddRequest of front/messages.py has them; () once they are of no
    use any more. prompt_logprobs: None where none are wanted."""

    formers: tuple[tuple[int, int, int], ...]

    @property
    def prompt_logprobs(self) -> object: ...
    @property
    def stay(self) -> int: ...


class Takeover:
    """`known`, then `bring` once the request has blocks."""

    def __init__(
        self,
        cache: CacheManager,
        former: FormerCache | None = None,
        memory: CacheMemory | None = None,
        rows: CacheRows | None = None,
        between: Callable[[Callable[[], bool]], bool] | None = None,
    ) -> None:
        """former: None: of no other rank anything can be had; else memory and rows are of this rank's own cache.
        between: does something after the steps that are under way, which may still write to blocks that are free, and
        before the next one."""
        self.num_tokens = 0  # taken over so far
        self.resumes = False  # only requests are let in that the step which the loss broke off was computing
        self.kept: dict[tuple[int, int], Kept] = {}  # of that step: stay and position here -> what was kept
        self._cache = cache
        self._former = former
        self._memory = memory
        self._rows = rows
        self._between = between
        self._found: Found | None = None  # of the request that `known` was asked for last

    def known(self, request: Moved) -> tuple[Prefix, int]:
        """The prefix that it begins with, and how many of its tokens need not be computed: those of the prefix, or more
        that `bring` brings."""
        self._found = None
        cache = self._cache
        if request.prompt_logprobs is not None:  # they come of computing its prompt
            return cache.nothing, 0
        prefix = cache.find_prefix(request)
        num_tokens = prefix.num_blocks * cache.block_size
        for found in self._finds(request):
            if found.num_tokens + self.resumes * found.num_kept > num_tokens:
                num_tokens, self._found = found.num_tokens, found
                prefix = cache.nothing._replace(num_arriving=num_tokens)
        return prefix, num_tokens

    @property
    def holds(self) -> bool:
        """The request that `known` was asked for last is not to be let in yet."""
        return self.resumes and self._found is None

    def any_kept(self, requests: Iterable[Moved]) -> bool:
        """Whether the step that the loss broke off was computing one of them."""
        return any(found.num_kept for request in requests for found in self._finds(request))

    def _finds(self, request: Moved) -> Iterator[Found]:
        most = len(request.tokens) - 1
        for rank, sequence_id, num_released in () if self._former is None else request.formers:
            assert self._former is not None
            if (found := self._former.find(rank, sequence_id, num_released, most)) is not None:
                yield found

    def bring(self, request: Moved, num_tokens: int, end: int) -> bool:
        """Fill the blocks that it has been given, up to `end` tokens, where `known` has found more than a prefix.
        False: that cannot be had any more, and will not be looked for again."""
        found, self._found, request.formers = self._found, None, ()
        if found is None:
            return True
        assert self._between is not None
        found = found._replace(num_kept=min(found.num_kept, end - num_tokens) if self.resumes else 0)
        brought = self._between(lambda: self._read(found, request))
        self.num_tokens += num_tokens if brought else 0
        return brought

    def _read(self, found: Found, request: Moved) -> bool:
        assert self._former is not None and self._memory is not None and self._rows is not None
        records = [] if request.held.state is None else [request.held.state.current]
        self._rows.begin_states(records)
        kept = self._former.read(found, request.held, self._memory)
        if kept is None:
            return False
        self.kept |= {(request.stay, found.num_tokens + index): one for index, one in enumerate(kept)}
        self._rows.end_states(records, [request.stay] * len(records), [found.num_tokens] * len(records))
        return True
