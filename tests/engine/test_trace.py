"""Timelines: what is recorded, what becomes of it, and that it changes nothing."""

from __future__ import annotations

import math
from pathlib import Path

import hf_tiny
import pytest
import torch
from amounts import examples
from balanced import RESTLESS, status
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from overlapped import SPLIT, THREE
from rank_parts import Job, drive, mailbox_ranks, make_plan
from survivors import Survivors
from trace_checks import check_trace, hidden, lanes_of, packed, read_trace

from engine.build import build_rank
from engine.rank import Rank
from ep.instrumented import InstrumentedLane
from ep.recorder import EVENT_BYTES, Event, Kind, Recorder, events_of
from front.messages import ProfileCommand, ProfilePart
from front.profiling import Profile, ProfileRefused, Profiling
from front.trace_file import Summary, clock_offsets, digest_of, write_trace
from models.tiny import CHECKPOINT

torch.set_num_threads(1)

START = ProfileCommand(profile_id=1, kind="start", capacity=1 << 14)
STOP = ProfileCommand(profile_id=1, kind="stop")
JOBS = [Job([5 + 3 * i, 7, 11 * i % 90 + 2, *range(2, 2 + 3 * i)], 6 + i % 4) for i in range(6)]
LANE = ["attention", "dispatch", "wait", "experts", "combine", "wait"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("trace")).path


def parts_of(ranks: list[Rank], stop: ProfileCommand = STOP) -> list[ProfilePart]:
    parts = []
    for rank in ranks:
        rank.submit(stop)
        (part,) = (news for news in rank.take_events() if isinstance(news, ProfilePart))
        parts.append(part)
    return parts


def written(tmp_path: Path, parts: list[ProfilePart], name: str = "trace.json") -> tuple[Summary, Path]:
    path = tmp_path / name
    return write_trace(Profile(path, parts, [], 0.5)), path


