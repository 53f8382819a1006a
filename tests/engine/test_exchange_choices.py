"""Two all-to-alls that live together, and rows in FP8 on their way: in rank processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_tiny
import pytest
from rank_cluster import Cluster
from rank_parts import Job, drive, make_plan

from engine.build import build_rank
from front.messages import Shutdown

JOBS = [Job([5 + i, 6, 7 * i + 2] * (1 + 3 * (i % 3)), 8 + i) for i in range(6)]  # prompts of 3 to 21 tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("exchange")).path


def tokens_of(cluster: Cluster) -> dict[int, list[int]]:
    cluster.wait_ready()
    for index, job in enumerate(JOBS):
        cluster.send(index % 2, job.message(index))
    cluster.wait_for(lambda _: cluster.finished == set(range(len(JOBS))))
    cluster.send(0, Shutdown())
    for process in cluster.processes:
        assert process.wait(20) == 0
    return cluster.outputs


@pytest.mark.parametrize(
    ("plan", "exact"),
    [
        pytest.param({"all2all_backend": "shm+shm_padded", "max_num_seqs": 4}, True, marks=pytest.mark.slow),
        ({"all2all_backend": "shm_padded+shm", "max_num_seqs": 4, "async_scheduling": True}, True),
        pytest.param({"all2all_backend": "shm", "dispatch_rows": "fp8"}, False, marks=pytest.mark.slow),
    ],
    ids=["ragged prefills, padded decodes", "the other way round, asynchronous", "fp8 rows"],
)
def test_ranks_equal_one_rank(checkpoint: Path, plan: dict[str, Any], exact: bool) -> None:
    """A prompt has more than four tokens, a decode step of a rank at most three."""
    cluster = Cluster(make_plan(checkpoint, data_parallel_size=2, **plan))
    try:
        ours = tokens_of(cluster)
    finally:
        cluster.close()
    expected = {index: got.tokens for index, got in enumerate(drive([build_rank(make_plan(checkpoint))], JOBS))}
    if exact:
        assert ours == expected
    else:  # rows are rounded on their way: other numbers, as many tokens
        assert {index: len(tokens) for index, tokens in ours.items()} == {
            index: len(tokens) for index, tokens in expected.items()
        }
