"""Before a rank says that it is ready, graphs are captured, by all ranks of a machine together, and it has practised."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hf_tiny
import pytest
from fake_cuda_graph import FakeGraphLibrary
from msgspec.structs import replace
from rank_parts import Job, drive, mailbox_ranks, make_plan

from engine import build
from engine.process.heartbeat import Heartbeat, beat_once, last_beat
from engine.process.local_ranks import LocalRanks
from engine.process.places import Places
from engine.process.warm_up import SILENT_SECONDS, practise, warm_up
from engine.rank import Rank
from front.messages import STEP_TOKENS, RankReady, RankStats
from native import Isa, isa, limit_isa

UNTOUCHED = replace(RankStats(), kv_blocks_total=64, step_tokens=[0] * (len(STEP_TOKENS) + 1))

pytestmark = pytest.mark.fakes


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGraphLibrary]:
    before = isa()
    limit_isa(Isa.NONE)  # native kernels are no operations of torch: the fake does not see them
    monkeypatch.setattr(build, "limit_isa", lambda level: None)
    library = FakeGraphLibrary()
    monkeypatch.setattr(build, "graph_library", lambda device: library)
    yield library
    limit_isa(before)


@pytest.fixture
def rank(library: FakeGraphLibrary, tmp_path: Path) -> Rank:
    path = hf_tiny.make_qwen3(tmp_path / "model").path
    plan = make_plan(path, max_num_seqs=2, cudagraph_mode="full_decode_only", cudagraph_capture_sizes=(1, 2))
    return build.build_rank(plan)


def test_a_rank_in_this_process_captures_first(rank: Rank, library: FakeGraphLibrary) -> None:
    ranks = LocalRanks(rank)
    assert library.num_sessions == 0
    assert [type(message) for message in ranks.receive(0.0)] == [RankReady]
    assert library.num_sessions == 1 and not rank.forming
    ranks.receive(0.0)
    assert library.num_sessions == 1


def test_it_waits_for_those_that_load(rank: Rank, library: FakeGraphLibrary, tmp_path: Path) -> None:
    loading = Heartbeat(tmp_path / "loading-1")
    thread = threading.Thread(target=warm_up, args=(rank, Places(tmp_path), 0, 2))
    thread.start()
    end = time.monotonic() + 10
    while last_beat(tmp_path / "loaded-0") is None and time.monotonic() < end:
        time.sleep(0.005)
    assert library.num_sessions == 0 and thread.is_alive()
    beat_once(tmp_path / "loaded-1")
    thread.join(10)
    loading.close()
    assert not thread.is_alive() and library.num_sessions == 1


def test_it_does_not_wait_for_one_that_gives_no_sign(rank: Rank, library: FakeGraphLibrary, tmp_path: Path) -> None:
    Heartbeat(tmp_path / "loading-1").close()
    now = [time.monotonic()]

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 1.0)

    began = now[0]
    warm_up(rank, Places(tmp_path), 0, 2, clock=lambda: now[0], sleep=sleep)
    assert SILENT_SECONDS <= now[0] - began < SILENT_SECONDS + 3 and library.num_sessions == 1


def test_practice_leaves_nothing_behind(tmp_path: Path) -> None:
    """Alone or with others, in the epoch that is about to begin or long before it: what comes afterwards is what always comes."""
    path = hf_tiny.make_qwen3_moe(tmp_path / "model").path
    jobs = [Job([5, 7, 11], 6), Job([3] * 20, 9, params={"temperature": 0.8})]
    expected = [got.tokens for got in drive(mailbox_ranks(path, 2), jobs)]
    ranks = mailbox_ranks(path, 2)
    for rank in ranks:
        practise(rank, alone=True)
        assert not rank.serving and not rank.has_work and rank.stats == UNTOUCHED
    assert [got.tokens for got in drive(ranks, jobs)] == expected
    (one,) = mailbox_ranks(path, 1)
    local = LocalRanks(one)
    local.receive(0.0)
    assert one.serving and not one.has_work and one.stats == UNTOUCHED
