"""Drafts from the client: the text that it expects, the `prediction` of a chat completion. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from engine.request import Request
from engine.speculation.ngram import NgramIndex

LEAST, MOST = 2, 6  # tokens by which a place in the prediction is found again


class _Reading(Struct):
    """Of one prediction. cursor: the place in it that comes next, if the output goes on as predicted. seen: output
    tokens that it takes account of."""

    index: NgramIndex
    cursor: int = 0
    seen: int = 0


class PredictionDrafter:
    """Implements Drafter, for requests that came with a prediction.

    While the output equals it, drafts are what comes next in it. Where the output leaves it, one token was likely put
    in the place of another, until the last tokens of the output are found elsewhere in it.
    """

    def __init__(self) -> None:
        self._readings: dict[int, _Reading] = {}

    def propose(self, request: Request, limit: int) -> list[int]:
        predicted = request.message.params.prediction_token_ids
        if not predicted:
            return []
        reading = self._readings.get(request.request_id)
        if reading is None:
            reading = self._readings[request.request_id] = _Reading(NgramIndex(LEAST, MOST))
            reading.index.extend(predicted)
        self._follow(reading, predicted, request.tokens[request.prompt_len :])
        return list(predicted[reading.cursor : reading.cursor + limit])

    def observe(self, request: Request, num_accepted: int) -> None:
        """The tokens of the request say it."""

    def forget(self, request: Request) -> None:
        self._readings.pop(request.request_id, None)

    def _follow(self, reading: _Reading, predicted: Sequence[int], output: list[int]) -> None:
        for at in range(reading.seen, len(output)):
            cursor = reading.cursor
            if cursor >= len(predicted) or predicted[cursor] != output[at]:
                found = reading.index.find(predicted, output[max(0, at + 1 - MOST) : at + 1])
                if found is not None:
                    reading.cursor = found
                    continue
            reading.cursor = cursor + 1
        reading.seen = len(output)
