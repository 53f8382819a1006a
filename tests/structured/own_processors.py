"""Logits processors as an operator would write them; the names of these classes are given to engines."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.processors import RequestLogitsProcessor
from front.params import SamplingParams


class NoRepeats:
    """Forbids tokens that would complete an n-gram that is already in prompt and output; n is the request's
    `no_repeat`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        assert vocab_size > 0 and device.type == "cpu"

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        size = (params.extra_args or {}).get("no_repeat")
        if size is None:
            return None
        if not isinstance(size, int):
            raise ValueError(f"no_repeat must be an integer, not {size!r}")

        def process(prompt: Sequence[int], output: Sequence[int], logits_V: Tensor) -> Tensor:
            tokens = [*prompt, *output]
            end = tokens[len(tokens) - size + 1 :]
            for first in range(len(tokens) - size + 1):
                if tokens[first : first + size - 1] == end:
                    logits_V[tokens[first + size - 1]] = -torch.inf
            return logits_V

        return process


class Wobble:
    """Moves logits by a function of the whole history, so that one token more or less shows; gives another tensor."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._ids_V = torch.arange(vocab_size, device=device)

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        strength = (params.extra_args or {}).get("wobble")
        if strength is None:
            return None

        def process(prompt: Sequence[int], output: Sequence[int], logits_V: Tensor) -> Tensor:
            key = sum((place + 1) * token for place, token in enumerate([*prompt, *output])) % 9973
            return logits_V + strength * ((self._ids_V * 7919 + key) % 1000 < 100)

        return process


class Fails:
    """At the output token that the request names: raises, gives NaN or another shape, or leaves nothing."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        pass

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        asked = params.extra_args or {}
        if "how" not in asked:
            return None

        def process(prompt: Sequence[int], output: Sequence[int], logits_V: Tensor) -> Tensor:
            if len(output) < asked["at"]:
                return logits_V
            if asked["how"] == "raises":
                raise KeyError("what the operator forgot")
            return {"nan": logits_V * torch.nan, "shape": logits_V[1:], "nothing": logits_V - torch.inf}[asked["how"]]

        return process


class CannotBeMade:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        raise RuntimeError(f"made at {time.monotonic()}")

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        return None
