"""How many blocks a memory has room for: what is planned fits it, whatever the groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.spec import CacheGroup, CacheSizes, Field, cache_sizes
from configs.cache import CHECKPOINTS_PER_SEQUENCE, UNBOUNDED, blocks_within

KV = (Field("kv", (4,), "bfloat16"),)
STATE = (Field("state", (6,), "float32"),)
GROUPS = {
    "paged": CacheGroup("paged", (0, 1), KV),
    "window": CacheGroup("window", (2,), KV, 40),
    "state": CacheGroup("state", (3,), STATE),
}
BLOCK, MAX_TOKENS = 16, 64


@given(
    kinds=st.sets(st.sampled_from(["window", "state"])),
    has_paged=st.booleans(),
    num_bytes=st.integers(0, 1 << 22),
    num_seqs=st.integers(1, 64),
)
def test_what_is_planned_fits(kinds: set[str], has_paged: bool, num_bytes: int, num_seqs: int) -> None:
    spec = tuple(GROUPS[kind] for kind in sorted(kinds | ({"paged"} if has_paged else set())))
    blocks = blocks_within(num_bytes, spec, BLOCK, num_seqs, MAX_TOKENS)

    def sizes_of(count: int) -> CacheSizes:
        return cache_sizes(spec, BLOCK, count, num_seqs, MAX_TOKENS, 2, CHECKPOINTS_PER_SEQUENCE * num_seqs)

    def bytes_of(count: int) -> int:
        return sum(sizes_of(count).bytes_of(group) for group in spec)

    if blocks > 0:
        assert bytes_of(blocks) <= num_bytes
    if has_paged and "state" not in kinds:
        assert bytes_of(max(0, blocks) + 1) > num_bytes  # and not one more would
    if not has_paged and blocks > 0 and "window" in kinds:
        assert blocks == UNBOUNDED or sizes_of(blocks).num_window_blocks == blocks
