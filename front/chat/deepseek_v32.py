"""The chat encoding of DeepSeek-V3.2, whose checkpoints have no Jinja template: what its model card describes, and the
fixed text about tools that the model was trained with.

Reasoning of earlier turns is left out; that of the turn at hand, between calls of tools, is kept. Results of tools come
back together, in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from front.chat.dsml import ASSISTANT, DSML, END, THINK, THOUGHT, USER, DsmlEncoding, calls, schemas, text_of

_BLOCK = "function_calls"
_TOOLS = """## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<D function_calls>" block like the following as part of your reply to the user:
<D function_calls>
<D invoke name="$FUNCTION_NAME">
<D parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</D parameter>
...
</D invoke>
<D invoke name="$FUNCTION_NAME2">
...
</D invoke>
</D function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<D function_calls>
...
</D function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
""".replace("D ", DSML)


class DeepseekV32Encoding(DsmlEncoding):
    marks = f"<{DSML}{_BLOCK}>{THINK}{THOUGHT}"

    def _turns(
        self, messages: list[dict[str, Any]], functions: list[Any], thinking: bool, goes_on: bool, effort: object
    ) -> str:
        asking = [index for index, message in enumerate(messages) if message["role"] in ("user", "developer")]
        last_user, last = max(asking, default=-1), len(messages) - 1
        return "".join(
            _message(
                messages,
                index,
                functions if index == 0 else [],
                thinking and index >= last_user,
                goes_on or index < last,
            )
            for index in range(len(messages))
        )


def _message(
    messages: Sequence[dict[str, Any]], index: int, functions: Sequence[Any], thinking: bool, opens: bool
) -> str:
    """thinking: the assistant reasons in this turn. opens: the assistant's part follows."""
    message = messages[index]
    role, content = message["role"], text_of(message)
    if role == "system":
        about = f"\n\n{_TOOLS}{schemas(functions)}\n</functions>\n" if functions else ""
        return content + about
    if role in ("user", "developer"):
        asked = content if role == "user" else f"\n\n# The user's message is: {content}"
        return f"{USER}{asked}" + (ASSISTANT + (THINK if thinking else THOUGHT) if opens else "")
    if role == "assistant":
        reasoning = f"{message.get('reasoning_content', '')}{THOUGHT}" if thinking else ""
        return f"{reasoning}{content}{calls(message.get('tool_calls') or [], _BLOCK)}{END}"
    if role == "tool":
        return _result(messages, index, content, thinking, opens)
    raise ValueError(f"messages: role {role!r} is unknown to DeepSeek-V3.2; it must be system, user, assistant or tool")


def _result(messages: Sequence[dict[str, Any]], index: int, content: str, thinking: bool, opens: bool) -> str:
    """Results of one message's calls stand together; the assistant goes on behind the last of them."""
    asking = index - 1
    while asking >= 0 and messages[asking]["role"] == "tool":
        asking -= 1
    made = (messages[asking].get("tool_calls") or []) if asking >= 0 and messages[asking]["role"] == "assistant" else []
    order = index - asking
    if order > len(made):
        raise ValueError("messages: a result of a tool must follow the assistant's message that called it")
    first = "\n\n<function_results>" if order == 1 else ""
    last = "\n</function_results>" if order == len(made) else ""
    follows = f"\n\n{THINK if thinking else THOUGHT}" if last and opens else ""
    return f"{first}\n<result>{content}</result>{last}{follows}"
