"""Whatever drafts, whoever dies, and whatever else the engine does: a constrained stream is the one of a rank that is
alone (float32), and what its grammar allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amounts import examples
from drafting import METHODS, check_streams, drafting_choices, foretold, undrafted
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_parts import Job, drive, make_plan
from structured_parts import accepts
from survivors import Survivors, tight

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
    return undrafted(JOBS, **SIZES)


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


@settings(max_examples=examples(30), deadline=None)
@given(
    choices=drafting_choices(st.none() | METHODS),
    arrivals=st.lists(st.integers(0, 12), min_size=len(JOBS), max_size=len(JOBS)),
    aborted=st.sets(st.integers(0, len(JOBS) - 1), max_size=2),
    size=st.sampled_from([1, 2]),
)
def test_whatever_the_engine_does(
    expected: dict[int, list[int]], choices: dict[str, Any], arrivals: list[int], aborted: set[int], size: int
) -> None:
    check_streams(JOBS, expected, arrivals, aborted, size, close, **SIZES, **choices)


@settings(max_examples=examples(12), deadline=None)
@given(st.data())
def test_kills_at_any_moment(expected: dict[int, list[int]], data: st.DataObject) -> None:
    """A request goes on elsewhere: its matcher is made again from the tokens that are out."""
    plan = {"speculation": data.draw(st.none() | METHODS), **tight(data, 9), **SIZES}
    cluster = Survivors(CHECKPOINT, 3, slots_per_rank=16, **plan)
    cluster.endure(foretold(JOBS, expected), data)
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
