"""Losing ranks on paper: the counts against brute force, and the guarantees F0 to F6 of any placement."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.coverage import uncovered
from eplb.offline.whatif import MAX_SETS, Sets, guarantees, loss, parse_kill, scan
from eplb.placement import Placement, linear_placement
from eplb.planner import plan

LAYERS, EXPERTS, RANKS, SLOTS = 3, 24, 6, 5
NODES = (0, 0, 0, 1, 1, 1)


def loads(seed: int = 0, experts: int = EXPERTS) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 1, (LAYERS, experts))


def placed(slots: int = SLOTS, seed: int = 0, min_copies: int = 1) -> Placement:
    return plan(loads(seed), RANKS, slots, failure_domains=NODES, min_copies=min_copies).placement


def lose(placement: Placement, ranks: list[int], **options: float) -> dict:
    slots = [placement.slots_per_rank] * placement.num_layers
    return loss(placement, ranks, loads(), slots, 44e6, 25.0, **options)  # type: ignore[arg-type]


# ---- which sets --------------------------------------------------------------------------------------------------


def test_what_can_be_killed() -> None:
    placement = placed()
    assert parse_kill("rank:3", placement).ranks == ((3,),)
    assert parse_kill("rank:5,1", placement).ranks == ((1, 5),)
    assert parse_kill("node:1", placement).ranks == ((3, 4, 5),)
    assert parse_kill("any-rank", placement).ranks == tuple((rank,) for rank in range(6))
    assert parse_kill("any-node", placement).ranks == ((0, 1, 2), (3, 4, 5))
    assert parse_kill("k=2", placement).ranks == tuple(itertools.combinations(range(6), 2))


def test_many_sets_are_sampled_and_say_so() -> None:
    placement = linear_placement(1, 128, 64, 2)
    sets = parse_kill("k=3", placement)
    assert not sets.complete and 1000 < len(sets.ranks) <= MAX_SETS
    assert parse_kill("k=3", placement).ranks == sets.ranks
    assert all(len(set(ranks)) == 3 for ranks in sets.ranks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank:6", "no live rank 6; they are 0 to 5"),
        ("rank:x", "must be rank:3"),
        ("rank:1,", "must be rank:3"),
        ("rank:", "must be rank:3"),
        ("node:2", "no live node 2"),
        ("nothing", "must be rank:3"),
        ("k=0", "k must be 1 or more, and less than the 6"),
        ("k=6", "k must be 1 or more, and less than the 6"),
        ("k=two", "k must be 1 or more, and less than the 6"),
    ],
)
def test_what_cannot_be_killed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_kill(text, placed())


def test_the_dead_cannot_die_again() -> None:
    ids = np.array([[[0, 1], [0, 1], [-1, -1]]])
    share = np.array([[[0.5, 0.5], [0.5, 0.5], [0, 0]]])
    placement = Placement(0, 2, ids, share, (True, True, False))
    with pytest.raises(ValueError, match="no live rank 2"):
        parse_kill("rank:2", placement)
    assert parse_kill("any-rank", placement).ranks == ((0,), (1,))


# ---- counts ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 7), st.integers(1, 4), st.integers(0, 3), st.data())
def test_uncovered_experts_against_brute_force(
    seed: int, ranks: int, slots: int, dead: int, data: st.DataObject
) -> None:
    """Random maps, some slots unused: an expert is uncovered when every rank that has it is lost."""
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(1, ranks * slots + 1))
    ids = np.full(ranks * slots, -1)
    chosen = rng.permutation(ranks * slots)
    ids[chosen[:experts]] = np.arange(experts)
    for slot in chosen[experts:]:
        ids[slot] = rng.integers(-1, experts)
    ids = ids.reshape(1, ranks, slots)
    counts = np.bincount(ids[ids >= 0], minlength=experts)
    share = np.where(ids >= 0, 1 / counts[ids], 0)
    placement = Placement(0, experts, ids, share, (True,) * ranks)
    lost = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    brute = [e for e in range(experts) if all(e not in ids[0, g] for g in range(ranks) if g not in lost)]
    assert scan(placement, Sets("these", (tuple(lost),)))["uncovered_worst"] == len(brute)
    assert uncovered(placement, lost)[0] == tuple(brute)


def test_a_scan_finds_the_worst_and_counts_the_harmless() -> None:
    placement = placed()
    scanned = scan(placement, parse_kill("k=2", placement))
    each = [np.mean([len(e) for e in uncovered(placement, pair)]) for pair in itertools.combinations(range(6), 2)]
    assert scanned["scenarios"] == 15 and scanned["complete"]
    assert scanned["uncovered_worst"] == pytest.approx(max(each))
    assert scanned["uncovered_mean"] == pytest.approx(np.mean(each))
    assert np.mean([len(e) for e in uncovered(placement, scanned["worst_ranks"])]) == pytest.approx(max(each))


# ---- one loss in full ----------------------------------------------------------------------------------------------


def test_a_loss_reads_exactly_what_was_lost_and_says_how_long() -> None:
    placement = placed()
    result = lose(placement, [2])
    gone = uncovered(placement, [2])
    assert result["uncovered_per_layer"] == [len(experts) for experts in gone]
    assert result["loaded"] == sum(result["uncovered_per_layer"])  # F3
    assert result["reload_gb"] == pytest.approx(result["loaded"] * 44e6 / 1e9)
    assert result["reload_s"] == pytest.approx(result["reload_gb_busiest"] / 25)
    part = np.mean([loads()[layer, list(experts)].sum() / loads()[layer].sum() for layer, experts in enumerate(gone)])
    assert result["load_part"] == pytest.approx(part)
    assert result["survivors"] == 5


def test_new_shares_and_moves_only_help() -> None:
    result = lose(placed(), [0])
    assert result["balance_even"] <= result["balance_repaired"] + 1e-6
    assert result["balance_repaired"] <= result["balance_moved"] + 1e-6
    assert result["moves"] <= 3 * LAYERS


def test_too_few_slots_say_how_many_it_takes() -> None:
    result = lose(placed(4), [1])  # 5 ranks of 4 slots for 24 experts
    assert not result["feasible"] and result["smallest_slots"] == 5
    assert "reload_s" not in result
    assert lose(placed(5), [1])["feasible"]  # F0: (6 - 1) * 5 >= 24


def test_a_layer_of_fewer_slots_decides_what_fits() -> None:
    placement = placed(5)
    assert not loss(placement, [1], loads(), [5, 4, 5], 1.0, 25.0)["feasible"]


def test_milliseconds_after_the_loss_are_of_the_survivors() -> None:
    seen = []

    def predict(part: np.ndarray) -> dict[str, float]:
        seen.append(part)
        return {"total_ms": 7.0}

    assert lose(placed(6), [1, 4], predict=predict)["step_ms_after"] == 7.0  # type: ignore[arg-type]
    assert seen[0].shape[1] == 4
    assert seen[0].sum((1, 2)) == pytest.approx([1] * LAYERS, abs=1e-4)


# ---- guarantees ----------------------------------------------------------------------------------------------------


def verdicts(placement: Placement, lost: list[int]) -> dict[str, bool | None]:
    slots = [placement.slots_per_rank] * placement.num_layers
    rows = guarantees(placement, slots, loss(placement, lost, loads(), slots, 1.0, 25.0))
    return {row["id"].split()[0]: row["holds"] for row in rows}


def test_two_copies_everywhere_need_no_reload_and_survive_a_node() -> None:
    placement = placed(10, min_copies=2)
    held = verdicts(placement, [3])
    assert held["F0"] and held["F1"] and held["F3"]
    if held["F5"]:
        assert scan(placement, parse_kill("any-node", placement))["without_reload"] == 2


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(5, 9), st.integers(0, 5))
def test_what_is_promised_is_kept(seed: int, slots: int, lost: int) -> None:
    placement = placed(slots, seed)
    result = lose(placement, [lost])
    held = verdicts(placement, [lost])
    assert held["F0"] == ((RANKS - 1) * slots >= EXPERTS) == result["feasible"]
    if held["F1"]:
        assert result["uncovered"] == 0
    assert held["F3"]
    assert result["same_again"]  # F6


def test_copies_in_one_domain_are_reported() -> None:
    ids = np.array([[[0, 1], [0, 1], [2, 3], [2, 3]]])
    placement = Placement(0, 4, ids, np.full((1, 4, 2), 0.5), (True,) * 4, (0, 0, 1, 1))
    rows = {row["id"]: row for row in guarantees(placement, [2], None)}
    assert rows["F5 failure domains"]["holds"] is False
    assert rows["F1 no reload after one rank"]["holds"] is True
    other = Placement(0, 4, ids, np.full((1, 4, 2), 0.5), (True,) * 4, (0, 1, 0, 1))
    assert {row["id"]: row for row in guarantees(other, [2], None)}["F5 failure domains"]["holds"] is True
