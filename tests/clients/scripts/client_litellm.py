"""litellm, as its provider `openai`."""

from __future__ import annotations

from typing import Any

import litellm
from forms import MODEL, PARAMETERS, QUESTION, URL, Weather

given: Any = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 400,
}
tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
called: Any = litellm.completion(**given, tools=tools, tool_choice="required")
Weather.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)
formed: Any = litellm.completion(**given, response_format=Weather)
Weather.model_validate_json(formed.choices[0].message.content)
