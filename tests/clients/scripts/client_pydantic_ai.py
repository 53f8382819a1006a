"""pydantic-ai: output by a tool, and by a response format."""

from __future__ import annotations

from forms import MODEL, QUESTION, URL, Weather
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
for output in (ToolOutput(Weather), NativeOutput(Weather)):
    result = Agent(model, output_type=output, model_settings={"max_tokens": 400}).run_sync(QUESTION)
    assert isinstance(result.output, Weather)
