"""instructor: an answer that follows a schema, by a tool and by a response format."""

from __future__ import annotations

import instructor
from forms import MODEL, QUESTION, URL, Weather
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    answer = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Weather,
        max_tokens=400,
        max_retries=0,
    )
    assert isinstance(answer, Weather)
