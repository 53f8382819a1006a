"""Log probabilities in the shapes of the two endpoints."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from front.outputs import PositionLogprobs, TokenLogprob
from server.api.openai import ChatLogprobs, CompletionLogprobs, JsonDict, TokenLogprobs, TopLogprob

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


def bounded(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None],
    first: tuple[int, str],
    text: str,
    offset: int,
    as_ids: bool,
    hidden: Collection[int],
) -> CompletionLogprobs:
    """text: of these positions; offset: characters of the choice's text before it.

    A None position is the first of the prompt, the token `first` (id and text). `top_logprobs` holds the chosen token
    too, and before the others, as evaluation harnesses compare it with them. hidden: special tokens, which have no
    characters where the text lacks them.
    """
    result = CompletionLogprobs([], [], [], [])
    began = offset
    for position in positions:
        result.text_offset.append(offset)
        token_id, token = first if position is None else (position.chosen.token_id, position.chosen.token)
        if token_id not in hidden or (token and text.startswith(token, offset - began)):
            offset += len(token)
        if position is None:
            result.tokens.append(f"token_id:{token_id}" if as_ids else token)
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        chosen = position.chosen
        name = _name(chosen, as_ids)
        result.tokens.append(name)
        result.token_logprobs.append(bounded(chosen.logprob))
        top = {_name(token, as_ids): bounded(token.logprob) for token in position.top}
        result.top_logprobs.append({name: bounded(chosen.logprob)} | top)
    return result


def chat_logprobs(positions: Sequence[PositionLogprobs], as_ids: bool, with_chosen: bool = False) -> ChatLogprobs:
    """with_chosen: the alternatives hold the chosen token too, also where it is none of those that were named."""
    content = []
    for position in positions:
        chosen, shown = position.chosen, position.top
        if with_chosen and all(token.token_id != chosen.token_id for token in shown):
            shown = [chosen, *shown]
        top = [TopLogprob(_name(token, as_ids), bounded(token.logprob), list(token.raw)) for token in shown]
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
