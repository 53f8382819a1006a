"""thinking_token_budget: what a rank must know of a family's reasoning to bound it (engine/sampling/thinking.py)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from front.chat.families import CALLS, REASONING
from front.chat.format import OutputFormat
from front.params import ReasoningBudget, SamplingParams
from front.text.tokenizer import Tokenizer


def within_budget(
    params: SamplingParams, tokenizer: Tokenizer, family: str, format: OutputFormat | None, prompt: Sequence[int]
) -> SamplingParams:
    """With the budget as the ranks get it. family: of reasoning. format: how the output is read; None: it is not, and
    the prompt's tokens say whether it ends inside of reasoning. ValueError where reasoning has no tokens that end
    it."""
    tokens = params.thinking_token_budget
    if tokens is None or tokens == -1:
        return params
    if family not in REASONING:
        which = f"the reasoning of {family}" if family else "the model's reasoning (none is known; --reasoning-parser)"
        raise ValueError(f"thinking_token_budget needs tags around {which}")
    table, calls = REASONING[family], CALLS.get(family)
    ends = [table.end]
    if table.calls_end and calls is not None:
        ends += [*(calls.section or ())[:1], calls.begin]
    begin, *end_ids = (tuple(tokenizer.encode(tag, add_special_tokens=False)) for tag in (table.begin, *ends))
    if format is None:
        inside = _last(prompt, begin) > max(_last(prompt, end) for end in end_ids) or table.assumed
    else:
        inside = format.starts_with_reasoning
    budget = ReasoningBudget(tokens, () if inside else begin, tuple(end_ids))
    return msgspec.structs.replace(params, reasoning=budget)


def _last(tokens: Sequence[int], found: tuple[int, ...]) -> int:
    """Where these tokens stand last; -1: nowhere."""
    starts = range(len(tokens) - len(found), -1, -1)
    return next((start for start in starts if tuple(tokens[start : start + len(found)]) == found), -1)
