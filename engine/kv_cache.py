"""Who owns which block of the paged cache, and which blocks hold a prefix that can be used again. No torch here.

A block is in one of three places: held by one or more requests (reference count > 0), *empty* (free, holds nothing
worth keeping), or *cached* (free, but findable by its key until it is handed out again, oldest first). The key of a
full block is a chained hash of its tokens and of the key before it, so one key names the whole prefix up to there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b

from engine.request import Request

_KEY_BYTES = 16


class KVCache:
    """Blocks 0 .. num_blocks - 1 of block_size tokens each."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks ({num_blocks}) and block_size ({block_size}) must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queries = 0  # tokens looked up at first admissions
        self.num_hits = 0  # tokens found
        self._refs = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack; block 0 goes out first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._block_to_key: list[bytes | None] = [None] * num_blocks
        self._key_to_block: dict[bytes, int] = {}
        self._generation = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit when one request has every block."""
        return self.num_blocks * self.block_size

    @property
    def num_free_blocks(self) -> int:
        return len(self._empty) + len(self._cached)

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the longest known prefix of the request, at most its length - 1 tokens (one token at least
        has to be computed to have logits). Changes nothing but the keys remembered in the request."""
        if not self.enable_prefix_caching:
            return []
        found: list[int] = []
        for index in range((len(request.tokens) - 1) // self.block_size):
            block = self._key_to_block.get(self._key(request, index))
            if block is None:
                break
            found.append(block)
        return found

    def can_admit(self, request: Request, prefix: list[int]) -> bool:
        """Whether all known tokens of a request without blocks would fit now, `prefix` being reused."""
        needed = -(-len(request.tokens) // self.block_size) - len(prefix)
        return needed <= self.num_free_blocks - self._num_unheld(prefix)

    def admit(self, request: Request, prefix: list[int]) -> None:
        """Give a request without blocks the blocks that find_prefix found for it just now."""
        assert not request.blocks
        for block in prefix:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1
        request.blocks = list(prefix)
        request.num_committed = len(prefix)
        request.cache_generation = self._generation

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Append blocks until the request can hold num_tokens tokens. Returns the new blocks ([] when it already can);
        None, and nothing is changed, when there are not enough free blocks."""
        needed = -(-num_tokens // self.block_size) - len(request.blocks)
        if needed <= 0:
            return []
        if needed > self.num_free_blocks:
            return None
        new = [self._take() for _ in range(needed)]
        request.blocks += new
        return new

    def commit(self, request: Request, num_tokens: int) -> None:
        """The first num_tokens tokens are computed: make their full blocks findable.

        Called after the step has run, never when it is merely scheduled: a block must not be found by a request of the
        same step, nor after a step that failed. Of two blocks with equal content the first committed one is findable.
        """
        if not self.enable_prefix_caching or request.cache_generation != self._generation:
            return
        for index in range(request.num_committed, num_tokens // self.block_size):
            key = self._key(request, index)
            block = request.blocks[index]
            if key not in self._key_to_block:
                self._key_to_block[key] = block
                self._block_to_key[block] = key
            request.num_committed = index + 1

    def free(self, request: Request) -> None:
        """Give all blocks of the request back. The end of a sequence is released first, so that it is evicted first:
        without its beginning it could not be found anyway."""
        for block in reversed(request.blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0
            if self._refs[block] == 0:
                if self._block_to_key[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None
        request.blocks = []
        request.num_committed = 0

    def reset_prefix_cache(self) -> None:
        """Forget every key. Requests that run on keep their blocks but offer no more of them: what they compute may
        rest on keys and values from before the reset (made by other weights)."""
        self._generation += 1
        self._key_to_block.clear()
        self._block_to_key = [None] * self.num_blocks
        self._empty += self._cached
        self._cached.clear()

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            key = self._block_to_key[block]
            assert key is not None
            del self._key_to_block[key]
            self._block_to_key[block] = None
        self._refs[block] = 1
        return block

    def _num_unheld(self, blocks: list[int]) -> int:
        return sum(1 for block in blocks if self._refs[block] == 0)

    def _key(self, request: Request, index: int) -> bytes:
        """Key of a full block, which must be the next unknown one or an earlier one. A cryptographic hash, because a
        collision would hand one user's text to another."""
        keys = request.block_keys
        if index < len(keys):
            return keys[index]
        assert index == len(keys)
        parent = keys[-1] if keys else blake2b(request.cache_salt.encode(), digest_size=_KEY_BYTES).digest()
        start = index * self.block_size
        tokens = array("i", request.tokens[start : start + self.block_size])
        key = blake2b(parent + tokens.tobytes(), digest_size=_KEY_BYTES).digest()
        keys.append(key)
        return key
