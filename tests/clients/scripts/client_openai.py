"""The openai SDK: chat and Responses."""

from __future__ import annotations

from typing import Any

from forms import MODEL, PARAMETERS, QUESTION, URL, Weather
from openai import OpenAI, pydantic_function_tool

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
messages: Any = [{"role": "user", "content": QUESTION}]

chat = client.chat.completions.parse(
    model=MODEL,
    messages=messages,
    tools=[pydantic_function_tool(Weather)],
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=400,
)
(call,) = chat.choices[0].message.tool_calls or ()
assert isinstance(call.function.parsed_arguments, Weather), chat
answered = [*messages, chat.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "yes"}]
assert client.chat.completions.create(model=MODEL, messages=answered, max_tokens=5).choices[0].message.content
parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Weather, max_tokens=400)
assert isinstance(parsed.choices[0].message.parsed, Weather)

tools: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
with client.responses.stream(
    model=MODEL, input=QUESTION, tools=tools, tool_choice="required", parallel_tool_calls=False, max_output_tokens=400
) as stream:
    kinds = [event.type for event in stream]
    response = stream.get_final_response()
assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
assert "response.function_call_arguments.delta" in kinds
item = next(item for item in response.output if item.type == "function_call")
Weather.model_validate_json(item.arguments)
again = client.responses.create(
    model=MODEL,
    previous_response_id=response.id,
    input=[{"type": "function_call_output", "call_id": item.call_id, "output": "yes"}],
    max_output_tokens=5,
)
assert again.status == "incomplete" and again.output_text
assert client.responses.retrieve(again.id).output_text == again.output_text
formed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=400)
assert isinstance(formed.output_parsed, Weather)
custom: Any = [
    {"type": "custom", "name": "sum", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}}
]
forced = client.responses.create(
    model=MODEL, input="1 + 1", tools=custom, tool_choice={"type": "custom", "name": "sum"}, max_output_tokens=20
)
assert forced.output[0].type == "custom_tool_call" and len(forced.output[0].input) == 3, forced
