"""What a rank has done since its start, counted for its statistics."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from front.messages import STEP_TOKENS


class Counts:
    """The names are those of RankStats."""

    __slots__ = (
        "cached_tokens", "generation_tokens", "num_step_tokens", "preemptions", "prompt_tokens", "step_tokens", "steps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.preemptions = self.steps = self.prompt_tokens = self.generation_tokens = 0
        self.cached_tokens = self.num_step_tokens = 0
        self.step_tokens = [0] * (len(STEP_TOKENS) + 1)

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def add_step(self, num_tokens: int) -> None:
        self.steps += 1
        self.num_step_tokens += num_tokens
        self.step_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def add_prompt(self, num_tokens: int, num_cached: int) -> None:
        """A prompt is computed. num_cached: of its tokens, those found in the prefix cache."""
        self.prompt_tokens += num_tokens
        self.cached_tokens += num_cached
