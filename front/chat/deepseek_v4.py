"""The chat encoding of DeepSeek-V4, whose checkpoints have no Jinja template: what its model card describes, and the
fixed texts about tools and effort that the model was trained with.

`reasoning_effort` of `max` or `xhigh` asks for more reasoning. That of earlier turns is kept where there are tools, and
left out where there are none. Results of tools are part of the user's turn, in the order of the calls. A message of
role `latest_reminder` has a tag of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from front.chat.dsml import ASSISTANT, DSML, END, THINK, THOUGHT, USER, DsmlEncoding, calls, schemas, text_of

_BLOCK = "tool_calls"
_REMINDER = "<｜latest_reminder｜>"
_MOST = ("max", "xhigh")  # of reasoning_effort
_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<D tool_calls>" block like the following:

<D tool_calls>
<D invoke name="$TOOL_NAME">
<D parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</D parameter>
...
</D invoke>
<D invoke name="$TOOL_NAME2">
...
</D invoke>
</D tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

""".replace("D ", DSML)
_LAW = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"


class DeepseekV4Encoding(DsmlEncoding):
    marks = f"<{DSML}{_BLOCK}>{THINK}{THOUGHT}"

    def _turns(
        self, messages: list[dict[str, Any]], functions: list[Any], thinking: bool, goes_on: bool, effort: object
    ) -> str:
        keeps, turns = bool(functions), _turns(messages)
        last_user = max([place for place, turn in enumerate(turns) if _asks(turn)], default=-1)
        parts = [_EFFORT if thinking and effort in _MOST else ""]
        for place, turn in enumerate(turns):
            follows = turns[place + 1]["role"] if place + 1 < len(turns) else None
            if turn["role"] == "developer" and thinking and not keeps and place < last_user:
                continue
            parts.append(_turn(turn, functions if place == 0 else [], thinking and (keeps or place > last_user)))
            if _asks(turn) and (goes_on if follows is None else follows in ("assistant", "reminder")):
                parts.append(ASSISTANT + (THINK if thinking and (keeps or place >= last_user) else THOUGHT))
        return "".join(parts)


def _asks(turn: Mapping[str, Any]) -> bool:
    return turn["role"] in ("user", "developer")


def _turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools and what the user says behind them are one turn of the user's. ValueError."""
    turns: list[dict[str, Any]] = []
    order: dict[Any, int] = {}
    for message in messages:
        role, text = message["role"], text_of(message)
        if role == "assistant":
            given = message.get("tool_calls") or []
            order = {call.get("id"): place for place, call in enumerate(given) if isinstance(call, dict)} or order
        if role == "latest_reminder":
            role = "reminder"
        elif role not in ("system", "user", "developer", "assistant", "tool"):
            known = "system, user, assistant or tool"
            raise ValueError(f"messages: role {role!r} is unknown to DeepSeek-V4; it must be {known}")
        if role in ("user", "tool"):
            if not (turns and turns[-1]["role"] == "user"):
                turns.append({"role": "user", "blocks": []})
            rank = order.get(message.get("tool_call_id"), 0) if role == "tool" else None
            block = text if role == "user" else f"<tool_result>{text}</tool_result>"
            turns[-1]["blocks"].append((rank, block))
        else:
            turns.append({**message, "role": role, "text": text})
    return turns


def _turn(turn: Mapping[str, Any], functions: Sequence[Mapping[str, Any]], reasons: bool) -> str:
    """reasons: the assistant's reasoning is shown."""
    role = turn["role"]
    if role == "user":
        return USER + "\n\n".join(_in_order(turn["blocks"]))
    text: str = turn["text"]
    if role == "developer":
        return USER + text
    if role == "reminder":
        return _REMINDER + text
    if role == "assistant":
        reasoning = f"{turn.get('reasoning_content', '')}{THOUGHT}" if reasons else ""
        return f"{reasoning}{text}{calls(turn.get('tool_calls') or [], _BLOCK)}{END}"
    return f"{text}\n\n{_TOOLS}{schemas(functions)}{_LAW}" if functions else text


def _in_order(blocks: Sequence[tuple[int | None, str]]) -> list[str]:
    """Results stand in the order of the calls, in the places where there are results."""
    results = iter([text for _, text in sorted((rank, text) for rank, text in blocks if rank is not None)])
    return [text if rank is None else next(results) for rank, text in blocks]
