"""Logits to tokens, as a pure function of (logits, seed, position): no state, and no row can influence another.

Legend: P rows sampled in this step, R some of them, V vocabulary, K candidates in falling order, N listed places,
B stretches of W vocabulary entries.

Order: raw log-probabilities are taken; then the edits that any row may have (allowed_token_ids, bad_words, min_tokens,
logit_bias, penalties), after which greedy rows take the best; then temperature, min_p, top_k, top_p and the draw.
A draw inverts the cumulative distribution of the kept tokens in vocabulary order at one uniform number (engine/noise.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.logprobs import pick_logprobs, reported_values
from engine.messages import Logprobs, LogprobsMode
from engine.noise import uniform
from engine.sampling_table import EDITS, LOGPROBS, MIN_P, RANDOM, TOP_K, TOP_P, Ints, Pairs, SamplingBatch

_NUM_CANDIDATES = 512  # looked at first when only top_p is asked for; a full sort follows where they are not enough
_STRETCH = 256


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids_P: Tensor  # int64
    logprobs: list[Logprobs | None] | None  # one per row, None where not asked for; None when nobody asked


def sample(logits_PV: Tensor, batch: SamplingBatch, logprobs_mode: LogprobsMode = "raw_logprobs") -> Sampled:
    """logits_PV: float32 [P, V], rows as given to SamplingTable.gather; they may be overwritten.

    Greedy rows take the lowest id of equal maxima. Where top_k or top_p would cut between tokens of equal probability,
    all of them are kept.
    """
    logits_PV = logits_PV[:, : batch.num_valid_tokens]
    needs = batch.needs
    if not needs:
        return Sampled(logits_PV.argmax(-1), None)
    device = logits_PV.device
    raw = logprobs_mode.startswith("raw")
    asked_R = np.flatnonzero(batch.needs_P & LOGPROBS)
    if needs & LOGPROBS and raw:
        values_RV = reported_values(logits_PV[_to(asked_R, device)], logprobs_mode)
    if needs & EDITS:
        _edit(logits_PV, batch)
    if needs & RANDOM:
        random_R = np.flatnonzero(batch.needs_P & RANDOM)
        if len(random_R) == batch.num_rows:
            token_ids_P = _sample_rows(logits_PV, batch, random_R)
        else:
            token_ids_P = logits_PV.argmax(-1)
            rows_R = _to(random_R, device)
            some_RV = logits_PV[rows_R]
            token_ids_P[rows_R] = _sample_rows(some_RV, batch, random_R)
            if needs & LOGPROBS and not raw:
                logits_PV[rows_R] = some_RV
    else:
        token_ids_P = logits_PV.argmax(-1)
    if not needs & LOGPROBS:
        return Sampled(token_ids_P, None)
    rows_R = _to(asked_R, device)
    if not raw:
        values_RV = reported_values(logits_PV[rows_R], logprobs_mode)
    logprobs: list[Logprobs | None] = [None] * batch.num_rows
    picked = pick_logprobs(values_RV, token_ids_P[rows_R], batch.num_logprobs_P[asked_R].tolist())
    for p, entry in zip(asked_R.tolist(), picked, strict=True):
        logprobs[p] = entry
    return Sampled(token_ids_P, logprobs)


def _to(array: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _edit(logits_PV: Tensor, batch: SamplingBatch) -> None:
    """In place. What is forbidden stays so: no bias and no penalty lifts minus infinity."""
    for p, ids in batch.allowed:
        kept = logits_PV[p, ids]
        logits_PV[p].fill_(-torch.inf)
        logits_PV[p, ids] = kept
    if batch.forbidden is not None:
        logits_PV[batch.forbidden.p_N, batch.forbidden.ids_N] = -torch.inf
    if batch.bias is not None:
        logits_PV[batch.bias.p_N, batch.bias.ids_N] += batch.bias.values_MN[0]
    if batch.penalties is not None:
        _penalise(logits_PV, batch.penalties)


def _penalise(logits_PV: Tensor, pairs: Pairs) -> None:
    """Repetition over prompt and output (CTRL, arXiv 1909.05858), frequency and presence over output (OpenAI's API)."""
    count_N, repetition_N, presence_N, frequency_N = pairs.values_MN
    logits_N = logits_PV[pairs.p_N, pairs.ids_N]
    logits_N = torch.where(logits_N > 0, logits_N / repetition_N, logits_N * repetition_N)
    logits_N -= frequency_N * count_N + presence_N * (count_N > 0)
    logits_PV[pairs.p_N, pairs.ids_N] = logits_N


def _sample_rows(logits_RV: Tensor, batch: SamplingBatch, rows_R: Ints) -> Tensor:
    """Tokens of the rows with a temperature, int64 [R]; leaves the processed logits behind."""
    device = logits_RV.device
    logits_RV /= torch.from_numpy(batch.temperature_P[rows_R]).to(device)[:, None]
    needs_R = batch.needs_P[rows_R]
    if batch.needs & MIN_P:
        # A share of the best probability is a distance from the best logit. log(0): no limit.
        with np.errstate(divide="ignore"):
            distance_R = torch.from_numpy(np.log(batch.min_p_P[rows_R])).to(device)
        least_R1 = (logits_RV.amax(-1) + distance_R)[:, None]
        logits_RV.masked_fill_(logits_RV < least_R1, -torch.inf)
    if batch.needs & (TOP_K | TOP_P):
        least_R = torch.full((len(rows_R),), -torch.inf, device=device)
        limited = needs_R & TOP_K != 0
        for chosen, function in ((limited, _least_of_top_k), (~limited & (needs_R & TOP_P != 0), _least_of_top_p)):
            if chosen.any():
                some = np.flatnonzero(chosen)
                rows = _to(some, device)
                top_k, top_p = (torch.from_numpy(a[rows_R[some]]).to(device) for a in (batch.top_k_P, batch.top_p_P))
                least_R[rows] = function(logits_RV[rows], top_k, top_p)
        logits_RV.masked_fill_(logits_RV < least_R[:, None], -torch.inf)
    uniform_R = torch.from_numpy(uniform(batch.seed_keys_P[rows_R], batch.positions_P[rows_R])).to(device)
    return _draw(logits_RV, uniform_R)


def _least_of_top_k(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """The smallest logit that is kept, per row; top_p is taken within the top_k."""
    best_RK = logits_RV.topk(int(top_k_R.max()), dim=-1).values
    beyond_RK = torch.arange(best_RK.shape[1], device=best_RK.device) >= top_k_R[:, None]
    best_RK.masked_fill_(beyond_RK, -torch.inf)
    weights_RK = (best_RK - best_RK[:, :1]).exp_().double()
    least_R, _ = _nucleus(best_RK, weights_RK, weights_RK.sum(-1), top_p_R)
    kth_R = best_RK.gather(1, top_k_R[:, None] - 1)[:, 0]
    return torch.where(top_p_R < 1, least_R, kth_R)


def _least_of_top_p(logits_RV: Tensor, _: Tensor, top_p_R: Tensor) -> Tensor:
    """The smallest logit that is kept, per row."""
    vocab_size = logits_RV.shape[1]
    best_RK = logits_RV.topk(min(_NUM_CANDIDATES, vocab_size), dim=-1).values
    total_R = (logits_RV - best_RK[:, :1]).exp_().sum(-1).double()
    least_R, enough_R = _nucleus(best_RK, (best_RK - best_RK[:, :1]).exp_().double(), total_R, top_p_R)
    if best_RK.shape[1] < vocab_size and not enough_R.all():
        short = torch.nonzero(~enough_R)[:, 0]
        sorted_RV = logits_RV[short].sort(dim=-1, descending=True).values
        weights_RV = (sorted_RV - sorted_RV[:, :1]).exp_().double()
        least_R[short], _ = _nucleus(sorted_RV, weights_RV, total_R[short], top_p_R[short])
    return least_R


def _nucleus(best_RK: Tensor, weights_RK: Tensor, total_R: Tensor, top_p_R: Tensor) -> tuple[Tensor, Tensor]:
    """Fewest leading candidates that hold a share top_p of total_R: the last one's logit, and whether there are enough.

    A candidate is kept when those before it hold less than the share (so the first always is).
    """
    share_R = total_R * top_p_R
    sums_RK = weights_RK.cumsum(-1)
    num_before = (sums_RK - weights_RK < share_R[:, None]).sum(-1).clamp_(min=1)
    return best_RK.gather(1, num_before[:, None] - 1)[:, 0], sums_RK[:, -1] >= share_R


def _draw(logits_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token at which the cumulative weight, in vocabulary order, first exceeds uniform * total.

    In two levels, because a cumulative sum is slow and a plain one fast: the weights of stretches of the vocabulary,
    then those within the stretch. A row whose every token is forbidden gets some valid token id.
    """
    num_rows, vocab_size = logits_RV.shape
    num_stretches = -(-vocab_size // _STRETCH)
    weights = torch.empty((num_rows, num_stretches * _STRETCH), device=logits_RV.device)
    best_R1 = logits_RV.amax(-1, keepdim=True)
    torch.sub(logits_RV, best_R1.masked_fill(best_R1.isinf(), 0), out=weights[:, :vocab_size]).exp_()
    weights[:, vocab_size:] = 0
    weights_RBW = weights.view(num_rows, num_stretches, _STRETCH)
    sums_RB = weights_RBW.sum(-1).double().cumsum(-1)
    total_R = sums_RB[:, -1]
    target_R1 = torch.minimum(uniform_R * total_R, total_R.nextafter(torch.zeros_like(total_R)))[:, None]
    stretch_R = (sums_RB <= target_R1).sum(-1).clamp_(max=num_stretches - 1)
    before_R1 = torch.nn.functional.pad(sums_RB, (1, 0)).gather(1, stretch_R[:, None])
    inner_RW = weights_RBW[torch.arange(num_rows, device=weights.device), stretch_R].double()
    place_R = (inner_RW.cumsum(-1) <= target_R1 - before_R1).sum(-1)
    # The two sums of a stretch may differ in the last bit; never go past its last possible token.
    numbers_W = torch.arange(_STRETCH, device=weights.device)
    last_R = torch.where(inner_RW > 0, numbers_W, 0).amax(-1)
    return stretch_R * _STRETCH + torch.minimum(place_R, last_R)
