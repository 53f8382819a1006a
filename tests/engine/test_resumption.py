"""A step that a loss has broken off goes on at the layer where it was, with the same tokens (float32)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import hf_tiny
import pytest
import torch
from cache_files import CacheFiles
from rank_parts import Job
from survivors import Survivors, undisturbed

from configs.speculation import SpeculativeConfig
from models.tiny import CHECKPOINT

torch.set_num_threads(1)

NUM_SLOTS = 8  # every rank has every expert
# Turns of a step of three layers in which all ranks have one in common: from the second layer's exchanges to the last
# one's. Behind that the others have ended the step.
KEPT = range(4, 7)
JOBS = [Job([5 + 3 * i, 7, 11 * i % 90 + 2, *range(2, 2 + i)], 12) for i in range(7)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("resumption")).path


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[int, list[int]]:
    return undisturbed(checkpoint, JOBS)


def start(checkpoint: Path, folder: Path, size: int = 3, **overrides: object) -> Survivors:
    cluster = Survivors(checkpoint, size, CacheFiles(folder), slots_per_rank=NUM_SLOTS, **overrides)
    for index in range(6):
        cluster.add(index, JOBS[index])
    cluster.rounds(5)
    return cluster


def resumed(cluster: Survivors) -> int:
    return sum(rank.stats.resumed for rank in cluster.ranks.values())


def kept(cluster: Survivors) -> list[int]:
    """The last layer that each rank has kept of its step; 0: none."""
    return [max(0, *rank._runner._kv.residuals.layers) for rank in cluster.ranks.values()]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("turns", range(14))
def test_of_one_rank(
    checkpoint: Path, expected: dict[int, list[int]], tmp_path: Path, turns: int, asynchronous: bool
) -> None:
    """turns: it dies before its record, waiting for it, in the first exchange, ..., after the step."""
    cluster = start(checkpoint, tmp_path, async_scheduling=asynchronous)
    victim = cluster.ranks[1]._runner._kv.residuals
    cluster.round(victim=1, turns=turns)
    layers = [*kept(cluster), max(0, *victim.layers)]
    assert turns not in range(3, 9) or max(layers) - min(layers) <= 1
    cluster.round()
    cluster.tell_all()
    cluster.replay()
    cluster.finish()
    assert resumed(cluster) == 6 * (turns in KEPT)
    cluster.start(1)
    cluster.tell_all()
    cluster.add(6, JOBS[6])
    cluster.finish()
    assert cluster.released == expected


@pytest.mark.parametrize("turns", range(3, 12))
def test_of_all_ranks(checkpoint: Path, expected: dict[int, list[int]], tmp_path: Path, turns: int) -> None:
    cluster = start(checkpoint, tmp_path)
    cluster.round(victim=2, turns=turns)
    for rank in (0, 1):
        cluster.kill(rank)
    for rank in range(3):
        cluster.start(rank)
    cluster.tell_all()
    cluster.replay_all()
    cluster.finish()
    assert resumed(cluster) == 6 * (turns in KEPT)
    cluster.add(6, JOBS[6])
    cluster.finish()
    assert cluster.released == expected


def test_losses_in_a_row(checkpoint: Path, expected: dict[int, list[int]], tmp_path: Path) -> None:
    """The second one while the step goes on that the first has broken off."""
    cluster = start(checkpoint, tmp_path, 4)
    cluster.add(6, JOBS[6])
    cluster.rounds(2)
    for victim, turns in ((1, 4), (2, 9), (3, 6)):
        cluster.round(victim=victim, turns=turns)
        cluster.tell_all()
        cluster.replay()
        cluster.round()
    cluster.finish()
    assert cluster.released == expected
    assert resumed(cluster) > 7


def test_a_new_request_waits_for_one_step(checkpoint: Path, expected: dict[int, list[int]], tmp_path: Path) -> None:
    cluster = start(checkpoint, tmp_path)
    cluster.round(victim=1, turns=6)
    cluster.add(6, JOBS[6])
    cluster.tell_all()
    cluster.replay()
    cluster.rounds(3)
    assert resumed(cluster) == 6
    cluster.finish()
    assert cluster.released == expected


def test_nobody_waits_when_nobody_is_lost(
    checkpoint: Path, expected: dict[int, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A rank that returns changes the epoch too: a new request has its first token as soon as where no step is resumed."""
    rounds = [returns(checkpoint, expected, tmp_path_factory.mktemp("caches"), on) for on in (True, False)]
    assert rounds[0] == rounds[1]


def returns(checkpoint: Path, expected: dict[int, list[int]], folder: Path, resume_steps: bool) -> int:
    """Rounds until a request is answered that comes before the first step of the epoch."""
    cluster = start(checkpoint, folder, resume_steps=resume_steps)
    cluster.kill(1)
    cluster.tell_all()
    cluster.replay()
    cluster.rounds(3)
    before = resumed(cluster)
    cluster.start(1)
    cluster.tell_all()
    while any(rank._team.epoch < 2 for rank in cluster.ranks.values()):
        cluster.round()
    cluster.add(6, JOBS[6])  # before the first step of the epoch
    rounds = 0
    while 6 in cluster.awaited:
        cluster.round()
        rounds += 1
    cluster.finish()
    assert resumed(cluster) == before and cluster.released == expected
    return rounds


def test_a_step_of_too_many_tokens_is_not_kept(
    checkpoint: Path, expected: dict[int, list[int]], tmp_path: Path
) -> None:
    cluster = Survivors(checkpoint, 3, CacheFiles(tmp_path), slots_per_rank=NUM_SLOTS)
    for rank in cluster.ranks.values():
        assert rank._runner._kv.residuals.num_tokens == 64
        rank._runner._kv.residuals.num_tokens = 1  # two requests on each
    for index in range(6):
        cluster.add(index, JOBS[index])
    cluster.rounds(5)
    cluster.round(victim=1, turns=6)
    cluster.tell_all()
    cluster.replay()
    cluster.add(6, JOBS[6])
    cluster.finish()
    assert resumed(cluster) == 0
    assert cluster.released == expected


@pytest.mark.parametrize("method", ["mtp", "prediction"])
@pytest.mark.parametrize("turns", [1, 4, 5, 8])
def test_drafts_are_left_out(tmp_path: Path, method: Literal["mtp", "prediction"], turns: int) -> None:
    """Of a step that verifies drafts the known tokens go on, without them; with MTP also while drafts were made."""
    jobs = [Job([5 + 3 * i, 7, 11 + i], 24) for i in range(7)]
    expected = undisturbed(CHECKPOINT, jobs)
    for index, job in enumerate(jobs):
        job.params = {"prediction_token_ids": tuple(expected[index])}
    drafts = SpeculativeConfig(method=method, num_speculative_tokens=2, adaptive=False)
    cluster = Survivors(CHECKPOINT, 3, CacheFiles(tmp_path), slots_per_rank=16, speculation=drafts)
    for index in range(6):
        cluster.add(index, jobs[index])
    cluster.rounds(4)
    assert all(rank.stats.spec_draft_tokens > 0 for rank in cluster.ranks.values())
    cluster.round(victim=1, turns=turns)
    cluster.tell_all()
    cluster.replay()
    cluster.rounds(2)
    assert resumed(cluster) == 6 * (turns in ((4, 5, 8) if method == "mtp" else (4, 5)))
    cluster.add(6, jobs[6])
    cluster.finish()
    assert cluster.released == expected
