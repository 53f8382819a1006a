"""Requests of a rank that has ended go on in another one with what it had computed of them, and get the same tokens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import deepseek_tiny
import hf_tiny
import pytest
import torch
from amounts import examples
from cache_files import CacheFiles
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from oracle import Oracle, take_drafts
from rank_parts import Job, drive, engine_choices, make_plan
from recurrent_toy import make_toy

from configs.speculation import SpeculativeConfig
from engine.build import build_rank
from engine.rank import Rank
from front.messages import Membership, TokenOutput

pytestmark = pytest.mark.spine
torch.set_num_threads(1)

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6], [9, 8, 7, 6, 5, 4, 3, 2, 3, 4, 5], [5, 6, 7, 8, 9, 12]]
MOST, TEMPERATURES = 14, (0.0, 0.8)


MODELS = {
    "grouped": hf_tiny.make_qwen3_moe,
    "latent": deepseek_tiny.make_v3,
    "index": deepseek_tiny.make_v32,
    "window": hf_tiny.make_gpt_oss,
    "state": hf_tiny.make_qwen3_next,
}
KINDS = [*MODELS, "all"]
DRAFTING = ["grouped", "latent", "window", "state"]
SPECULATION = SpeculativeConfig(method="prediction", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """all: a model with a paged group, a window and a state."""
    found = {name: make(tmp_path_factory.mktemp(name)).path for name, make in MODELS.items()}
    folder = tmp_path_factory.mktemp("all")
    return {**found, "all": make_toy(hf_tiny.make_qwen3_moe(folder / "hf", num_hidden_layers=3).path, folder / "toy")}


@pytest.fixture(scope="module")
def undisturbed(paths: dict[str, Path]) -> dict[tuple[str, float], list[list[int]]]:
    """By model and temperature, the tokens of each prompt."""
    found = {}
    for kind, path in paths.items():
        for temperature in TEMPERATURES:
            jobs = jobs_of([{"temperature": temperature}] * len(PROMPTS))
            found[kind, temperature] = [got.tokens for got in drive([build_rank(make_plan(path))], jobs)]
    return found


def later(rank: Rank) -> Rank:
    """In its second epoch, as one that takes over from others."""
    rank.submit(Membership(1, [True]))
    return rank


def jobs_of(params: Sequence[dict[str, Any]]) -> list[Job]:
    return [Job(prompt, MOST, params=one) for prompt, one in zip(PROMPTS, params, strict=True)]


def some_steps(rank: Rank, jobs: Sequence[Job], num_steps: int, num_lost: int = 0) -> list[list[int]]:
    """What it has released of them by then. num_lost: of so many steps at the end nobody has heard."""
    tokens: list[list[int]] = [[] for _ in jobs]
    for index, job in enumerate(jobs):
        rank.submit(job.message(index))
    for number in range(num_steps):
        outputs = rank.step()
        for output in outputs if number < num_steps - num_lost else ():
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_is_computed_twice(paths: dict[str, Path], tmp_path: Path, kind: str, asynchronous: bool) -> None:
    files, jobs = CacheFiles(tmp_path), jobs_of([{}, {"temperature": 0.9}, {}, {"temperature": 0.7}])
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


def test_who_is_alive_is_not_taken_from(paths: dict[str, Path], tmp_path: Path) -> None:
    files, jobs = CacheFiles(tmp_path), jobs_of([{}] * 4)
    plan = make_plan(paths["grouped"])
    expected = [got.tokens for got in drive([build_rank(plan)], jobs)]
    known = some_steps(build_rank(plan, caches=files), jobs, 6)
    second = build_rank(plan, caches=files)
    assert moved(second, jobs, known, formers_of(jobs, known)) == expected
    assert second.stats.taken_over == 0


class Ending:
    """Of a rank that has ended in the middle of a step: the step is kept, so that nothing of it is tidied up."""

    def __init__(self) -> None:
        self._steps: list[Generator[None, None, list[TokenOutput]]] = []

    def within_a_step(self, rank: Rank, turns: int) -> list[TokenOutput]:
        """So many turns of a step, or all of it and what it has released."""
        steps = rank.steps()
        self._steps.append(steps)
        with torch.inference_mode():
            for _ in range(turns):
                try:
                    next(steps)
                except StopIteration as done:
                    outputs: list[TokenOutput] = done.value
                    return outputs
        return []


def may_draft(rank: Rank, jobs: Sequence[Job], expected: Sequence[list[int]]) -> Rank:
    """Drafts that are right three times of four, if the plan has any."""
    if rank._scheduler.speculation.max_in_step:
        known = {
            first + index: (job.prompt, expected[index]) for index, job in enumerate(jobs) for first in (0, 50, 100)
        }
        take_drafts(rank, Oracle(known, 0.75), 3)
    return rank


@settings(max_examples=examples(50), deadline=None)
@given(
    kind=st.sampled_from([*KINDS, "state", "window"]),
    temperatures=st.lists(st.sampled_from(TEMPERATURES), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    choices=engine_choices(8),
    graphs=st.sampled_from(["none", "full_decode_only"]),
    drafts=st.booleans(),
    num_steps=st.integers(0, 30),
    num_lost=st.sampled_from([0, 0, 1, 2]),
    turns=st.integers(0, 9),
    again=st.integers(0, 8),
    turns_again=st.integers(0, 9),
)
def test_at_any_moment_of_any_plan(
    paths: dict[str, Path],
    undisturbed: dict[tuple[str, float], list[list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    temperatures: list[float],
    choices: dict[str, Any],
    graphs: str,
    drafts: bool,
    num_steps: int,
    num_lost: int,
    turns: int,
    again: int,
    turns_again: int,
) -> None:
    """Prompts are cut and requests preempted, and the one that takes over ends too. turns: of the step in which a rank
    ends; num_lost: what it had released in as many steps before has not come through."""
    files, ending = CacheFiles(tmp_path_factory.mktemp("files")), Ending()
    speculation = SPECULATION if drafts and kind in DRAFTING else None
    jobs = jobs_of([{"temperature": temperature} for temperature in temperatures])
    plan = make_plan(paths[kind], **choices, cudagraph_mode=graphs, speculation=speculation)
    expected = [undisturbed[kind, temperature][index] for index, temperature in enumerate(temperatures)]
    first = may_draft(build_rank(plan, caches=files), jobs, expected)
    known = some_steps(first, jobs, num_steps, num_lost)
    outputs = ending.within_a_step(first, turns)
    for output in () if num_lost else outputs:
        known[output.request_id] += output.new_token_ids
    formers = formers_of(jobs, known)
    files.end(0)
    second = later(may_draft(build_rank(plan, caches=files), jobs, expected))
    if again:
        open_ones = [index for index, new in enumerate(known) if len(new) < MOST]
        for index in open_ones:
            message, token_ids = jobs[index].message(index), [*jobs[index].prompt, *known[index]]
            second.submit(structs.replace(message, request_id=50 + index, token_ids=token_ids, formers=formers[index]))
        more: list[list[int]] = [[] for _ in jobs]
        for number in range(again):
            last = number == again - 1
            for output in ending.within_a_step(second, turns_again) if last else second.step():
                more[output.request_id - 50] += output.new_token_ids
        files.end(0)
        for index in open_ones:
            known[index] = [*known[index], *more[index]]
            length = len(jobs[index].prompt) + len(known[index]) - 1
            formers[index] = ((0, 50 + index, length),) if more[index] else (*formers[index], (0, 50 + index, 0))
        third = later(may_draft(build_rank(plan, caches=files), jobs, expected))
    else:
        third = second
    assert moved(third, jobs, known, formers) == expected
    third._scheduler.kv.check([])
    for rank in {id(rank): rank for rank in (first, second, third)}.values():
        rank.close()
