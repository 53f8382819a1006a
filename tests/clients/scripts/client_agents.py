"""openai-agents, over Responses and over chat."""

from __future__ import annotations

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from forms import MODEL, QUESTION, URL, Weather
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
asked: list[str] = []


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    asked.append(city)
    return f"It is warm in {city}."


for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    model = kind(model=MODEL, openai_client=client)
    settings = ModelSettings(max_tokens=400, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(
        name="a", model=model, tools=[weather], model_settings=settings, tool_use_behavior="stop_on_first_tool"
    )
    asked.clear()
    result = Runner.run_sync(agent, QUESTION)
    assert asked and result.final_output == f"It is warm in {asked[0]}.", result
    formed = Agent(name="b", model=model, output_type=Weather, model_settings=ModelSettings(max_tokens=400))
    assert isinstance(Runner.run_sync(formed, QUESTION).final_output, Weather)
