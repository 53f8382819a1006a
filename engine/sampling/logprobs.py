"""Log-probabilities (or logits) as they are reported to the user.

Legend: P rows, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from front.messages import Logprobs, LogprobsMode


def reported_values(logits_PV: Tensor, mode: LogprobsMode) -> Tensor:
    """float32 [P, V]: log-softmax, or for the two logits modes the logits themselves. May share memory with them."""
    if mode.endswith("logits"):
        return logits_PV
    return torch.log_softmax(logits_PV, dim=-1, dtype=torch.float32)


class Picked(NamedTuple):
    """What is reported of each row, where the logits are: the chosen token, its value and its rank, and the best
    alternatives in falling order."""

    token_ids_P: Tensor
    values_P1: Tensor
    ranks_P: Tensor
    top_ids_PK: Tensor
    top_values_PK: Tensor

    def lists(self, num_logprobs: Sequence[int]) -> list[Logprobs]:
        """num_logprobs: how many alternatives each row wants. Reads on the host."""
        token_ids, chosen, ranks, top_ids, top_values = (x.tolist() for x in self)
        return [
            Logprobs([token, *ids[:k]], [value, *values[:k]], rank)
            for token, (value,), rank, ids, values, k in zip(
                token_ids, chosen, ranks, top_ids, top_values, num_logprobs, strict=True
            )
        ]


def pick_logprobs(
    values_PV: Tensor, token_ids_P: Tensor, most: int, named: Sequence[tuple[int, Tensor]] = ()
) -> Picked:
    """most: the most alternatives that a row wants. named: (row, token ids) of rows that have these as alternatives, in
    the place of the best. Reads nothing on the host."""
    chosen_P1 = values_PV.gather(1, token_ids_P[:, None])
    ranks_P = (values_PV > chosen_P1).sum(1) + 1
    top_values_PK, top_ids_PK = values_PV.topk(most, dim=1)
    for row, ids in named:
        top_ids_PK[row, : len(ids)] = ids
        top_values_PK[row, : len(ids)] = values_PV[row, ids]
    return Picked(token_ids_P, chosen_P1, ranks_P, top_ids_PK, top_values_PK)


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
    most = size if k < 0 else min(k, size)
    return pick_logprobs(reported_values(logits_PV, mode), tokens_P, most).lists([most] * len(tokens_P))
