"""What goes to a device, without one: uploads on the CPU's memory, with fake events."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import hf_tiny
import numpy as np
import pytest
import torch
from fake_cuda_graph import FakeGraphLibrary
from fake_events import FakeEvents as Asked
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_parts import Job, drive, make_plan

from engine import build
from engine.device import LateReadback, PinnedUpload, make_readback, make_upload, open_device, ran_out
from engine.step_memory import Limits, StepMemory
from native import Isa, isa, limit_isa

CPU = torch.device("cpu")


@dataclass
class FakeEvents:
    """Fake CUDA events that only note who asked."""

    log: list[str] = field(default_factory=list)

    def new(self) -> FakeEvents:
        return self

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def query(self) -> bool:
        return True


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=40), min_size=1, max_size=6))
def test_every_number_of_every_step_arrives(steps: list[list[int]]) -> None:
    """Steps of any size; what the host writes to its array afterwards does not."""
    upload = PinnedUpload(FakeEvents().new, pinned=False)
    target = torch.full((40,), -1)
    for numbers in steps:
        before = target.tolist()
        host = np.array(numbers, dtype=np.int64)
        upload.send(host, target)
        host[:] = 777
        assert target.tolist() == numbers + before[len(numbers) :]


def test_memory_is_written_again_only_when_its_copy_is_over() -> None:
    events = FakeEvents()
    upload, target = PinnedUpload(events.new, pinned=False), torch.zeros(8, dtype=torch.int64)
    for _ in range(4):
        upload.send(np.arange(6), target)
    assert events.log == ["record", "record", "synchronize", "record", "synchronize", "record"]
    upload.send(np.arange(0), target)  # nothing was given
    assert len(events.log) == 6


def test_a_readback_waits_until_its_event_says_so() -> None:
    """And looks again after that without a wait: two threads take the same."""
    events = Asked(looks=3)
    arrival = LateReadback(events.new, 5.0, pinned=False).fetch([torch.arange(3), torch.ones(2, 2)])
    assert events.made[0].recorded and not arrival.done()
    numbers, ones = arrival.take()
    assert events.made[0].num_looks == 4 and arrival.done()
    assert numbers.tolist() == [0, 1, 2] and ones.sum() == 4
    assert arrival.take()[0] is numbers
    assert not make_readback(CPU, 1.0).late


def test_a_capture_that_ran_out_of_memory_is_told_by_what_came_first() -> None:
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("capture failed")  # as capture_end does
    except RuntimeError as error:
        assert ran_out(error) and not ran_out(RuntimeError("another"))


def test_on_the_cpu_nothing_is_copied() -> None:
    assert make_upload(CPU) is None
    memory = StepMemory(Limits(4, 8, 8, 4), (0, 0, 0), (1,), 1, CPU, None)
    place = memory.place(2, 2)
    place.tokens_FT[0] = 3, 4
    assert place.token_tensors[0].tolist() == [3, 4]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=6))
def test_steps_that_are_copied_equal_those_that_are_not(steps: list[tuple[int, int, int]]) -> None:
    """Fields, tables and what else there is, of steps of any shape; padding too. Nothing is there before it is sent."""
    upload = PinnedUpload(FakeEvents().new, pinned=False)
    limits = Limits(8, 16, 16, 4, num_tables=2, scratch_blocks=(3, 4))
    memories = [StepMemory(limits, (0, 0, 9), (1, 5), 1, CPU, way) for way in (None, upload)]
    for number, (more_tokens, num_sequences, columns) in enumerate(steps):
        found = []
        for memory in memories:
            num_tokens = num_sequences + more_tokens if num_sequences else 0
            place = memory.place(num_tokens, num_sequences, rows=8 if num_tokens <= 8 else 0)
            place.tokens_FT[:, :num_tokens] = 100 * number + np.arange(3 * num_tokens).reshape(3, num_tokens)
            place.sequences_FB[:, :num_sequences] = np.arange(2 * num_sequences).reshape(2, num_sequences)
            memory.pad(place)
            table = np.arange(num_sequences * columns).reshape(num_sequences, columns)
            views = [memory.write_table(index, place, table + index) for index in range(2)]
            more = memory.more(np.arange(number))
            memory.send()
            tensors = *place.token_tensors, *place.sequence_tensors, *views, more
            rest = max(0, 8 - num_tokens)
            padding = [
                x.as_strided((rest,), (1,), x.storage_offset() + num_tokens) for x in place.token_tensors if rest
            ]
            found.append([x.tolist() for x in (*tensors, *padding)])
        assert found[0] == found[1]


def test_a_gpu_that_is_not_there_is_an_error_of_one_line() -> None:
    assert open_device("cpu", 3, 0) == CPU
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="finds no GPU here"):
            open_device("cuda", 0, 8)


@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
def test_a_rank_with_graphs_says_the_same(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole engine over the fake of CUDA graphs: prefills in chunks, decodes, preemption, prefix cache."""
    before = isa()
    limit_isa(Isa.NONE)  # native kernels are no operations of torch: the fake does not see them
    monkeypatch.setattr(build, "limit_isa", lambda level: None)
    library = FakeGraphLibrary()
    monkeypatch.setattr(build, "graph_library", lambda device: library)
    try:
        path = hf_tiny.make_qwen3(tmp_path).path
        jobs = [Job([1 + i, 2, 3, 4, 5 + i, 6, 7], 9 + i) for i in range(5)]
        plan = {"num_kv_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32}
        eager = [got.tokens for got in drive([build.build_rank(make_plan(path, **plan))], jobs)]
        rank = build.build_rank(make_plan(path, **plan, cudagraph_mode=mode, cudagraph_capture_sizes=(1, 2, 4, 8, 16)))
        assert [got.tokens for got in drive([rank], jobs)] == eager
        assert library.num_sessions == 1 and library.num_replays > 20
    finally:
        limit_isa(before)
