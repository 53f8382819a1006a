"""What one request asks for: how its output is drawn, and what it must be. Structs of msgspec, which travel with it to
its rank (front/messages.py)."""

from __future__ import annotations

from typing import Any

import msgspec


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must be; names are vLLM's. Exactly one of the first six says it (docs/structured.md).

    after_token_ids: the output is free until these tokens have come, one after another (the end of reasoning); what
    follows them is constrained. (): all of it is. backend: one of configs.server.STRUCTURED_BACKENDS.
    """

    json: str | dict[str, Any] | bool | None = None  # a JSON schema
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # Lark, as llguidance has it, or GBNF
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    after_token_ids: tuple[int, ...] = ()
    backend: str = "auto"


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """Made from StructuredOutputsParams by the front. text: as the back end takes it (front/structured)."""

    text: str
    after_token_ids: tuple[int, ...] = ()
    xgrammar: bool = False  # which back end: that one, or llguidance


class ReasoningBudget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Made from thinking_token_budget by the front (front/chat/thinking.py): behind so many tokens of reasoning the
    first of `ends` comes, unless one of them has come before. begin: tokens with which reasoning begins; (): the output
    begins inside of it."""

    tokens: int
    begin: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is continued. Validated by `front.sampling_params.validate`; names and defaults are OpenAI's and
    vLLM's.

    temperature 0 is greedy. top_k 0 is off. logprobs/prompt_logprobs: None is off, n the number of alternatives, -1
    all. Stop strings are the front's business; ranks see token ids only.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # made from bad_words by the front
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # the alternatives that are reported, in the place of the best
    skip_special_tokens: bool = True
    prediction: str = ""  # what the output is expected to be: drafts (docs/speculation.md)
    prediction_token_ids: tuple[int, ...] = ()  # made from it by the front
    structured_outputs: StructuredOutputsParams | None = None
    grammar: Grammar | None = None  # made from it by the front
    thinking_token_budget: int | None = None  # None, -1: reasoning may take as long as it likes
    reasoning: ReasoningBudget | None = None  # made from it by the front
    extra_args: dict[str, Any] | None = None  # what logits processors are told (docs/serving.md)

    def __post_init__(self) -> None:
        """A text for one stop string, and None for nothing, as callers of vLLM may have them."""
        for name in ("stop", "stop_token_ids", "bad_words"):
            given: object = getattr(self, name)
            if given is None or (name == "stop" and isinstance(given, str)):
                msgspec.structs.force_setattr(self, name, () if given is None else (given,))
