"""The blocks of one token group: who holds them, and which hold a prefix that can be used again. No torch here.

A block is in one of three places: held (reference count > 0), *empty* (free, holds nothing worth keeping), or *cached*
(free, but findable by its key until it is handed out again, the least recently released first).
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack; block 0 goes out first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._block_to_key: list[bytes | None] = [None] * num_blocks
        self._key_to_block: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    def find(self, key: bytes) -> int | None:
        return self._key_to_block.get(key)

    def num_unheld(self, blocks: list[int]) -> int:
        """How many of these are free, so that holding them takes from the free ones."""
        return sum(1 for block in blocks if block >= 0 and self._refs[block] == 0)

    def hold(self, block: int) -> None:
        """One holder more of a block that is held or cached."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def take(self) -> int:
        """A free block, with one holder and without a key. There must be one."""
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

    def release(self, block: int) -> None:
        """One holder less."""
        self._refs[block] -= 1
        assert self._refs[block] >= 0
        if self._refs[block] == 0:
            if self._block_to_key[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def publish(self, key: bytes, block: int) -> None:
        """The block's tokens are computed: it can be found. Of two with equal content the first one is."""
        if key not in self._key_to_block:
            self._key_to_block[key] = block
            self._block_to_key[block] = key

    def forget_keys(self) -> None:
        self._key_to_block.clear()
        self._block_to_key = [None] * self.num_blocks
        self._empty += self._cached
        self._cached.clear()

    def check(self, holders: dict[int, int]) -> None:
        """For tests: raises AssertionError unless exactly these blocks are held, each by so many."""
        assert {block: count for block, count in enumerate(self._refs) if count} == holders
        everything = sorted([*self._empty, *self._cached, *holders])
        assert everything == list(range(self.num_blocks)), "a block is lost, or in two places"
        assert all(self._block_to_key[block] is None for block in self._empty)
        keyed = {key: block for block, key in enumerate(self._block_to_key) if key is not None}
        assert keyed == self._key_to_block
