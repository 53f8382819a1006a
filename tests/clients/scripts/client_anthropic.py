"""The anthropic SDK."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import Anthropic
from forms import MODEL, PARAMETERS, QUESTION, URL, Weather

client = Anthropic(base_url=URL, auth_token="none")
messages: Any = [{"role": "user", "content": QUESTION}]
tools: Any = [{"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}]
given: Any = {"model": MODEL, "max_tokens": 400, "messages": messages}
assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens > 0
one: Any = {"type": "any", "disable_parallel_tool_use": True}
with client.messages.stream(**given, tools=tools, tool_choice=one) as stream:
    kinds = [event.type for event in stream]
    message = stream.get_final_message()
assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "input_json" in kinds, kinds
assert message.stop_reason == "tool_use", message
call = next(block for block in message.content if block.type == "tool_use")
Weather.model_validate(call.input)
result = {"type": "tool_result", "tool_use_id": call.id, "content": "yes"}
answered = [*messages, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
last = client.messages.create(model=MODEL, max_tokens=5, messages=answered, tools=tools)
assert last.stop_reason in ("max_tokens", "end_turn") and last.content
form: Any = {"format": {"type": "json_schema", "schema": PARAMETERS}}
formed = client.messages.create(**given, output_config=form)
assert formed.content[0].type == "text"
Weather.model_validate_json(formed.content[0].text)
try:
    client.messages.create(**{**given, "model": "other"})
except anthropic.NotFoundError as error:
    assert "other" in error.message
else:
    raise AssertionError("no error for an unknown model")
