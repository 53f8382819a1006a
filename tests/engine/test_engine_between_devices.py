"""Whole ranks, as threads, over the backends for GPUs: their libraries are fakes, gloo is in NCCL's place."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_tiny
import pytest
import torch
from fake_cuda_graph import FakeGraphLibrary
from overlapped import SOMETIMES, SPLIT
from rank_parts import Job, drive, make_plan
from rank_threads import TIMEOUT, on_ranks
from use_fakes import use_fakes

from configs.dbo import DboPlan
from engine import build
from engine.build import build_rank
from engine.doorbell import SharedDoorbell
from engine.team import Groups, Opened, Opening
from ep.transport.device_group import DeviceGroup
from ep.transport.shm_group import shm_group
from front.messages import Shutdown
from native import Isa, isa, limit_isa

pytestmark = pytest.mark.fakes

JOBS = [Job([5 + i, 6, 7 * i + 2] * (1 + 3 * (i % 3)), 8 + i) for i in range(6)]  # prompts of 3 to 21 tokens


def tokens_on_ranks(folder: Path, checkpoint: Path, jobs: Sequence[Job], **choices: Any) -> dict[int, list[int]]:
    """What each job brings on two ranks."""
    plan = make_plan(checkpoint, data_parallel_size=2, **choices)
    bell, name, open_jobs = SharedDoorbell(), uuid.uuid4().hex, set(range(len(jobs)))  # of all ranks

    def act(group: DeviceGroup) -> dict[int, list[int]]:
        def meet(epoch: int, rank: int, size: int) -> Opening:
            return Opened(Groups(shm_group(folder, rank, size, TIMEOUT, name, epoch), group))

        rank = build_rank(plan, group.rank, meet, bell)
        mine = {index: job for index, job in enumerate(jobs) if index % 2 == group.rank}
        for index, job in mine.items():
            rank.submit(job.message(index))
        tokens: dict[int, list[int]] = {index: [] for index in mine}
        while not rank.done:
            for output in rank.step():
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    open_jobs.discard(output.request_id)
            if group.rank == 0 and not open_jobs and not rank.has_work:
                rank.submit(Shutdown())
        group.all_gather_ints([0]).wait()
        rank.close()
        return tokens

    with use_fakes():
        found = on_ranks(folder, 2, act)
    assert all(isinstance(part, dict) for part in found), found
    return {index: tokens for part in found if isinstance(part, dict) for index, tokens in part.items()}


@pytest.mark.parametrize("backend", ["nccl", "nvshmem", "nccl+nvshmem"])
def test_ranks_equal_one_rank(backend: str, tmp_path: Path) -> None:
    """With a pair: prompts by the one, decodes by the other."""
    checkpoint = hf_tiny.make_qwen3_moe(tmp_path / "model").path
    ours = tokens_on_ranks(tmp_path, checkpoint, JOBS, all2all_backend=backend, max_num_seqs=4)
    assert ours == {i: got.tokens for i, got in enumerate(drive([build_rank(make_plan(checkpoint))], JOBS))}


def test_deepep_takes_turns(tmp_path: Path) -> None:
    """bfloat16 is summed in another order on two ranks than on one: only the first tokens are sure to be the same."""
    checkpoint = hf_tiny.make_qwen3_moe(tmp_path / "model", hidden_size=2048, num_hidden_layers=2).path
    plan = {"dtype": "bfloat16", "max_num_seqs": 4}
    ours = tokens_on_ranks(
        tmp_path, checkpoint, JOBS, all2all_backend="deepep_high_throughput+deepep_low_latency", **plan
    )
    expected = drive([build_rank(make_plan(checkpoint, **plan))], JOBS)
    assert [len(ours[i]) for i in range(len(JOBS))] == [len(got.tokens) for got in expected]
    assert sum(ours[i][0] == got.tokens[0] for i, got in enumerate(expected)) >= len(JOBS) - 1


@pytest.mark.parametrize(
    ("dbo", "most"),
    [
        pytest.param(None, 16, id="whole", marks=pytest.mark.slow),
        pytest.param(None, 3, id="fewer tokens than sequences"),
        pytest.param(SPLIT, 16, id="split"),
        pytest.param(SOMETIMES, 16, id="sometimes", marks=pytest.mark.slow),
    ],
)
def test_decodes_in_graphs(dbo: DboPlan | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the fake of CUDA graphs too: decodes whole with their exchanges, prompts in pieces or, split, as they are written."""
    before = isa()
    limit_isa(Isa.NONE)  # native kernels are no operations of torch: the fake does not see them
    monkeypatch.setattr(build, "limit_isa", lambda level: None)
    libraries: list[FakeGraphLibrary] = []

    def library(device: torch.device) -> FakeGraphLibrary:
        libraries.append(FakeGraphLibrary())
        return libraries[-1]

    monkeypatch.setattr(build, "graph_library", library)
    checkpoint = hf_tiny.make_qwen3_moe(tmp_path / "model", hidden_size=2048, num_hidden_layers=2).path
    choices = {
        "all2all_backend": "deepep_high_throughput+deepep_low_latency", "dtype": "bfloat16", "dbo": dbo, "max_num_seqs": 4,
        "max_num_batched_tokens": most,
    }  # fmt: skip
    graphs = {"cudagraph_mode": "full_and_piecewise", "cudagraph_capture_sizes": (1, 2, 4, 16)}
    try:
        eager = tokens_on_ranks(tmp_path, checkpoint, JOBS, **choices)
        ours = tokens_on_ranks(tmp_path, checkpoint, JOBS, **choices, **graphs)
    finally:
        limit_isa(before)
    assert [len(ours[i]) for i in range(len(JOBS))] == [job.max_tokens for job in JOBS]
    pairs = [pair for i in range(len(JOBS)) for pair in zip(ours[i], eager[i], strict=True)]
    # Of bfloat16 a CPU may round sums of another number of rows in another way, and a sequence that has once another
    # token goes on in another way. Wrong numbers would agree by chance alone, in one of 97.
    assert sum(ours[i][0] == eager[i][0] for i in range(len(JOBS))) >= len(JOBS) - 1
    assert sum(a == b for a, b in pairs) >= 0.5 * len(pairs)
    assert len(libraries) == 2 and all(library.num_replays > 5 for library in libraries)


@pytest.mark.parametrize(
    ("backend", "graphs"),
    [
        ("deepep_high_throughput+deepep_low_latency", False),
        ("deepep_high_throughput+deepep_low_latency", True),
        ("deepep_v2", False),
        ("flashinfer_nvlink_one_sided", False),
    ],
)
def test_measured_overlap_leaves_the_ranks_alive(
    backend: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that meet measure whether a split pays, with prompts of far more tokens than the few of a pair: those go where real
    ones go. What was captured before, with one row, is no measure of them."""
    before = isa()
    limit_isa(Isa.NONE)
    monkeypatch.setattr(build, "limit_isa", lambda level: None)
    monkeypatch.setattr(build, "graph_library", lambda device: FakeGraphLibrary())
    checkpoint = hf_tiny.make_qwen3_moe(tmp_path / "model", hidden_size=2048, num_hidden_layers=2).path
    choices = {"all2all_backend": backend, "dtype": "bfloat16", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    captured = {"cudagraph_mode": "full_decode_only", "cudagraph_capture_sizes": (1, 2, 4)} if graphs else {}
    try:
        ours = tokens_on_ranks(tmp_path, checkpoint, JOBS[:2], dbo=DboPlan(), **choices, **captured)
    finally:
        limit_isa(before)
    assert [len(ours[i]) for i in range(2)] == [job.max_tokens for job in JOBS[:2]]
