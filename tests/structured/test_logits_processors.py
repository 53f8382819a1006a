"""Logits processors: whatever drafts, whoever dies and whatever else the engine does, a stream is the one of a rank that
is alone; one that fails ends its request and no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from amounts import examples
from drafting import METHODS, SIZES, STEM, Streams, close, undrafted
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_parts import Job, drive, make_plan

import moesaic
from engine.build import build_rank
from engine.sampling.processor_names import check_processors
from front.params import SamplingParams
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.structured
torch.set_num_threads(1)

NAMES = ("own_processors:NoRepeats", "own_processors.Wobble", "own_processors:Fails")
ASKED = [
    {"extra_args": {"no_repeat": 1}},
    {"extra_args": {"wobble": 3.0}, "temperature": 0.8, "top_k": 20},
    {"extra_args": {"no_repeat": 3, "wobble": 2.0}, "presence_penalty": 0.5, "min_tokens": 4, "stop_token_ids": (5, 9)},
    {},
    {"extra_args": {"wobble": 5.0}, "logprobs": 2, "bad_words_token_ids": ((7,), (3, 8))},
]
STREAMS = Streams(ASKED, logits_processors=NAMES)


def test_they_change_what_they_should() -> None:
    jobs, expected = STREAMS.jobs, STREAMS.expected
    plain = undrafted(jobs, **SIZES)
    assert expected[3] == plain[3]
    assert all(expected[index] != plain[index] for index in (1, 2, 4))
    new = set(expected[0])
    assert len(new) == jobs[0].max_tokens and not new & set(jobs[0].prompt)


@settings(max_examples=examples(20), deadline=None)
@given(st.data())
def test_drafts_preemption_company_and_steps_beside_others(data: st.DataObject) -> None:
    STREAMS.check(data, st.none() | METHODS)


@settings(max_examples=examples(8), deadline=None)
@given(st.data())
def test_killed_ranks(data: st.DataObject) -> None:
    STREAMS.endure(data, speculation=data.draw(st.none() | METHODS))


@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_that_fails_ends_its_request_and_no_other(speculation: bool, asynchronous: bool) -> None:
    ways = [{"how": how, "at": 3} for how in ("raises", "nan", "shape", "nothing")]
    bad = [Job(STEM, 8, params={"extra_args": way}) for way in [*ways, {"no_repeat": "two"}]]
    plain = undrafted([Job(STEM, 8)], **SIZES)[0]
    if speculation:
        bad = [Job(job.prompt, 8, params={**job.params, "prediction_token_ids": tuple(plain)}) for job in bad]
    rank = build_rank(make_plan(CHECKPOINT, **STREAMS.plan, async_scheduling=asynchronous))
    got = drive([rank], [*STREAMS.jobs[:3], *bad])
    assert [one.tokens for one in got[:3]] == [STREAMS.expected[index] for index in range(3)]
    assert all(one.finish_reason == "error" for one in got[3:])
    assert all(one.tokens == plain[: len(one.tokens)] and len(one.tokens) <= 3 for one in got[3:])
    assert got[-1].tokens == []
    close(rank)


def test_what_fails_behind_a_draft_that_does_not_come_has_not_failed() -> None:
    """Nor behind the end of the sequence."""
    plain = undrafted([Job(STEM, 8)], **SIZES)[0]
    fails = {"how": "raises", "at": 3}
    wrong = (*plain[:2], (plain[2] + 1) % 90, *plain[3:])
    jobs = [
        Job(STEM, 3, params={"extra_args": fails, "prediction_token_ids": tuple(plain)}),
        Job(STEM, 3, params={"extra_args": fails, "prediction_token_ids": wrong}),
        Job(STEM, 8, params={
            "extra_args": {**fails, "at": plain.index(plain[2]) + 1}, "prediction_token_ids": tuple(plain),
            "stop_token_ids": (plain[2],),
        }),
    ]  # fmt: skip
    rank = build_rank(make_plan(CHECKPOINT, **STREAMS.plan))
    got = drive([rank], jobs)
    assert [one.finish_reason for one in got] == ["length", "length", "stop"]
    assert got[0].tokens == got[1].tokens == plain[:3]
    close(rank)


def test_classes_that_cannot_be_had_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in (
        ("own_processors:Missing", "AttributeError"),
        ("no_such_module:Class", "ModuleNotFoundError"),
        ("own_processors:torch", "must be a class"),
        ("Class", "module:Class"),
    ):
        with pytest.raises(ValueError, match=f"logits_processors '{name}'.*{why}"):
            moesaic.LLM(logits_processors=[name])
    with pytest.raises(ValueError, match=r"CannotBeMade.*RuntimeError: made at"):
        build_rank(make_plan(CHECKPOINT, logits_processors=("own_processors:CannotBeMade",)))
    with pytest.raises(ValueError, match="ModuleNotFoundError"):  # a rank's process would not find it
        check_processors([NAMES[0]], here=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    check_processors([NAMES[0]], here=False)


def test_several_choices_and_what_they_are_told() -> None:
    assert "own_processors" in sys.modules or str(Path(__file__).parent) in sys.path
    params = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=12, extra_args={"no_repeat": 2, "wobble": 1.0})
    with moesaic.LLM(logits_processors=NAMES) as llm:
        together = llm.generate(["Once upon a time"] * 2, params)
        alone = llm.generate("Once upon a time", params)
        for result in together:
            assert [one.token_ids for one in result.outputs] == [one.token_ids for one in alone[0].outputs]
        with pytest.raises(ValueError, match="extra_args must have at most 16"):
            llm.generate("a", SamplingParams(extra_args={str(i): i for i in range(17)}))
        with pytest.raises(ValueError, match="extra_args must take at most 4096"):
            llm.generate("a", SamplingParams(extra_args={"a": "b" * 5000}))
    with moesaic.LLM() as llm, pytest.raises(ValueError, match="extra_args need an engine with logits_processors"):
        llm.generate("a", SamplingParams(extra_args={"a": 1}))
