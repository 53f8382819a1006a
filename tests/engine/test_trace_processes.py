"""Timelines of real processes: `LLM.start_profile`, and `moesaic generate --trace`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from trace_checks import check_trace, hidden, lanes_of, read_trace

from front.params import SamplingParams
from moesaic import LLM
from moesaic.cli import cli

PROMPTS = [[5 + i, *range(300, 340 + i)] for i in range(6)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def test_one_rank_in_this_process(tmp_path: Path) -> None:
    with LLM(dtype="float32", threads_per_rank=1) as llm:
        with pytest.raises(ValueError, match="no profile is being taken"):
            llm.stop_profile()
        with pytest.raises(ValueError, match=r"no/such/file.json: No such file or directory"):
            llm.start_profile("no/such/file.json")
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
        llm.start_profile(tmp_path / "a.json")
        with pytest.raises(ValueError, match="taken already"):
            llm.start_profile(tmp_path / "b.json")
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
        summary = llm.stop_profile()
        assert summary.file == str(tmp_path / "a.json") and summary.ranks == [0] and not summary.lost
        assert summary.events == len(check_trace(read_trace(tmp_path / "a.json"))) > 100


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_processes_that_overlap(tmp_path: Path, backend: str, asynchronous: bool) -> None:
    options = {"all2all_backend": backend, "async_scheduling": asynchronous, "enable_dbo": "on"}
    with LLM(
        dtype="float32",
        threads_per_rank=1,
        data_parallel_size=2,
        dbo_decode_token_threshold=1,
        dbo_prefill_token_threshold=1,
        **options,
    ) as llm:
        for name in ("a.json.gz", "b.json"):
            llm.start_profile(tmp_path / name)
            llm.generate(PROMPTS, PARAMS)
            summary = llm.stop_profile()
            assert summary.ranks == [0, 1] and summary.dropped == 0
            trace = read_trace(tmp_path / name)
            check_trace(trace)
            for rank in range(2):
                assert len(lanes_of(trace, rank)) == 2 and hidden(trace, rank) > 0
            assert trace["otherData"]["clocks"] == {"0": "the reference", "1": "the reference"}


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    words = ["generate", "-p", "Once upon a time", "--max-tokens", "8", "-dp", "2", "--trace", str(path), "--json"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["finish_reason"] == "length"
    assert str(path) in result.stderr and "2 rank(s)" in result.stderr
    assert check_trace(read_trace(path))
