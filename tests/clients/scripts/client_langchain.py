"""langchain-openai."""

from __future__ import annotations

from forms import MODEL, QUESTION, URL, Weather
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

model = ChatOpenAI(base_url=f"{URL}/v1", api_key=SecretStr("none"), model=MODEL, max_completion_tokens=400)
called = model.bind_tools([Weather], tool_choice="any").invoke(QUESTION)
Weather.model_validate(called.tool_calls[0]["args"])
assert isinstance(model.with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather)
assert isinstance(model.with_structured_output(Weather, method="function_calling").invoke(QUESTION), Weather)
