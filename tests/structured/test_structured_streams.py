"""Whatever drafts, whoever dies, and whatever else the engine does: a constrained stream is the one of a rank that is
alone (float32), and what its grammar allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped import OFTEN
from rank_parts import Job, drive, mailbox_ranks, make_plan
from structured_parts import accepts
from survivors import Survivors, tight

from configs.speculation import SpeculativeConfig
from engine.build import build_rank
from engine.rank import Rank
from front.messages import Grammar, StructuredOutputsParams
from front.structured.grammar import checked_grammar
from front.structured.vocabulary import grammar_tokenizer
from front.text import Tokenizer
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.structured
torch.set_num_threads(1)

TOKENIZER = Tokenizer(CHECKPOINT)
RANDOM = {"temperature": 0.8, "top_k": 20}
EDITS = {
    "temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 4, "stop_token_ids": (5, 9),
    "bad_words_token_ids": ((7,), (3, 8), (11, 12)), "logprobs": 1,
}  # fmt: skip
FULL_STOP = TOKENIZER.encode(".", add_special_tokens=False)[-1]
ASKED = [
    StructuredOutputsParams(json={"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 4}),
    StructuredOutputsParams(regex=r"([a-z]{2,5} ){2}\d+"),
    StructuredOutputsParams(choice=("yes and no", "never", "it was a good day")),
    StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
    StructuredOutputsParams(regex="(no|yes)+", after_token_ids=(FULL_STOP,)),
    StructuredOutputsParams(
        structural_tag={
            "triggers": ["th"],
            "structures": [{"begin": "the ", "schema": {"type": "integer", "maximum": 99}, "end": " dogs"}],
        }
    ),
]
STEM = [1, 300, 412, 250, 611, 300, 412, 250, 611, 300, 412]
SIZES: dict[str, Any] = {"max_model_len": 36}
METHODS = st.builds(
    SpeculativeConfig,
    method=st.sampled_from(["prediction", "ngram", "suffix", "mtp"]),
    num_speculative_tokens=st.integers(1, 5),
    prompt_lookup_min=st.just(1),
    prompt_lookup_max=st.just(3),
    adaptive=st.booleans(),
)


def grammar(index: int) -> Grammar | None:
    """Every seventh request has none."""
    return checked_grammar(ASKED[index], TOKENIZER) if index < len(ASKED) else None


JOBS = [
    Job(
        [*STEM[: 11 - 2 * (i % 4)], 7 + i],
        14 + i % 3,
        params={**[{}, RANDOM, EDITS][i % 3], "grammar": grammar(i)},
    )
    for i in range(7)
]


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    rank = build_rank(make_plan(CHECKPOINT, enable_prefix_caching=False, max_num_seqs=1, **SIZES))
    found = {index: got.tokens for index, got in enumerate(drive([rank], JOBS))}
    rank.close()
    return found


def foretold(expected: dict[int, list[int]]) -> list[Job]:
    """Every second request brings a prediction, with a mistake in it."""
    jobs = []
    for index, job in enumerate(JOBS):
        text = expected[index]
        more = {"prediction_token_ids": (*text[:5], 3, *text[6:])} if index % 2 else {}
        jobs.append(Job(job.prompt, job.max_tokens, params={**job.params, **more}))
    return jobs


def close(rank: Rank) -> None:
    rank._scheduler.kv.check([])
    assert not rank._scheduler.grammars.awaited
    rank.close()


def test_every_token_is_one_that_the_grammar_allows(expected: dict[int, list[int]]) -> None:
    tokenizer = grammar_tokenizer(TOKENIZER, 2048)
    for index, tokens in expected.items():
        own = grammar(index)
        if own is not None:
            begin = tokens.index(own.after_token_ids[-1]) + 1 if own.after_token_ids in [(t,) for t in tokens] else 0
            if own.after_token_ids and not begin:
                continue  # it was free to its end
            assert accepts(tokenizer, own.text, tokens[begin:]), index


@settings(max_examples=30, deadline=None)
@given(
    choices=st.fixed_dictionaries(
        {
            "speculation": st.none() | METHODS,
            "num_kv_blocks": st.integers(9, 30),
            "max_num_seqs": st.integers(1, 5),
            "max_num_batched_tokens": st.sampled_from([2, 7, 16, 64]),
            "enable_prefix_caching": st.booleans(),
            "async_scheduling": st.booleans(),
            "dbo": st.sampled_from(OFTEN),
        }
    ),
    arrivals=st.lists(st.integers(0, 12), min_size=len(JOBS), max_size=len(JOBS)),
    aborted=st.sets(st.integers(0, len(JOBS) - 1), max_size=2),
    size=st.sampled_from([1, 2]),
)
def test_whatever_the_engine_does(
    expected: dict[int, list[int]], choices: dict[str, Any], arrivals: list[int], aborted: set[int], size: int
) -> None:
    jobs = foretold(expected)
    for index, (job, at) in enumerate(zip(jobs, arrivals, strict=True)):
        job.arrive, job.abort = at, at + 5 if index in aborted else None
    if size == 1:
        ranks = [build_rank(make_plan(CHECKPOINT, **SIZES, **{**choices, "dbo": None}))]
    else:
        ranks = mailbox_ranks(CHECKPOINT, size, **SIZES, **choices)
    for index, got in enumerate(drive(ranks, jobs)):
        whole = expected[index]
        assert got.tokens == whole if index not in aborted else got.tokens == whole[: len(got.tokens)]
    for rank in ranks:
        close(rank)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_kills_at_any_moment(expected: dict[int, list[int]], data: st.DataObject) -> None:
    """A request goes on elsewhere: its matcher is made again from the tokens that are out."""
    plan = {"speculation": data.draw(st.none() | METHODS), **tight(data, 9), **SIZES}
    cluster = Survivors(CHECKPOINT, 3, slots_per_rank=16, **plan)
    cluster.endure(foretold(expected), data)
    assert cluster.released == expected
    for rank in cluster.ranks.values():
        close(rank)


def test_a_grammar_that_cannot_be_used_ends_its_request_and_no_other() -> None:
    """What the front would have refused: a special token that the vocabulary lacks, a lexer without bound."""
    bad = Grammar("start: <|no such token|>")
    explosive = Grammar(r"start: /(a|b)*a(a|b){400}c/")
    rank = build_rank(make_plan(CHECKPOINT, **SIZES))
    jobs = [Job(STEM, 6), Job(STEM, 6, params={"grammar": bad}), Job(STEM, 6, params={"grammar": explosive})]
    got = drive([rank], jobs)
    assert got[0].finish_reason == "length" and len(got[0].tokens) == 6
    assert got[1].finish_reason == "error" and got[1].tokens == []
    assert got[2].finish_reason in ("error", "length")
    close(rank)
