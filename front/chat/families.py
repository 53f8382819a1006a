"""The formats in which models write their reasoning and their calls of tools: a table for each. The names are vLLM's.

Sources: the chat templates and model cards of the models. Where a format has tokens of its own, these tables hold their
text.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

HARMONY = "openai"  # calls of gpt-oss (front/chat/harmony.py)
HARMONY_REASONING = "openai_gptoss"
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


class ReasoningFormat(Struct, frozen=True):
    """assumed: an output begins with reasoning though neither it nor its prompt says so. calls_end: where calls begin,
    reasoning has ended, with its tag or without."""

    begin: str = "<think>"
    end: str = "</think>"
    assumed: bool = False
    calls_end: bool = False


class CallFormat(Struct, frozen=True):
    """One call is `begin`, its name, `named`, the arguments, `end`; all calls of an answer may stand in a `section`.

    arguments: how they are written. json: an object behind the name. named_json: an object that holds name and
    arguments. parameters: each is key_begin, key, key_end, value, value_end.
    bare: a call may stand outside of a section.
    """

    begin: str
    end: str
    arguments: Literal["json", "named_json", "parameters"]
    section: tuple[str, str] | None = None
    named: str = ""
    before_name: str = ""  # what the name, as the format writes it, begins with
    fence: tuple[str, str] = ("", "")  # around a JSON object
    key_begin: str = ""
    key_end: str = ""
    value_begin: str = ""  # between a key and its value, with or without spaces around
    value_end: str = ""
    bare: bool = True
    newlines: bool = False  # a line break after key_end and one before value_end are not the value's
    own_ids: bool = False  # the name is an id: functions.NAME:INDEX


def _deepseek(named: str, before_name: str = "", fence: tuple[str, str] = ("", "")) -> CallFormat:
    return CallFormat(
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        arguments="json",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        named=named,
        before_name=before_name,
        fence=fence,
    )


def _dsml(section: str) -> CallFormat:
    return CallFormat(
        begin='<｜DSML｜invoke name="',
        end="</｜DSML｜invoke>",
        arguments="parameters",
        section=(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),
        named='">',
        key_begin='<｜DSML｜parameter name="',
        key_end=">",
        value_end="</｜DSML｜parameter>",
        bare=False,
    )


_HERMES = CallFormat(begin="<tool_call>", end="</tool_call>", arguments="named_json")
_QWEN3_CODER = CallFormat(
    begin="<function=",
    end="</function>",
    arguments="parameters",
    section=("<tool_call>", "</tool_call>"),
    named=">",
    key_begin="<parameter=",
    key_end=">",
    value_end="</parameter>",
    newlines=True,
)
_GLM = CallFormat(
    begin="<tool_call>",
    end="</tool_call>",
    arguments="parameters",
    key_begin="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
)

CALLS: dict[str, CallFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "deepseek_v3": _deepseek("\n", "function<｜tool▁sep｜>", ("```json", "```")),
    "deepseek_v31": _deepseek("<｜tool▁sep｜>"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": CallFormat(
        begin="<|tool_call_begin|>",
        end="<|tool_call_end|>",
        arguments="json",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        named="<|tool_call_argument_begin|>",
        own_ids=True,
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "minimax_m2": CallFormat(
        begin='<invoke name="',
        end="</invoke>",
        arguments="parameters",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        named='">',
        key_begin='<parameter name="',
        key_end='">',
        value_end="</parameter>",
        bare=False,
    ),
}
REASONING: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(assumed=True),
    "deepseek_v3": ReasoningFormat(),
    "deepseek_v31": ReasoningFormat(),
    "deepseek_v32": ReasoningFormat(),
    "deepseek_v4": ReasoningFormat(),
    "glm45": ReasoningFormat(),
    "kimi_k2": ReasoningFormat(calls_end=True),
    "minimax_m2": ReasoningFormat(),
    "qwen3": ReasoningFormat(),
}
TOOL_PARSERS = (*CALLS, HARMONY)
REASONING_PARSERS = (*REASONING, HARMONY_REASONING)


def tags_of(calls: str, reasoning: str) -> tuple[str, ...]:
    """Every text that a parser of these families must see; tokens whose text is part of one of them must not be
    hidden."""
    if HARMONY in (calls,) or reasoning == HARMONY_REASONING:
        return HARMONY_TAGS
    tags: list[str] = []
    if calls:
        table = CALLS[calls]
        tags += [table.begin, table.end, table.named, table.before_name, *(table.section or ()), *table.fence]
        tags += [table.key_begin, table.key_end, table.value_begin, table.value_end]
    if reasoning:
        tags += [REASONING[reasoning].begin, REASONING[reasoning].end]
    return tuple(tag for tag in tags if tag)


def chosen_families(template: str, calls: str | None, reasoning: str | None) -> tuple[str, str]:
    """The parsers of calls and of reasoning. calls, reasoning: names; None: what the chat template says; "": none.
    ValueError: one is not known, or one of the two is gpt-oss's, and the other is another's."""
    for field, name, names in (
        ("tool_call_parser", calls, TOOL_PARSERS),
        ("reasoning_parser", reasoning, REASONING_PARSERS),
    ):
        if name and name not in names:
            raise ValueError(f"{field} {name!r} is none of {', '.join(names)}")
    known = families_of(template)
    if known[0] == HARMONY and not {calls, reasoning} <= {None, "", HARMONY, HARMONY_REASONING}:
        known = "", ""
    found = known[0] if calls is None else calls, known[1] if reasoning is None else reasoning
    if (found[0] == HARMONY or found[1] == HARMONY_REASONING) and not (
        found[0] in ("", HARMONY) and found[1] in ("", HARMONY_REASONING)
    ):
        raise ValueError(f"tool_call_parser {found[0]} and reasoning_parser {found[1]} do not go together")
    return found


def families_of(template: str) -> tuple[str, str]:
    """The parsers of calls and of reasoning for a model with this chat template; "": none is known."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY, HARMONY_REASONING
    return _calls_of(template), _reasoning_of(template)


def _calls_of(template: str) -> str:
    marks = {
        "<|tool_calls_section_begin|>": "kimi_k2",
        "｜DSML｜tool_calls": "deepseek_v4",
        "｜DSML｜": "deepseek_v32",
        "<minimax:tool_call>": "minimax_m2",
        "<arg_key>": "glm45",
        "<function=": "qwen3_coder",
    }
    for mark, name in marks.items():
        if mark in template:
            return name
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    return "hermes" if "<tool_call>" in template else ""


def _reasoning_of(template: str) -> str:
    if "</think>" not in template:
        return ""
    calls = _calls_of(template)
    if calls in REASONING:
        return "deepseek_r1" if calls == "deepseek_v3" else calls
    return "deepseek_r1" if "<think>" not in template else "qwen3"