# ---- what is recorded ----


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_trace_of_steps(checkpoint: Path, tmp_path: Path, size: int, asynchronous: bool) -> None:
    ranks = (
        mailbox_ranks(checkpoint, size, async_scheduling=asynchronous)
        if size > 1
        else [build_rank(make_plan(checkpoint, async_scheduling=asynchronous))]
    )
    expected = [got.tokens for got in drive(ranks, JOBS)]
    for rank in ranks:
        rank.submit(START)
    assert [got.tokens for got in drive(ranks, JOBS)] == expected
    summary, path = written(tmp_path, parts_of(ranks))
    assert [got.tokens for got in drive(ranks, JOBS)] == expected
    slices = check_trace(read_trace(path))
    assert summary.events == len(slices) and summary.dropped == 0 and summary.ranks == list(range(size))
    for rank_id in range(size):
        (lane,) = lanes_of(read_trace(path), rank_id).values()
        assert [item["name"] for item in lane] == LANE * (len(lane) // len(LANE)) and lane
        layers = [item["args"]["layer"] for item in lane]
        assert layers[: len(layers) // 2] == sorted(set(layers))[:1] * 6 + layers[6 : len(layers) // 2]
    names = {item["name"] for item in slices}
    assert names == {*LANE, "scheduling", "agreement", "preparing", "forward", "sampling"}
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("dbo", [SPLIT, THREE])
def test_lanes_overlap(checkpoint: Path, tmp_path: Path, dbo: object) -> None:
    """While a lane's tokens are in flight, another one computes; with one lane nobody does."""
    ranks = mailbox_ranks(checkpoint, 2, dbo=dbo)
    for rank in ranks:
        rank.submit(START)
    drive(ranks, JOBS)
    _, path = written(tmp_path, parts_of(ranks))
    found = read_trace(path)
    check_trace(found)
    for rank_id in range(2):
        lanes = lanes_of(found, rank_id)
        assert len(lanes) == (2 if dbo is SPLIT else 3)
        computing = sum(item["dur"] for lane in lanes.values() for item in lane if item["name"] == "experts")
        assert hidden(found, rank_id) > 0.5 * computing
    alone = mailbox_ranks(checkpoint, 2)
    for rank in alone:
        rank.submit(START)
    drive(alone, JOBS)
    _, path = written(tmp_path, parts_of(alone), "alone.json")
    assert hidden(read_trace(path), 0) == 0


def test_slices_add_up_to_the_forward_pass(checkpoint: Path, tmp_path: Path) -> None:
    rank = build_rank(make_plan(checkpoint))
    rank.submit(START)
    drive([rank], JOBS)
    _, path = written(tmp_path, parts_of([rank]))
    slices = check_trace(read_trace(path))
    for forward in (item for item in slices if item["name"] == "forward"):
        inside = [item for item in slices if item["cat"] == "lane" and item["args"]["step"] == forward["args"]["step"]]
        assert all(
            forward["ts"] <= item["ts"] + 1e-3 and item["ts"] + item["dur"] <= forward["ts"] + forward["dur"] + 1e-3
            for item in inside
        )
        first = min(inside, key=lambda item: item["ts"])
        assert first["name"] == "attention" and math.isclose(first["ts"], forward["ts"], abs_tol=2e-3)


def test_without_a_profile_the_exchanges_are_untouched(checkpoint: Path) -> None:
    rank = build_rank(make_plan(checkpoint))
    drive([rank], JOBS[:1])
    model = rank._timeline._model
    assert model is not None

    def lanes() -> list[object]:
        return [lane for _, moe in model.moe_layers for lane in moe.lanes]

    before = lanes()
    assert before and not any(isinstance(lane, InstrumentedLane) for lane in before)
    rank.submit(START)
    rank.submit(START)  # whoever wanted the first one is gone
    assert [lane.inner for lane in lanes() if isinstance(lane, InstrumentedLane)] == before
    parts_of([rank])
    assert lanes() == before


def test_a_rank_that_was_not_told_to_begin_says_so(checkpoint: Path) -> None:
    rank = build_rank(make_plan(checkpoint))
    assert [part.started for part in parts_of([rank])] == [False]
    rank.submit(START)
    assert [part.started for part in parts_of([rank], ProfileCommand(profile_id=2, kind="stop"))] == [False]
    assert [part.started for part in parts_of([rank])] == [True]


def test_memory_is_bounded(checkpoint: Path, tmp_path: Path) -> None:
    rank = build_rank(make_plan(checkpoint))
    rank.submit(ProfileCommand(profile_id=1, kind="start", capacity=100))
    drive([rank], JOBS)
    parts = parts_of([rank])
    assert len(parts[0].events) == 100 * EVENT_BYTES and parts[0].num_dropped > 100
    summary, path = written(tmp_path, parts)
    assert summary.events == 100 and summary.dropped == parts[0].num_dropped
    found = read_trace(path)
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 100
    (note,) = [event for event in found["traceEvents"] if event["ph"] == "i"]
    assert str(parts[0].num_dropped) in note["name"]
    assert found["otherData"]["dropped_events"] == {"0": parts[0].num_dropped}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_experts_that_change_ranks_show(tmp_path: Path, asynchronous: bool) -> None:
    jobs = [Job([5 + 3 * i, 7, 11 * i % 90 + 2], 24) for i in range(4)]
    ranks = mailbox_ranks(CHECKPOINT, 2, slots_per_rank=10, eplb=RESTLESS, dbo=SPLIT, async_scheduling=asynchronous)
    for rank in ranks:
        rank.submit(START)
    drive(ranks, jobs)
    assert status(ranks[0]).moves > 0
    _, path = written(tmp_path, parts_of(ranks))
    slices = check_trace(read_trace(path))
    assert "balancing" in {item["name"] for item in slices}


@pytest.mark.parametrize("dbo", [None, SPLIT])
@pytest.mark.parametrize("turns", [1, 3, 99])
def test_a_lost_rank_loses_only_its_own_part(checkpoint: Path, tmp_path: Path, turns: int, dbo: object) -> None:
    cluster = Survivors(checkpoint, 3, slots_per_rank=4, dbo=dbo)
    for index in range(5):
        cluster.add(index, JOBS[index])
    for rank in cluster.ranks.values():
        rank.submit(START)
    for _ in range(4):
        cluster.round()
    cluster.round(victim=1, turns=turns)
    cluster.tell_all()
    cluster.replay()
    cluster.finish()
    parts = parts_of(list(cluster.ranks.values()))
    assert [part.rank for part in parts] == [0, 2] and all(part.started for part in parts)
    _, path = written(tmp_path, parts)
    slices = check_whole(path)
    epochs = {item["args"]["epoch"] for item in slices if item["name"] == "agreement"}
    assert epochs == {0, 1}
    late = [item for item in slices if item["name"] == "experts"][-1]
    change = min(item["ts"] for item in slices if item["name"] == "agreement" and item["args"]["epoch"] == 1)
    assert late["ts"] > change, "the lanes of the new epoch are recorded too"


def check_whole(path: Path) -> list[dict[str, object]]:
    """A step that was broken off has left dispatches without a combine; they have no arrow."""
    return check_trace(read_trace(path))  # type: ignore[return-value]


# ---- the front's side ----


def test_one_profile_at_a_time(tmp_path: Path) -> None:
    profiling = Profiling()
    with pytest.raises(ProfileRefused, match="no profile is being taken"):
        profiling.stop()
    with pytest.raises(ProfileRefused, match="no rank serves"):
        profiling.start(tmp_path / "a.json", [])
    with pytest.raises(ProfileRefused, match="1 to 1048576 events of each rank, not 0"):
        profiling.start(tmp_path / "a.json", [0], 0)
    with pytest.raises(ProfileRefused, match=r"nowhere/a.json: No such file or directory"):
        profiling.start(tmp_path / "nowhere" / "a.json", [0])
    messages = profiling.start(tmp_path / "a.json", [0, 2])
    assert [rank for rank, _ in messages] == [0, 2]
    with pytest.raises(ProfileRefused, match=r"taken already, into .*a.json"):
        profiling.start(tmp_path / "b.json", [0])
    profiling.stop()
    with pytest.raises(ProfileRefused, match="being stopped already"):
        profiling.stop()


def test_parts_of_lost_and_of_strange_ranks(tmp_path: Path) -> None:
    profiling = Profiling()

    def part(rank: int, profile_id: int = 1, started: bool = True) -> ProfilePart:
        return ProfilePart(profile_id=profile_id, rank=rank, started=started)

    profiling.start(tmp_path / "a.json", [0, 1, 2, 3])
    profiling.lose(1)
    profiling.lose(7)
    assert [rank for rank, _ in profiling.stop()] == [0, 2, 3]
    profiling.take(part(0))
    profiling.take(part(1))  # of its next life
    profiling.take(part(2, profile_id=5))
    assert not profiling.complete
    profiling.take(part(2, started=False))
    profiling.lose(0)  # its part has come
    profile = profiling.finish()  # rank 3 has not answered
    assert [item.rank for item in profile.parts] == [0] and profile.lost == [1, 2, 3]
    assert profiling.path is None
    profiling.start(tmp_path / "b.json", [0])
    profiling.take(part(0))  # of the profile before
    assert not profiling.complete


# ---- several machines ----


def agreements(offset: int, delays: list[tuple[int, int]]) -> tuple[list[Event], list[Event]]:
    """Of two ranks, the second with a clock that is `offset` ahead. delays: how long before the end of the exchange each
    came to it."""
    ours, theirs = [], []
    for step, (own, other) in enumerate(delays):
        begun = 10**6 * step + max(own, other)
        ours.append(Event(begun - own, begun + 30, step, 0, 0, Kind.AGREEMENT, 0))
        theirs.append(Event(begun - other + offset, begun + 20 + offset, step, 0, 0, Kind.AGREEMENT, 0))
    return ours, theirs


def two_machines(of_ranks: tuple[list[Event], list[Event]]) -> list[ProfilePart]:
    return [
        ProfilePart(profile_id=1, rank=rank, started=True, events=packed(events), host="h", clock=f"c{rank}")
        for rank, events in enumerate(of_ranks)
    ]


@hypothesis_settings(max_examples=examples(50), deadline=None)
@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 9999)), min_size=1))
def test_clocks_of_two_machines(offset: int, delays: list[tuple[int, int]]) -> None:
    parts = two_machines(agreements(offset, delays))
    found = clock_offsets(parts, {part.rank: digest_of(part) for part in parts})
    assert found["c0"] == (0, 0)
    error = found["c1"].error
    assert error is not None and abs(found["c1"].ns + offset) <= error + 1
    assert error <= 10000 + 30


