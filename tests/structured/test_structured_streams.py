"""Whatever drafts, whoever dies, and whatever else the engine does: a constrained stream is the one of a rank that is
alone (float32), and what its grammar allows."""

from __future__ import annotations

import pytest
import torch
from amounts import examples
from drafting import EDITS, METHODS, RANDOM, SIZES, STEM, Streams, close, undrafted
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_parts import Job, drive, make_plan
from structured_parts import accepts

from configs.speculation import SpeculativeConfig
from engine.build import build_rank
from front.params import Grammar, StructuredOutputsParams
from front.structured.grammar import checked_grammar
from front.structured.vocabulary import grammar_tokenizer
from front.text.tokenizer import Tokenizer
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.structured
torch.set_num_threads(1)

TOKENIZER = Tokenizer(CHECKPOINT)
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
GRAMMARS = [*[checked_grammar(one, TOKENIZER) for one in ASKED], None]
STREAMS = Streams([{**[{}, RANDOM, EDITS][i % 3], "grammar": own} for i, own in enumerate(GRAMMARS)])


def test_every_token_is_one_that_the_grammar_allows() -> None:
    tokenizer = grammar_tokenizer(TOKENIZER, 2048)
    for index, tokens in STREAMS.expected.items():
        own = GRAMMARS[index]
        if own is not None:
            begin = tokens.index(own.after_token_ids[-1]) + 1 if own.after_token_ids in [(t,) for t in tokens] else 0
            if own.after_token_ids and not begin:
                continue  # it was free to its end
            assert accepts(tokenizer, own.text, tokens[begin:]), index


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_whatever_the_engine_does(data: st.DataObject) -> None:
    STREAMS.check(data, st.none() | METHODS)


@settings(max_examples=examples(12), deadline=None)
@given(st.data())
def test_kills_at_any_moment(data: st.DataObject) -> None:
    """A request goes on elsewhere: its matcher is made again from the tokens that are out."""
    STREAMS.endure(data, speculation=data.draw(st.none() | METHODS))


def test_tokens_that_a_grammar_makes_certain_are_drafts_of_a_request_alone() -> None:
    """Fewer steps, the same tokens; none where steps are scheduled beside others, and none where nothing may draft."""
    number = {"type": "integer", "minimum": 1, "maximum": 3}
    schema = {"type": "object", "properties": {"sleeping": number, "walking": number}, "required": ["walking"]}
    form = checked_grammar(StructuredOutputsParams(json=schema, disable_any_whitespace=True), TOKENIZER)
    job = Job(STEM, 24, params={"grammar": form})
    expected = undrafted([job], **SIZES)[0]

    def run(count: int, asynchronous: bool) -> tuple[int, int]:
        speculation = SpeculativeConfig(method="prediction", num_speculative_tokens=5)
        rank = build_rank(make_plan(CHECKPOINT, **SIZES, speculation=speculation, async_scheduling=asynchronous))
        assert all(got.tokens == expected for got in drive([rank], [job] * count))
        steps, accepted = rank.stats.steps, rank.stats.spec_accepted_tokens
        close(rank)
        return steps, accepted

    steps, accepted = run(1, False)
    assert accepted > 3 and steps == len(expected) - accepted
    assert run(1, True)[1] == 0
    # One of two is alone for a moment if its grammar is compiled before a step begins, and the other one's after that.
    assert any(run(2, False)[1] == 0 for _ in range(5))


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
