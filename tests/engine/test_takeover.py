"""Requests of a rank that has ended go on in another one with what it had computed of them, and get the same tokens."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepseek_tiny
import hf_tiny
import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from rank_parts import Job, drive, engine_choices, make_plan

from cache import shared
from engine.build import build_rank
from engine.rank import Rank

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6], [9, 8, 7, 6, 5, 4, 3, 2, 3, 4, 5], [5, 6, 7, 8, 9, 12]]
MOST = 14


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "grouped": hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("grouped")).path,
        "latent": deepseek_tiny.make_v3(tmp_path_factory.mktemp("latent")).path,
    }


@pytest.fixture(scope="module")
def ended() -> int:
    """The life of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid | 1 << 30


class Files:
    """Of the caches of ranks. `end`: what is in a rank's was left by a process that has ended."""

    def __init__(self, folder: Path, ended: int) -> None:
        self._folder, self._ended = folder, ended

    def __call__(self, rank: int) -> list[Path]:
        files = [self._folder / f"{rank}-{number}" for number in (0, 1)]
        for file in files:
            file.touch()
        return files

    def end(self, rank: int) -> None:
        for file in self(rank):
            raw = file.read_bytes()[: shared._HEADER.size]
            if len(raw) == shared._HEADER.size:
                magic, life, _, digest = shared._HEADER.unpack(raw)
                with file.open("r+b") as there:
                    there.write(shared._HEADER.pack(magic, life, self._ended, digest))


def jobs_of(params: Sequence[dict[str, Any]]) -> list[Job]:
    return [Job(prompt, MOST, params=one) for prompt, one in zip(PROMPTS, params, strict=True)]


def some_steps(rank: Rank, jobs: Sequence[Job], num_steps: int) -> list[list[int]]:
    """What it has released of them by then."""
    tokens: list[list[int]] = [[] for _ in jobs]
    for index, job in enumerate(jobs):
        rank.submit(job.message(index))
    for _ in range(num_steps):
        for output in rank.step():
            tokens[output.request_id] += output.new_token_ids
    return tokens


def moved(
    rank: Rank, jobs: Sequence[Job], known: Sequence[list[int]], formers: Sequence[tuple[tuple[int, int, int], ...]]
) -> list[list[int]]:
    """All tokens, of those that are not at their end."""
    tokens = [list(one) for one in known]
    for index, job in enumerate(jobs):
        if len(known[index]) < MOST:
            message = structs.replace(
                job.message(index),
                request_id=100 + index,
                token_ids=[*job.prompt, *known[index]],
                formers=formers[index],
            )
            rank.submit(structs.replace(message, seed=index))
    for _ in range(500):
        if rank.idle and not rank.has_work:
            break
        for output in rank.step():
            tokens[output.request_id - 100] += output.new_token_ids
    return tokens


def formers_of(jobs: Sequence[Job], known: Sequence[list[int]]) -> list[tuple[tuple[int, int, int], ...]]:
    return [
        ((0, index, len(job.prompt) + len(new) - 1 if new else 0),)
        for index, (job, new) in enumerate(zip(jobs, known, strict=True))
    ]


@pytest.mark.parametrize("kind", ["grouped", "latent"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_is_computed_twice(
    paths: dict[str, Path], tmp_path: Path, ended: int, kind: str, asynchronous: bool
) -> None:
    files, jobs = Files(tmp_path, ended), jobs_of([{}, {"temperature": 0.9}, {}, {"temperature": 0.7}])
    plan = make_plan(paths[kind], async_scheduling=asynchronous, enable_prefix_caching=False)
    expected = [got.tokens for got in drive([build_rank(plan)], jobs)]
    first = build_rank(plan, caches=files)
    known = some_steps(first, jobs, 6)
    assert all(len(one) >= 4 for one in known)
    files.end(0)
    second = build_rank(plan, caches=files)
    assert moved(second, jobs, known, formers_of(jobs, known)) == expected
    in_cache = sum(len(job.prompt) + len(one) - 1 for job, one in zip(jobs, known, strict=True))
    left = sum(MOST - len(one) for one in known)
    assert second.stats.taken_over == in_cache
    assert second.stats.num_step_tokens - in_cache <= left + (0 if not asynchronous else len(jobs))
    for rank in (first, second):
        rank.close()
    second._scheduler.kv.check([])


def test_who_is_alive_is_not_taken_from(paths: dict[str, Path], tmp_path: Path, ended: int) -> None:
    files, jobs = Files(tmp_path, ended), jobs_of([{}] * 4)
    plan = make_plan(paths["grouped"])
    expected = [got.tokens for got in drive([build_rank(plan)], jobs)]
    known = some_steps(build_rank(plan, caches=files), jobs, 6)
    second = build_rank(plan, caches=files)
    assert moved(second, jobs, known, formers_of(jobs, known)) == expected
    assert second.stats.taken_over == 0


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), choices=engine_choices(8), num_steps=st.integers(0, 30), again=st.integers(0, 8))
def test_at_any_moment_of_any_plan(
    paths: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    ended: int,
    data: st.DataObject,
    choices: dict[str, Any],
    num_steps: int,
    again: int,
) -> None:
    """Prompts are cut and requests preempted, and the one that takes over ends too."""
    files = Files(tmp_path_factory.mktemp("files"), ended)
    params = [{"temperature": data.draw(st.sampled_from([0.0, 0.8]))} for _ in PROMPTS]
    jobs, plan = jobs_of(params), make_plan(paths["grouped"], **choices)
    expected = [got.tokens for got in drive([build_rank(plan)], jobs)]
    first = build_rank(plan, caches=files)
    known = some_steps(first, jobs, num_steps)
    formers = formers_of(jobs, known)
    files.end(0)
    second = build_rank(plan, caches=files)
    if again:
        later = [
            Job([*job.prompt, *new], MOST - len(new), params=job.params) for job, new in zip(jobs, known, strict=True)
        ]
        open_ones = [index for index, new in enumerate(known) if len(new) < MOST]
        for index in open_ones:
            message = structs.replace(
                jobs[index].message(index), request_id=50 + index, token_ids=later[index].prompt, formers=formers[index]
            )
            second.submit(message)
        more: list[list[int]] = [[] for _ in jobs]
        for _ in range(again):
            for output in second.step():
                more[output.request_id - 50] += output.new_token_ids
        files.end(0)
        for index in open_ones:
            known[index] = [*known[index], *more[index]]
            length = len(jobs[index].prompt) + len(known[index]) - 1
            formers[index] = ((0, 50 + index, length),) if more[index] else (*formers[index], (0, 50 + index, 0))
        second.close()
        second = build_rank(plan, caches=files)
    assert moved(second, jobs, known, formers) == expected
    second._scheduler.kv.check([])
    for rank in (first, second):
        rank.close()
