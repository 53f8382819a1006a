"""Who owns which part of the cache, and which prefixes can be used again. No torch here.

Every token group (paged, window) has a pool of blocks (cache/pool.py) and gives each sequence a table of them; the
state groups together have records (cache/records.py). A sequence may reuse a prefix as far as *every* group can provide
it: paged groups by the keys of its blocks, window groups by those that the next token still sees, state groups by a
checkpoint. The key of a full block is a chained hash of its tokens and of the key before it, so one key names the whole
prefix up to there; the same keys are what a cache is known by on other machines.

Blocks are owned by running sequences, by the prefix cache, by sequences that have ended but are lent to a reader
(*held*), or by a transfer that fills them (*arriving*).
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import NamedTuple, Protocol

from cache.pool import BlockPool
from cache.records import SequenceState, StateRecords
from cache.rows import Ints
from cache.spec import CacheGroup, CacheSizes, CacheSpec, Field, state_groups, token_groups

_KEY_BYTES = 16
GONE = -1  # in a table: the block was behind the window and has been given back

# One paged group: what most models have, and all that a scheduler without a model needs to know.
PAGED: CacheSpec = (CacheGroup("paged", (0,), (Field("kv", (1,), "uint8"),)),)


class Sequence(Protocol):
    """What the manager needs of a request."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def cache_salt(self) -> str: ...
    @property
    def held(self) -> Holding: ...
    @property
    def row(self) -> int: ...  # of the batch


class Holding:
    """What one sequence owns of the cache; only CacheManager changes it. tables: of each token group the blocks of its
    tokens, in order; all are equally long."""

    __slots__ = ("generation", "keys", "num_committed", "num_gone", "state", "tables")

    def __init__(self, num_tables: int = 1) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_tables)]
        self.keys: list[bytes] = []  # chained hashes of the full blocks, each made once
        self.num_committed = 0  # leading blocks already offered to the prefix cache
        self.num_gone = [0] * num_tables  # leading blocks of each table that are GONE
        self.generation = -1
        self.state: SequenceState | None = None


class Prefix(NamedTuple):
    """A known prefix of a sequence, in full blocks. tables: as in Holding. key: of the checkpoint, for state groups.
    num_arriving: instead of all that, tokens for which the sequence gets blocks and a record that are filled from
    elsewhere (cache/takeover.py)."""

    num_blocks: int
    tables: list[list[int]]
    key: bytes | None = None
    num_arriving: int = 0


