"""What every client asks for: a call of a tool, and an answer that follows a schema. Small and bounded, as the embedded
model writes what a grammar leaves it and has nothing to say."""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
QUESTION = "Is it warm in Rome?"


class Weather(BaseModel, extra="forbid"):  # else the model may go on with properties of its own
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    warm: bool


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
