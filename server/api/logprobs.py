"""Log probabilities in the shapes of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from front.outputs import PositionLogprobs, TokenLogprob
from server.api.openai import ChatLogprobs, CompletionLogprobs, JsonDict, TokenLogprobs, TopLogprob

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


def bounded(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None],
    first_token: str,
    offset: int,
    as_ids: bool,
) -> CompletionLogprobs:
    """offset: characters of the choice's text before these positions.

    A None position is the first of the prompt, whose text is first_token. `top_logprobs` holds the chosen token too,
    as evaluation harnesses compare it with the others there.
    """
    result = CompletionLogprobs([], [], [], [])
    for position in positions:
        result.text_offset.append(offset)
        if position is None:
            result.tokens.append(first_token)
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            offset += len(first_token)
            continue
        chosen = position.chosen
        name = _name(chosen, as_ids)
        result.tokens.append(name)
        result.token_logprobs.append(bounded(chosen.logprob))
        top = {_name(token, as_ids): bounded(token.logprob) for token in position.top}
        top.setdefault(name, bounded(chosen.logprob))
        result.top_logprobs.append(top)
        offset += len(chosen.token)
    return result


def chat_logprobs(positions: Sequence[PositionLogprobs], as_ids: bool) -> ChatLogprobs:
    content = []
    for position in positions:
        chosen = position.chosen
        top = [TopLogprob(_name(token, as_ids), bounded(token.logprob), list(token.raw)) for token in position.top]
        content.append(TokenLogprobs(_name(chosen, as_ids), bounded(chosen.logprob), list(chosen.raw), top))
    return ChatLogprobs(content)


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[JsonDict | None]:
    """vLLM's shape: for each prompt token {token id: {logprob, rank, decoded_token}}, None for the first."""
    result: list[JsonDict | None] = []
    for position in positions:
        if position is None:
            result.append(None)
            continue
        entries = {}
        for token in (position.chosen, *position.top):
            entry = {"logprob": bounded(token.logprob), "rank": token.rank, "decoded_token": token.token}
            entries[str(token.token_id)] = entry
        result.append(entries)
    return result


def _name(token: TokenLogprob, as_ids: bool) -> str:
    return f"token_id:{token.token_id}" if as_ids else token.token