class CacheManager:
    """Blocks of block_size tokens each. `sequence` is a request, or anything else that has what Sequence names."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        spec: CacheSpec = PAGED,
        sizes: CacheSizes | None = None,
        num_checkpoints: int = 0,
        behind: Ints | None = None,
    ) -> None:
        """behind: of each row of the batch, as CacheRows has it; None: nobody else wants to know."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks ({num_blocks}) and block_size ({block_size}) must be at least 1")
        self.block_size = block_size
        self.num_blocks = num_blocks  # of a paged group, which is what bounds a sequence
        self.enable_prefix_caching = enable_prefix_caching
        self.forget_counts()
        sizes = sizes or CacheSizes(block_size, num_blocks, num_blocks)
        self._groups = token_groups(spec)
        self._pools = [BlockPool(sizes.blocks_of(group)) for group in self._groups]
        self._windows = [index for index, group in enumerate(self._groups) if group.kind == "window"]
        self._records = StateRecords(sizes.num_records, num_checkpoints) if state_groups(spec) else None
        self._behind = behind
        self._generation = 0

    def forget_counts(self) -> None:
        """Count from here on."""
        self.num_queries = 0  # tokens looked up at first admissions
        self.num_hits = 0  # tokens found

    @property
    def capacity(self) -> int:
        """Tokens that fit when one sequence has every block."""
        return self.num_blocks * self.block_size

    @property
    def num_free_blocks(self) -> int:
        """Of the paged group that is shortest of them. Window pools are smaller, and sized so that they never are."""
        paged = [pool.num_free for index, pool in enumerate(self._pools) if index not in self._windows]
        return min(paged, default=self.num_blocks)

    @property
    def counts(self) -> dict[str, int]:
        """Fields of RankStats."""
        used = self.num_blocks - self.num_free_blocks
        found = {"prefix_queries": self.num_queries, "prefix_hits": self.num_hits}
        return {"kv_blocks_used": used, "kv_blocks_total": self.num_blocks, **found}

    @property
    def nothing(self) -> Prefix:
        """The prefix of a sequence that is to be computed from its beginning."""
        return Prefix(0, [[] for _ in self._pools])

    @property
    def has_state(self) -> bool:
        return self._records is not None

    def new_holding(self) -> Holding:
        """What a new sequence begins with: nothing."""
        return Holding(len(self._groups))

    # ---- prefixes ----

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The longest known prefix of the sequence, at most its length - 1 tokens (one token at least has to be
        computed to have logits). Changes nothing but the keys remembered in the sequence."""
        if not self.enable_prefix_caching:
            return self.nothing
        most = (len(sequence.tokens) - 1) // self.block_size
        tables: list[list[int]] = [[] for _ in self._pools]
        paged = [index for index in range(len(self._pools)) if index not in self._windows]
        count = 0
        while count < most:
            key = self._key(sequence, count)
            found = [self._pools[index].find(key) for index in paged]
            if None in found:
                break
            for index, block in zip(paged, found, strict=True):
                assert block is not None
                tables[index].append(block)
            count += 1
        return self._shorten(sequence, tables, count) if self._windows or self._records else Prefix(count, tables)

    def _shorten(self, sequence: Sequence, tables: list[list[int]], count: int) -> Prefix:
        """The longest part of `count` blocks that windows and states can provide too."""
        while count:
            key = self._key(sequence, count - 1)
            if self._records is None or self._records.find(key) is not None:
                seen = [self._seen(sequence, index, count) for index in self._windows]
                if None not in seen:
                    for index, blocks in zip(self._windows, seen, strict=True):
                        assert blocks is not None
                        tables[index] = blocks
                    tables = [table[:count] for table in tables]
                    return Prefix(count, tables, key if self._records is not None else None)
            count -= 1
        return self.nothing

    def _seen(self, sequence: Sequence, index: int, count: int) -> list[int] | None:
        """A window group's table of the first `count` blocks, of which the next token still sees the last ones."""
        first = self._first_seen(index, count * self.block_size)
        blocks = [self._pools[index].find(self._key(sequence, block)) for block in range(first, count)]
        return None if None in blocks else [GONE] * first + [block for block in blocks if block is not None]

    def _first_seen(self, index: int, num_tokens: int) -> int:
        """The first block that the token behind num_tokens tokens sees."""
        return self._groups[index].first_block(num_tokens, self.block_size)

    def can_admit(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether all known tokens of a sequence without blocks would fit now, the prefix being reused."""
        needed = -(-len(sequence.tokens) // self.block_size) - prefix.num_blocks
        for index, pool in enumerate(self._pools):
            if index not in self._windows and needed > pool.num_free - pool.num_unheld(prefix.tables[index]):
                return False
        arriving = prefix.num_arriving
        return all(self._num_arriving(index, arriving) <= self._pools[index].num_free for index in self._windows)

    def _num_arriving(self, index: int, num_tokens: int) -> int:
        """Blocks for what the token behind num_tokens tokens sees of them."""
        return -(-num_tokens // self.block_size) - self._first_seen(index, num_tokens) if num_tokens else 0

    def admit(self, sequence: Sequence, prefix: Prefix) -> None:
        """Give a sequence without blocks the prefix that find_prefix found for it just now."""
        held = sequence.held
        assert not any(held.tables)
        arriving = prefix.num_arriving
        for index, (pool, table) in enumerate(zip(self._pools, prefix.tables, strict=True)):
            held.num_gone[index] = table.count(GONE)
            for block in table[held.num_gone[index] :]:
                pool.hold(block)
        held.tables = [table.copy() for table in prefix.tables]
        held.num_committed = prefix.num_blocks
        held.generation = self._generation
        if arriving:
            held.num_gone = [self._first_seen(index, arriving) for index in range(len(self._pools))]
            for index, (pool, gone) in enumerate(zip(self._pools, held.num_gone, strict=True)):
                taken = [pool.take() for _ in range(self._num_arriving(index, arriving))]
                held.tables[index] = [GONE] * gone + taken
        if self._records is not None:
            held.state = self._records.arrive() if arriving else self._records.begin(prefix.key)

    # ---- steps ----

    def allocate(self, sequence: Sequence, num_tokens: int) -> list[list[int]] | None:
        """Append blocks until the sequence can hold num_tokens tokens. Returns the new blocks of each token group ([]
        when it already can); None, and nothing is changed, when there are not enough free blocks."""
        tables = sequence.held.tables
        if not tables:
            return []
        needed = -(-num_tokens // self.block_size) - len(tables[0])
        if needed <= 0:
            return []
        for pool in self._pools:
            if needed > pool.num_free:
                return None
        new = [[pool.take() for _ in range(needed)] for pool in self._pools]
        for table, blocks in zip(tables, new, strict=True):
            table += blocks
        return new

    def room(self, sequence: Sequence) -> int:
        """Tokens that the sequence can hold without taking blocks from others."""
        tables = sequence.held.tables
        return (len(tables[0]) + self.num_free_blocks) * self.block_size if tables else self.capacity

    def chunk(self, start: int, count: int, length: int) -> int:
        """How many of the `count` tokens behind `start` a step should compute, of a sequence of `length`. A state can
        only be kept as it is after a step, so steps end with a block where they can."""
        if self._records is None or not self.enable_prefix_caching or start + count < 2:
            return count
        end = min(start + count, length - 1) // self.block_size * self.block_size
        return end - start if start < end else count

    def schedule_state(self, sequence: Sequence) -> tuple[int, int]:
        """The records that the sequence's next step reads and writes."""
        assert self._records is not None and sequence.held.state is not None
        return self._records.schedule(sequence.held.state)

    def kept_inputs(self, sequence: Sequence) -> int:
        """How many accepted tokens, whose inputs the record keeps, the sequence's next step begins with. To be asked
        before `schedule_state`."""
        state = sequence.held.state
        return 0 if state is None or state.pending else state.num_kept

    def keep_inputs(self, sequence: Sequence, count: int) -> None:
        """So many drafts of the step that was committed last were accepted."""
        if sequence.held.state is not None:
            sequence.held.state.num_kept = count

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """The first num_tokens tokens are computed and accepted: make their full blocks findable, and give back what is
        behind a window.

        Called after the step has run, never when it is merely scheduled: a block must not be found by a request of the
        same step, nor after a step that failed; and a token that was only proposed must never be found.
        """
        held = sequence.held
        offers = self.enable_prefix_caching and held.generation == self._generation
        if offers:
            for index in range(held.num_committed, num_tokens // self.block_size):
                key = self._key(sequence, index)
                for pool, table in zip(self._pools, held.tables, strict=True):
                    if table[index] != GONE:
                        pool.publish(key, table[index])
                held.num_committed = index + 1
        if self._records is not None and held.state is not None and held.state.pending:
            whole = offers and num_tokens > 0 and num_tokens % self.block_size == 0
            self._records.commit(held.state, self._key(sequence, num_tokens // self.block_size - 1) if whole else None)
        if self._windows and self._behind is not None:
            self._behind[sequence.row] = num_tokens  # before these blocks are others'
        for index in self._windows:
            self._leave_behind(held, index, num_tokens)

    def _leave_behind(self, held: Holding, index: int, num_tokens: int) -> None:
        table, first = held.tables[index], self._first_seen(index, num_tokens)
        for block in range(held.num_gone[index], first):
            self._pools[index].release(table[block])
            table[block] = GONE
        held.num_gone[index] = max(first, held.num_gone[index])

    def drop_steps(self, sequence: Sequence) -> None:
        """Steps in flight are forgotten: the state is what it was before them."""
        if self._records is not None and sequence.held.state is not None:
            self._records.drop_pending(sequence.held.state)

    def free(self, sequence: Sequence) -> None:
        """Give back all that the sequence owns. The end of a sequence is released first, so that it is evicted first:
        without its beginning it could not be found anyway."""
        held = sequence.held
        self._release(held)
        held.tables = [[] for _ in self._pools]
        held.num_committed = 0
        held.num_gone = [0] * len(self._pools)
        held.state = None

    def _release(self, held: Holding) -> None:
        for pool, table in zip(self._pools, held.tables, strict=True):
            for block in reversed(table):
                if block != GONE:
                    pool.release(block)
        if self._records is not None and held.state is not None:
            self._records.end(held.state)

    # ---- other owners ----

    def lend(self, sequence: Sequence) -> Holding:
        """Take all that an ending sequence owns, for a reader that is not done with it; give it to `give_back`
        afterwards."""
        held = sequence.held
        lent = Holding(0)
        lent.tables, lent.state, lent.generation = held.tables, held.state, held.generation
        held.tables, held.state = [[] for _ in self._pools], None
        held.num_committed, held.num_gone = 0, [0] * len(self._pools)
        return lent

    def arrive(self, num_tokens: int) -> Holding | None:
        """Blocks for num_tokens tokens that a transfer is about to fill; None when there are not enough free ones."""
        needed = -(-num_tokens // self.block_size)
        if any(needed > pool.num_free for pool in self._pools):
            return None
        arriving = self.new_holding()
        arriving.tables = [[pool.take() for _ in range(needed)] for pool in self._pools]
        arriving.generation = self._generation
        return arriving

    def arrived(self, arriving: Holding, sequence: Sequence) -> None:
        """The blocks hold the first tokens of `sequence`: they can be found from now on, and belong to the prefix
        cache."""
        if self.enable_prefix_caching and arriving.generation == self._generation:
            for index in range(min(len(arriving.tables[0]), len(sequence.tokens) // self.block_size)):
                for pool, table in zip(self._pools, arriving.tables, strict=True):
                    pool.publish(self._key(sequence, index), table[index])
        self.give_back(arriving)

    def give_back(self, owned: Holding) -> None:
        """What was lent, or did not arrive after all."""
        self._release(owned)
        owned.tables, owned.state = [], None

    def reset_prefix_cache(self) -> None:
        """Forget every key. Sequences that run on keep their blocks but offer no more of them: what they compute may
        rest on keys and values from before the reset (made by other weights)."""
        self._generation += 1
        for pool in self._pools:
            pool.forget_keys()
        if self._records is not None:
            self._records.forget_checkpoints()

    def check(self, holdings: list[Holding]) -> None:
        """For tests: raises AssertionError unless these, and nothing else, own what is not free."""
        for index, pool in enumerate(self._pools):
            holders: dict[int, int] = {}
            for held in holdings:
                for block in held.tables[index] if held.tables else ():
                    if block != GONE:
                        holders[block] = holders.get(block, 0) + 1
            pool.check(holders)
        if self._records is not None:
            self._records.check([held.state for held in holdings if held.state is not None])

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Key of a full block, which must be the next unknown one or an earlier one. A cryptographic hash, because a
        collision would hand one user's text to another."""
        keys = sequence.held.keys
        if index < len(keys):
            return keys[index]
        assert index == len(keys)
        parent = keys[-1] if keys else blake2b(sequence.cache_salt.encode(), digest_size=_KEY_BYTES).digest()
        start = index * self.block_size
        tokens = array("i", sequence.tokens[start : start + self.block_size])
        key = blake2b(parent + tokens.tobytes(), digest_size=_KEY_BYTES).digest()
        keys.append(key)
        return key
