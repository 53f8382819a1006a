"""thinking_token_budget: whatever drafts, whoever dies and whatever else the engine does, reasoning ends where the
budget says, and a stream is the one of a rank that is alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from amounts import examples
from drafting import EDITS, METHODS, RANDOM, Streams
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.thinking import IN_FRONT, Thinking
from front.chat.families import REASONING
from front.chat.format import OutputFormat
from front.chat.thinking import within_budget
from front.params import Grammar, ReasoningBudget, SamplingParams
from front.text.tokenizer import Tokenizer
from models.tiny import CHECKPOINT
from moesaic import LLM

pytestmark = pytest.mark.structured
torch.set_num_threads(1)

TOKENIZER = Tokenizer(CHECKPOINT)
END = tuple(TOKENIZER.encode("</think>", add_special_tokens=False))
BEGIN = tuple(TOKENIZER.encode("<think>", add_special_tokens=False))
WORD = Grammar("start: /[a-z ]{3,60}/", END)
ASKED = [
    {"reasoning": ReasoningBudget(3, (), (END,))},
    {**RANDOM, "reasoning": ReasoningBudget(5, (), (END,)), "grammar": WORD},
    {**EDITS, "reasoning": ReasoningBudget(0, (), (END,))},
    {"reasoning": ReasoningBudget(2, (), (END,)), "allowed_token_ids": (260, 300, 412), "grammar": WORD},
    {**RANDOM, "reasoning": ReasoningBudget(1, (), ((7,),)), "logprobs": 2},
    {"reasoning": ReasoningBudget(100, (), (END,))},
    {},
]
STREAMS = Streams(ASKED)


def test_reasoning_ends_where_the_budget_says_and_what_follows_is_bound() -> None:
    assert len(END) > 1  # its tokens come one after another
    for asked, tokens in zip(ASKED, STREAMS.expected.values(), strict=True):
        budget = asked.get("reasoning")
        if isinstance(budget, ReasoningBudget) and budget.tokens < 100:
            end = budget.ends[0]
            assert tuple(tokens[budget.tokens : budget.tokens + len(end)]) == end
            if "grammar" in asked:
                text = TOKENIZER.decode(tokens[budget.tokens + len(end) :], True)
                assert text and set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert STREAMS.expected[5] == Streams([*ASKED[:5], {}, {}]).expected[5]


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_drafts_preemption_company_and_steps_beside_others(data: st.DataObject) -> None:
    STREAMS.check(data, st.none() | METHODS)


@settings(max_examples=examples(12), deadline=None)
@given(st.data())
def test_killed_ranks(data: st.DataObject) -> None:
    STREAMS.endure(data, speculation=data.draw(st.none() | METHODS))


def must_come(budget: ReasoningBudget, output: Sequence[int]) -> int:
    """The specification: the token that must come next, -1: any."""

    def first(found: Sequence[int], start: int) -> int:
        ends = range(start + len(found), len(output) + 1)
        return next((end for end in ends if tuple(output[end - len(found) : end]) == tuple(found)), -1)

    begun = first(budget.begin, 0) if budget.begin else 0
    if begun < 0 or begun > len(budget.begin) + IN_FRONT or any(first(end, begun) >= 0 for end in budget.ends):
        return -1
    thought, end = list(output[begun:]), budget.ends[0]
    if len(thought) < budget.tokens:
        return -1
    return max((n, end[n]) for n in range(len(end)) if n <= len(thought) and thought[len(thought) - n :] == [*end[:n]])[
        1
    ]


TOKENS = st.integers(0, 3)
RUNS = st.lists(TOKENS, min_size=1, max_size=3).map(tuple)


@settings(max_examples=examples(400), deadline=None)
@given(
    st.integers(0, 4),
    st.just(()) | RUNS,
    st.lists(RUNS, min_size=1, max_size=2),
    st.lists(TOKENS, max_size=14),
    st.data(),
)
def test_what_must_come_is_a_function_of_the_output(
    tokens: int, begin: tuple[int, ...], ends: list[tuple[int, ...]], output: list[int], data: st.DataObject
) -> None:
    """However the output came: at once, one by one, or in part as drafts."""
    budget = ReasoningBudget(tokens, begin, tuple(ends))
    first = data.draw(st.integers(0, len(output)))
    drafts = data.draw(st.integers(first, len(output)))
    thinking = Thinking(budget, output[:first])
    thinking.accept(output[first:drafts])
    assert thinking.forced(output[drafts:]) == must_come(budget, output)


@pytest.mark.parametrize("family", REASONING)
def test_every_family_has_its_tokens(family: str) -> None:
    asked = SamplingParams(thinking_token_budget=7)
    inside = OutputFormat(reasoning=family, begins_reasoning=True)
    found = within_budget(asked, TOKENIZER, family, inside, [1]).reasoning
    assert found is not None and found.tokens == 7 and found.begin == () and found.ends[0] == END
    assert (len(found.ends) > 1) == (family == "kimi_k2")  # calls end its reasoning too
    for prompt, begins in (([1, *BEGIN, 5], True), ([1, *BEGIN, 5, *END, 9], family == "deepseek_r1")):
        read = within_budget(asked, TOKENIZER, family, None, prompt).reasoning
        assert read is not None and (read.begin == ()) == begins
    assert within_budget(SamplingParams(thinking_token_budget=-1), TOKENIZER, "", None, [1]).reasoning is None


def test_it_is_refused_where_no_reasoning_is_known() -> None:
    for family in ("", "openai_gptoss"):
        with pytest.raises(ValueError, match="thinking_token_budget needs tags"):
            within_budget(SamplingParams(thinking_token_budget=7), TOKENIZER, family, None, [1])


def test_offline() -> None:
    with LLM() as llm:
        params = SamplingParams(thinking_token_budget=6, max_tokens=24, temperature=0)
        with pytest.raises(ValueError, match="thinking_token_budget"):
            llm.generate("Once", params)
        messages = [{"role": "user", "content": "Tell me a story."}]
        (answer,) = llm.chat(messages, params, reasoning_parser="deepseek_r1")
    output = answer.outputs[0]
    assert tuple(output.token_ids[6 : 6 + len(END)]) == END and output.message is not None
    assert output.message.reasoning == TOKENIZER.decode(output.token_ids[:6], True).strip()
    assert output.message.content
