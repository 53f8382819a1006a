"""Skew, drift, breaks and noise against values worked out by hand or by definition; what moves between placements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from eplb.offline.difference import difference
from eplb.offline.stats import drift, ranks_of, skew, step_noise, window_records, windows
from eplb.offline.synthetic import synthetic_trace
from eplb.offline.trace import make_trace
from eplb.placement import Placement, linear_placement
from eplb.repair import even_shares, repair


def placement(
    ids: list[list[list[int]]], experts: int, alive: tuple[bool, ...] = (), domains: tuple[int, ...] = ()
) -> Placement:
    array = np.array(ids, dtype=np.int32)
    return Placement(0, experts, array, even_shares(array, experts), alive or (True,) * array.shape[1], domains)


# ---- skew --------------------------------------------------------------------------------------------------------


def test_skew_by_hand() -> None:
    load = np.array([[1.0] * 10, [0.0] * 9 + [10.0], [0.0] * 10])
    found = skew(load)
    assert found.gini == pytest.approx([0, 0.9, 0])
    assert found.top_over_mean == pytest.approx([1, 10, 1])
    assert found.top10_share == pytest.approx([0.1, 1, 0.1])
    assert found.idle.tolist() == [0, 9, 10]


@given(arrays.arrays(np.float64, (2, 7), elements=st.floats(0, 1e6)))
@settings(max_examples=50, deadline=None)
def test_gini_is_the_mean_difference_of_pairs(load: np.ndarray) -> None:
    for row, gini in zip(load, skew(load).gini, strict=True):
        pairs = sum(abs(a - b) for a, b in itertools.product(row, row))
        expected = pairs / (2 * len(row) * row.sum()) if row.sum() > 0 else 0
        assert gini == pytest.approx(expected, abs=1e-9)


# ---- drift -------------------------------------------------------------------------------------------------------


def test_equal_loads_share_their_mean_place() -> None:
    assert ranks_of(np.array([[5.0, 0, 0, 7, 5]])).tolist() == [[2.5, 0.5, 0.5, 4, 2.5]]


def test_spearman_by_hand() -> None:
    trace = make_trace([[[1, 2, 3]], [[10, 20, 30]], [[3, 2, 1]], [[1, 1, 1]]])
    found = drift(trace)
    assert found.spearman[:, 0] == pytest.approx([1, -1, 1])  # against equal loads there is no order: as before
    assert found.moved[:, 0] == pytest.approx([0, 1 / 3, 1 / 6])


def test_one_window_has_no_drift() -> None:
    found = drift(make_trace(np.ones((3, 2, 4))), records=3)
    assert found.spearman.shape == (0, 2)
    assert found.breaks == ()


def test_windows_leave_out_the_rest_but_never_everything() -> None:
    trace = make_trace(np.arange(5.0).reshape(5, 1, 1))
    assert [w.item() for w in windows(trace, 2)] == [1, 5]
    assert [w.item() for w in windows(trace, 9)] == [10]
    assert window_records(trace) == 1
    assert window_records(make_trace(np.ones((1000, 1, 1)))) == 100
    assert window_records(make_trace(np.ones((200, 1, 1)))) == 20
    assert window_records(make_trace(np.ones((50, 1, 1)), steps=[20] * 50)) == 5


def test_a_change_of_domain_is_found_where_it_is() -> None:
    shape = {"records": 40, "steps_per_record": 50, "tokens_per_step": 2000, "seed": 3}
    trace = synthetic_trace(range(4), 64, 4, **shape, switch_at=(20,))
    assert drift(trace, 2).breaks == (10,)
    assert drift(synthetic_trace(range(4), 64, 4, **shape), 2).breaks == ()


def test_random_draws_have_noise_one_and_bursts_more() -> None:
    rng = np.random.default_rng(0)
    part = rng.dirichlet(np.ones(64))
    tokens = rng.integers(1000, 4000, 200)  # steps of very different size are no noise
    calm = make_trace(np.stack([rng.multinomial(n, part) for n in tokens])[:, None])
    assert step_noise(calm)[0] == pytest.approx(1, abs=0.05)
    bursts = make_trace(np.stack([rng.multinomial(n // 8, part) * 8 for n in tokens])[:, None])
    assert step_noise(bursts)[0] == pytest.approx(8, rel=0.1)
    assert np.isnan(step_noise(make_trace([[[0.5, 1]], [[1, 1]]]))).all()
    assert np.isnan(step_noise(make_trace([[[1, 1]]]))).all()


# ---- synthetic traces --------------------------------------------------------------------------------------------


def test_a_synthetic_trace_is_the_same_again_and_counts_every_token() -> None:
    shape = {"records": 6, "steps_per_record": 30, "tokens_per_step": 100, "seed": 5}
    a, b = (synthetic_trace((3, 4), 16, 2, **shape) for _ in range(2))
    assert np.array_equal(a.load, b.load)
    assert (a.load.sum(2) == 30 * 100 * 2).all()
    assert a.tokens.tolist() == [3000] * 6
    assert a.layer_ids == (3, 4)
    assert "synthetic" in a.meta.source
    with pytest.raises(ValueError, match="top_k is 20; there are 16 experts"):
        synthetic_trace((3,), 16, 20, **shape)


# ---- what moves --------------------------------------------------------------------------------------------------


def test_moves_by_hand() -> None:
    """Rank 0 and 1 are a node, 2 and 3 another. Expert 0 is wanted on 1 (from 0, its node) and 2 (only another node has it)."""
    old = placement([[[0, 1], [2, 3], [4, 5], [6, 7]]], 8, domains=(0, 0, 1, 1))
    new = placement([[[1, 0], [0, 3], [0, 5], [2, 4]]], 8 - 2, domains=(0, 0, 1, 1))
    old6 = placement([[[0, 1], [2, 3], [4, 5], [4, 5]]], 6, domains=(0, 0, 1, 1))
    found = difference(old6, new)
    assert [tuple(move) for move in found.transfers] == [(0, 0, 0, 1), (0, 0, 0, 2), (0, 2, 1, 3)]
    assert found.received.tolist() == [0, 1, 1, 1]
    assert found.sent.tolist() == [2, 1, 0, 0]
    assert (found.links[0].tolist(), found.across_nodes) == ([0, 1, 1, 0], 2)
    assert (found.rounds, found.rounds_per_layer, found.changed_layers) == (2, 2, 1)
    with pytest.raises(ValueError, match="8 and 6 experts"):
        difference(old, new)


def test_a_slot_that_changes_within_its_rank_is_no_move() -> None:
    old, new = placement([[[0, 1], [2, 3]]], 4), placement([[[1, 0], [3, 2]]], 4)
    assert difference(old, new).num_moves == 0


def test_after_a_loss_experts_without_a_copy_come_from_the_checkpoint() -> None:
    old = linear_placement(2, 6, 3, 3)
    found = difference(old, repair(old, (True, True, False), 1))
    assert found.loaded.sum() == len([move for move in found.transfers if move.source == -1])
    assert all(move.source != 2 and move.target != 2 for move in found.transfers)


def test_other_shares_only() -> None:
    ids = np.array([[[0, 1], [0, 2]]], dtype=np.int32)
    old = placement(ids.tolist(), 3)
    share = np.array([[[0.25, 1], [0.75, 1]]], dtype=np.float32)
    new = Placement(1, 3, ids, share, (True, True))
    assert (difference(old, new).num_moves, difference(old, new).reshared) == (0, 2)


@given(st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_transfers_make_the_old_placement_the_new_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.stack([np.append(np.arange(6), rng.integers(0, 6, 2)) for _ in range(4)]).reshape(2, 2, 4, 2)
    old, new = (placement(rng.permuted(each.reshape(2, 8), axis=1).reshape(2, 4, 2).tolist(), 6) for each in ids)
    found = difference(old, new)
    for layer in range(2):
        for rank in range(4):
            has = set(old.experts_of(layer, rank)) | {
                move.expert for move in found.transfers if (move.layer, move.target) == (layer, rank)
            }
            assert set(new.experts_of(layer, rank)) <= has
    for move in found.transfers:
        assert move.expert in old.experts_of(move.layer, move.source)
        assert move.expert not in old.experts_of(move.layer, move.target)
    assert found.received.sum() == found.sent.sum() == found.num_moves
    assert found.rounds == max(found.received.max(), found.sent.max())
