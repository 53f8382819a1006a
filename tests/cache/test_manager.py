"""Blocks: who holds them, what can be found again, what is evicted first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.manager import CacheManager, Holding, Prefix
from engine.request import Request
from front.messages import AddRequest
from front.params import SamplingParams


def request(tokens: list[int], salt: str = "") -> Request:
    params = SamplingParams(max_tokens=8)
    message = AddRequest(request_id=0, token_ids=tokens, prompt_len=len(tokens), params=params, seed=0, cache_salt=salt)
    return Request(message, (0.0,), 1000, Holding())


def found(prefix: Prefix) -> list[int]:
    return prefix.tables[0]


def admitted(cache: CacheManager, tokens: list[int], salt: str = "") -> Request:
    """Admitted, given all its blocks, computed and committed."""
    new = request(tokens, salt)
    cache.admit(new, cache.find_prefix(new))
    assert cache.allocate(new, len(tokens)) is not None
    cache.commit(new, len(tokens))
    return new


def test_blocks_are_handed_out_as_needed_and_all_or_nothing() -> None:
    cache = CacheManager(4, 4)
    one = request(list(range(9)))
    cache.admit(one, cache.nothing)
    assert cache.allocate(one, 5) == [[0, 1]]
    assert cache.allocate(one, 8) == []
    assert cache.allocate(one, 17) is None and one.held.tables[0] == [0, 1] and cache.num_free_blocks == 2
    assert cache.allocate(one, 16) == [[2, 3]]
    cache.free(one)
    assert cache.num_free_blocks == 4 and one.held.tables == [[]]


def test_prefix_is_found_while_held_and_after_release() -> None:
    cache = CacheManager(8, 4)
    tokens = list(range(10))
    first = admitted(cache, tokens)
    again = request([*tokens[:8], 77])
    assert found(cache.find_prefix(again)) == first.held.tables[0][:2]
    assert found(cache.find_prefix(request(tokens[:8]))) == first.held.tables[0][:1]  # one token is left to compute
    assert found(cache.find_prefix(request([9, *tokens]))) == []
    cache.free(first)
    assert cache.num_free_blocks == 8
    assert cache.find_prefix(again).num_blocks == 2
    cache.admit(again, cache.find_prefix(again))
    assert cache.num_free_blocks == 6


def test_same_block_after_another_prefix_has_another_key() -> None:
    cache = CacheManager(8, 2)
    admitted(cache, [1, 2, 3, 4])
    assert found(cache.find_prefix(request([3, 4, 5]))) == []
    assert found(cache.find_prefix(request([5, 6, 3, 4, 5]))) == []


def test_salt_separates_and_off_means_off() -> None:
    cache = CacheManager(8, 2)
    admitted(cache, [1, 2, 3], salt="tenant a")
    assert found(cache.find_prefix(request([1, 2, 3]))) == []
    assert cache.find_prefix(request([1, 2, 3], "tenant a")).num_blocks == 1
    off = CacheManager(8, 2, enable_prefix_caching=False)
    admitted(off, [1, 2, 3])
    assert found(off.find_prefix(request([1, 2, 3]))) == []


def test_uncomputed_tokens_are_not_offered() -> None:
    cache = CacheManager(8, 4)
    one = request(list(range(12)))
    cache.admit(one, cache.nothing)
    cache.allocate(one, 12)
    assert found(cache.find_prefix(request(list(range(12))))) == []
    cache.commit(one, 7)
    assert found(cache.find_prefix(request(list(range(12))))) == one.held.tables[0][:1]


def test_empty_blocks_go_first_then_the_least_recently_released_tail_first() -> None:
    cache = CacheManager(6, 2)
    old, new = admitted(cache, [1, 2, 3, 4, 9]), admitted(cache, [5, 6, 7, 8, 9])
    old_blocks, new_blocks = old.held.tables[0][:2], new.held.tables[0][:2]
    cache.free(old)
    cache.free(new)
    taker = request([0] * 12)
    cache.admit(taker, cache.nothing)
    order = cache.allocate(taker, 12)
    assert order is not None
    assert order[0][2:] == [*reversed(old_blocks), *reversed(new_blocks)]
    assert found(cache.find_prefix(request([5, 6, 7]))) == []


def test_use_keeps_a_prefix_alive() -> None:
    cache = CacheManager(4, 2)
    for tokens in ([1, 2], [3, 4]):
        cache.free(admitted(cache, tokens))
    cache.free(admitted(cache, [1, 2, 0]))  # used again: now [3, 4] is the oldest
    taker = request([0] * 6)
    cache.admit(taker, cache.nothing)
    cache.allocate(taker, 6)
    assert cache.find_prefix(request([1, 2, 9])).num_blocks == 1
    assert found(cache.find_prefix(request([3, 4, 9]))) == []


def test_equal_content_computed_twice_is_kept_once() -> None:
    cache = CacheManager(4, 2)
    pair = [request([1, 2, 3]) for _ in range(2)]
    for one in pair:
        cache.admit(one, cache.find_prefix(one))
        cache.allocate(one, 3)
    for one in pair:
        cache.commit(one, 3)
    assert found(cache.find_prefix(request([1, 2, 3]))) == pair[0].held.tables[0][:1]
    for one in pair:
        cache.free(one)
    cache.check([])
    assert cache.find_prefix(request([1, 2, 3])).num_blocks == 1


def test_admission_counts_free_blocks_that_are_part_of_the_prefix_only_once() -> None:
    cache = CacheManager(3, 2)
    cache.free(admitted(cache, [1, 2, 3, 4]))
    long = request([1, 2, 3, 4, 5, 6, 7])
    assert not cache.can_admit(long, cache.find_prefix(long))
    short = request([1, 2, 3, 4, 5, 6])
    assert cache.can_admit(short, cache.find_prefix(short))


def test_reset_forgets_and_running_requests_offer_nothing_more() -> None:
    cache = CacheManager(8, 2)
    cache.free(admitted(cache, [1, 2, 3]))
    running = request([5, 6, 7, 8, 9])
    cache.admit(running, cache.nothing)
    cache.allocate(running, 5)
    cache.commit(running, 2)
    cache.reset_prefix_cache()
    cache.commit(running, 5)
    assert (
        found(cache.find_prefix(request([1, 2, 3]))) == [] and found(cache.find_prefix(request([5, 6, 7, 8, 9]))) == []
    )
    cache.free(running)
    cache.check([])
    assert found(cache.find_prefix(request([5, 6, 7, 8, 9]))) == []


def test_each_block_is_hashed_once() -> None:
    cache = CacheManager(8, 2)
    one = request([1, 2, 3, 4, 5])
    cache.find_prefix(one)
    cache.admit(one, cache.nothing)
    cache.allocate(one, 5)
    cache.commit(one, 5)
    keys = list(one.held.keys)
    assert len(keys) == 2
    cache.free(one)
    cache.find_prefix(one)
    assert all(a is b for a, b in zip(keys, one.held.keys, strict=True))


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        CacheManager(0, 16)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans()), max_size=30), st.integers(3, 10))
def test_found_blocks_hold_exactly_that_prefix(moves: list[tuple[int, int, bool]], num_blocks: int) -> None:
    """A model of the contents: what each block was last filled with, prefix and all."""
    cache = CacheManager(num_blocks, 2)
    contents: dict[int, tuple[int, ...]] = {}
    live: list[Request] = []
    for family, length, release in moves:
        if release and live:
            cache.free(live.pop(0))
        tokens = [family * (i // 4) + i for i in range(length)]
        new = request(tokens)
        prefix = cache.find_prefix(new)
        for index, block in enumerate(found(prefix)):
            assert contents[block] == tuple(tokens[: 2 * index + 2])
        if cache.can_admit(new, prefix):
            cache.admit(new, prefix)
            assert cache.allocate(new, length) is not None
            for index, block in enumerate(new.held.tables[0][: length // 2]):
                contents[block] = tuple(tokens[: 2 * index + 2])
            cache.commit(new, length)
            live.append(new)
        cache.check([one.held for one in live])
        held = {block for one in live for block in one.held.tables[0]}
        assert cache.num_free_blocks == num_blocks - len(held)
