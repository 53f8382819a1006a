"""Caches of several groups: windows that give blocks back, versioned state, checkpoints, and blocks with other owners."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.manager import GONE, CacheManager, Holding
from cache.records import ZEROS
from cache.spec import CacheGroup, Field, bytes_per_token, cache_sizes, check_spec, fixed_bytes

BLOCK, WINDOW, MAX_SEQS, MAX_TOKENS = 2, 5, 4, 6
KV = (Field("kv", (3,), "bfloat16"),)
STATE = (Field("conv", (2, 3), "bfloat16"), Field("state", (4, 4), "float32"))
SPEC = (
    CacheGroup("paged", (0, 3), KV),
    CacheGroup("window", (1,), KV, WINDOW),
    CacheGroup("state", (2,), STATE),
)


class Tokens:
    """A sequence without a scheduler."""

    def __init__(self, tokens: list[int], held: Holding) -> None:
        self.tokens, self.held, self.cache_salt = tokens, held, ""


def manager(num_blocks: int = 32, checkpoints: int = 3) -> CacheManager:
    sizes = cache_sizes(SPEC, BLOCK, num_blocks, MAX_SEQS, MAX_TOKENS, 2, checkpoints)
    return CacheManager(num_blocks, BLOCK, True, SPEC, sizes, checkpoints)


def begin(cache: CacheManager, tokens: list[int]) -> tuple[Tokens, int]:
    """An admitted sequence, and how many tokens of it were found."""
    sequence = Tokens(tokens, cache.new_holding())
    prefix = cache.find_prefix(sequence)
    cache.admit(sequence, prefix)
    return sequence, prefix.num_blocks * BLOCK


def test_bytes_follow_from_the_groups() -> None:
    sizes = cache_sizes(SPEC, BLOCK, 100, MAX_SEQS, MAX_TOKENS, steps_in_flight=1, num_checkpoints=7)
    assert bytes_per_token(SPEC) == 2 * 3 * 2
    assert sizes.num_window_blocks == MAX_SEQS * (3 + 2) + 2 * 3 and sizes.num_records == 1 + MAX_SEQS * 2 + 7
    assert fixed_bytes(SPEC, sizes) == sizes.num_window_blocks * BLOCK * 6 + sizes.num_records * (12 + 64)


@pytest.mark.parametrize(
    "spec",
    [(CacheGroup("paged", (0,), KV, 5),), (CacheGroup("window", (0,), KV),), (CacheGroup("state", (4,), STATE),)],
)
def test_what_makes_no_sense_is_refused(spec: tuple[CacheGroup, ...]) -> None:
    with pytest.raises(ValueError, match="cache group"):
        check_spec(spec, 4)


def test_blocks_behind_the_window_go_back() -> None:
    cache = manager()
    sequence, _ = begin(cache, list(range(12)))
    for end in (6, 12):
        cache.allocate(sequence, end)
        cache.schedule_state(sequence)
        cache.commit(sequence, end)
    paged, window = sequence.held.tables
    assert GONE not in paged and len(window) == 6
    assert [block == GONE for block in window] == [True] * 4 + [False] * 2  # token 12 sees 8 .. 12
    cache.check([sequence.held])


def test_a_prefix_reaches_as_far_as_every_group_does() -> None:
    cache = manager()
    first, _ = begin(cache, list(range(9)))
    for end in (4, 8, 9):
        cache.allocate(first, end)
        cache.schedule_state(first)
        cache.commit(first, end)
    states = {end: cache.find_prefix(Tokens([*range(end), 99], cache.new_holding())).num_blocks for end in range(2, 10)}
    assert states == {2: 0, 3: 0, 4: 2, 5: 2, 6: 2, 7: 2, 8: 4, 9: 4}  # states were kept after 4 and after 8 tokens
    cache.free(first)
    again, found = begin(cache, list(range(9)))
    assert found == 8 and again.held.state is not None and again.held.state.current != ZEROS
    cache.check([again.held])


def test_a_dropped_step_changes_no_state() -> None:
    cache = manager()
    sequence, _ = begin(cache, list(range(6)))
    cache.allocate(sequence, 6)
    read, written = cache.schedule_state(sequence)
    assert read == ZEROS and written != ZEROS
    following = cache.schedule_state(sequence)
    assert following[0] == written and following[1] not in (ZEROS, written)
    cache.drop_steps(sequence)
    assert cache.schedule_state(sequence)[0] == ZEROS
    cache.commit(sequence, 3)
    assert cache.schedule_state(sequence)[0] not in (ZEROS, following[0])
    cache.free(sequence)
    cache.check([])


def test_lent_and_arriving_blocks_have_owners() -> None:
    cache = manager()
    ended, _ = begin(cache, list(range(4)))
    cache.allocate(ended, 4)
    cache.schedule_state(ended)
    cache.commit(ended, 4)
    lent = cache.lend(ended)
    cache.free(ended)  # as the scheduler does at the end
    cache.check([lent])
    arriving = cache.arrive(7)
    assert arriving is not None
    cache.check([lent, arriving])
    cache.arrived(arriving, Tokens([50, 51, 52, 53, 54, 55, 56], cache.new_holding()))
    cache.give_back(lent)
    cache.check([])
    assert cache.arrive(1 << 20) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(12, 40), st.integers(0, 3))
def test_whatever_happens_nothing_is_lost_and_states_are_those_of_their_prefix(
    seed: int, num_blocks: int, checkpoints: int
) -> None:
    """A model of what the device has written: contents of blocks and records are the tokens that led to them."""
    rng, cache = random.Random(seed), manager(num_blocks, checkpoints)
    records: dict[int, tuple[int, ...]] = {ZEROS: ()}
    live: list[tuple[Tokens, list[int]]] = []  # and its computed length, then the lengths after each step in flight
    for _ in range(60):
        move = rng.random()
        if move < 0.3 and len(live) < MAX_SEQS:
            family = rng.randrange(2)
            sequence = Tokens([family * (i // 3) + i for i in range(rng.randint(1, 12))], cache.new_holding())
            prefix = cache.find_prefix(sequence)
            if cache.can_admit(sequence, prefix):
                cache.admit(sequence, prefix)
                found = prefix.num_blocks * BLOCK
                assert sequence.held.state is not None
                assert records[sequence.held.state.current] == tuple(sequence.tokens[:found])
                live.append((sequence, [found]))
        elif move < 0.7 and live:
            sequence, lengths = rng.choice(live)
            count = cache.chunk(lengths[-1], min(MAX_TOKENS, len(sequence.tokens) - lengths[-1]), len(sequence.tokens))
            if count > 0 and len(lengths) < 3 and cache.allocate(sequence, lengths[-1] + count) is not None:
                read, written = cache.schedule_state(sequence)
                assert records[read] == tuple(sequence.tokens[: lengths[-1]])
                lengths.append(lengths[-1] + count)
                records[written] = tuple(sequence.tokens[: lengths[-1]])
        elif move < 0.9 and live:
            sequence, lengths = rng.choice(live)
            if len(lengths) > 1:
                del lengths[0]
                cache.commit(sequence, lengths[0])
        elif move < 0.95:
            for sequence, lengths in live:
                cache.drop_steps(sequence)
                del lengths[1:]
        elif live:
            sequence, _ = live.pop(rng.randrange(len(live)))
            cache.free(sequence)
        cache.check([sequence.held for sequence, _ in live])


def test_what_is_free_is_said_of_the_paged_groups() -> None:
    """A window's pool is smaller: what it has left says nothing of how full the cache is."""
    cache = manager(num_blocks=1000)
    assert cache.num_free_blocks == 1000
    one, _ = begin(cache, list(range(12)))
    assert cache.allocate(one, 12) is not None and cache.num_free_blocks == 994
