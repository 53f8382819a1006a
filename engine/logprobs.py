"""Log-probabilities (or logits) as they are reported to the user.

Legend: P rows, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.messages import Logprobs, LogprobsMode


def reported_values(logits_PV: Tensor, mode: LogprobsMode) -> Tensor:
    """float32 [P, V]: log-softmax, or for the two logits modes the logits themselves. May share memory with them."""
    if mode.endswith("logits"):
        return logits_PV
    return torch.log_softmax(logits_PV, dim=-1, dtype=torch.float32)


def pick_logprobs(values_PV: Tensor, token_ids_P: Tensor, num_logprobs: Sequence[int]) -> list[Logprobs]:
    """For each row the chosen token's value and rank and its num_logprobs[p] best alternatives, in falling order."""
    chosen_P1 = values_PV.gather(1, token_ids_P[:, None])
    ranks = ((values_PV > chosen_P1).sum(1) + 1).tolist()
    top = values_PV.topk(max(num_logprobs), dim=1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    return [
        Logprobs([token, *ids[:k]], [value, *values[:k]], rank)
        for token, (value,), rank, ids, values, k in zip(
            token_ids_P.tolist(), chosen_P1.tolist(), ranks, top_ids, top_values, num_logprobs, strict=True
        )
    ]


def prompt_logprobs(
    logits_PV: Tensor, next_token_ids: Sequence[int], k: int, mode: LogprobsMode, num_valid_tokens: int | None = None
) -> list[Logprobs]:
    """For P prompt tokens, each given by the logits of the token before it: one entry per token, k alternatives
    (-1: the whole vocabulary).

    The sampler's edits and temperature are not applied to prompts, so the processed modes equal the raw ones here.
    """
    if not next_token_ids:
        return []
    logits_PV = logits_PV[:, :num_valid_tokens].float()
    size = logits_PV.shape[1]
    tokens_P = torch.tensor(next_token_ids, device=logits_PV.device)
    return pick_logprobs(reported_values(logits_PV, mode), tokens_P, [size if k < 0 else min(k, size)] * len(tokens_P))