def test_machines_that_agreed_are_laid_over_each_other(tmp_path: Path) -> None:
    _, path = written(tmp_path, two_machines(agreements(10**14, [(500, 600), (70, 80), (3, 4000)])))
    slices = check_trace(read_trace(path))
    assert {item["pid"] for item in slices} == {0, 1}, "a process per node"
    assert all(
        abs(one["ts"] + one["dur"] - other["ts"] - other["dur"]) < 1
        for one in slices
        for other in slices
        if one["args"] == other["args"]
    )
    assert "moved by -100000000.0" in read_trace(path)["otherData"]["clocks"]["1"]


def test_machines_that_never_agreed(tmp_path: Path) -> None:
    strange = [Event(10**12, 10**12 + 5, 3, 2, 1, Kind.EXPERTS, 0)]
    _, path = written(tmp_path, two_machines((agreements(0, [(5, 5)])[0], strange)))
    found = read_trace(path)
    check_trace(found)
    assert "unknown" in found["otherData"]["clocks"]["1"]
    assert max(event.get("ts", 0) for event in found["traceEvents"]) < 1


def test_an_empty_trace_is_one(tmp_path: Path) -> None:
    summary, path = written(tmp_path, [], "none.json.gz")
    assert check_trace(read_trace(path)) == [] and summary.events == 0


# ---- the record ----


def test_what_is_recorded_is_read_again() -> None:
    recorder = Recorder(3)
    events = [Event(10 + i, 20 + i, 1 << 40, 7, 300, Kind.EXPERTS, 200) for i in range(5)]
    for event in events:
        recorder.add(event.kind, event.start, event.end, event.step, event.amount, event.layer, event.lane)
    raw, dropped = recorder.finish()
    assert list(events_of(raw)) == events[:3] and dropped == 2
    recorder.add(Kind.EXPERTS, 1, 2, 3)  # too late, and harmless
    with pytest.raises(ValueError, match="cut off"):
        list(events_of(raw[:-1]))
