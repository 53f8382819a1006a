"""Logits to tokens, as a pure function of (logits, seed, position): no state, and no row can influence another.

Legend: P rows sampled in this step, R some of them, V vocabulary, K candidates in falling order, N listed places,
B stretches of vocabulary entries.

Order: raw log-probabilities are taken; then logits processors have their rows; then the edits that any row may have
(its grammar's mask, allowed_token_ids, bad_words, min_tokens, logit_bias, penalties), after which greedy rows take the
best; then temperature, min_p, top_k, top_p and the draw. A draw is a race: every kept token has an exponentially
distributed number of its own (engine/sampling/noise.py), and the one with the largest probability / number wins, which
is each with its probability. Rounding of the logits changes the winner only where two tokens are as close as the
rounding; a number that is looked up in the cumulative distribution, which moves at every token as soon as it does at
the first, falls to a neighbour far more often (benchmarks/bench_draws.py). What is written here in torch is the
specification, and what runs on other devices; on the CPU the native kernel does the same (native/sampling.py), but for
the modes of log-probabilities that want the processed logits of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from engine.device import to_device
from engine.sampling.logprobs import Picked, pick_logprobs, reported_values
from engine.sampling.noise import UInt64s, at_least, exponentials, race_bits, words
from engine.sampling.sampling_table import (
    EDITS,
    LOGPROBS,
    MIN_P,
    PROCESSED,
    RANDOM,
    TOP_K,
    TOP_P,
    Ints,
    Pairs,
    SamplingBatch,
)
from front.messages import Logprobs, LogprobsMode
from layers import choice
from layers.greedy import greedy
from native import sampling

_NUM_CANDIDATES = 512  # looked at first when only top_p is asked for; a full sort follows where they are not enough
_STRETCH = 128
_NUMBERS_AT_ONCE = 1 << 16  # what is made of them stays in a near cache


class LogprobsTensors(Struct, frozen=True):
    """Log-probabilities of those rows that asked for them."""

    rows_R: Ints
    num_logprobs_R: Ints
    picked: Picked


class Sampled(Struct, frozen=True):
    """Where the logits are, until it is read."""

    token_ids_P: Tensor  # int64
    logprobs_tensors: LogprobsTensors | None  # None: no row did

    @property
    def tensors(self) -> list[Tensor]:
        """All of it that is on the device."""
        return [self.token_ids_P, *(() if self.logprobs_tensors is None else self.logprobs_tensors.picked)]

    def moved(self, tensors: Sequence[Tensor]) -> Sampled:
        """The same with its tensors elsewhere."""
        if tensors[0] is self.token_ids_P:
            return self
        logprobs = self.logprobs_tensors
        return Sampled(tensors[0], None if logprobs is None else replace(logprobs, picked=Picked(*tensors[1:])))

    @property
    def logprobs(self) -> list[Logprobs | None] | None:
        """One per row, None where not asked for; None when no row asked. Reads on the host."""
        found = self.logprobs_tensors
        if found is None:
            return None
        logprobs: list[Logprobs | None] = [None] * self.token_ids_P.shape[0]
        picked = found.picked.lists(found.num_logprobs_R.tolist())
        for p, entry in zip(found.rows_R.tolist(), picked, strict=True):
            logprobs[p] = entry
        return logprobs


def sample(logits_PV: Tensor, batch: SamplingBatch, logprobs_mode: LogprobsMode = "raw_logprobs") -> Sampled:
    """logits_PV: float32 or bfloat16 [P, V], rows as given to SamplingTable.gather; they may be overwritten. All
    arithmetic is in float32; that greedy rows alone need none saves a copy of the logits, the largest tensor of a step.

    Greedy rows take the lowest id of equal maxima. Where top_k or top_p would cut between tokens of equal probability,
    all of them are kept.
    """
    logits_PV = logits_PV[:, : batch.num_valid_tokens]
    needs = batch.needs
    if not needs:
        return Sampled(greedy(logits_PV), None)
    keep_logits = bool(needs & LOGPROBS) and not logprobs_mode.startswith("raw")
    if keep_logits or not sampling.can_run(logits_PV):
        logits_PV = logits_PV.float()
    if needs & LOGPROBS:
        asked_R = np.flatnonzero(batch.needs_P & LOGPROBS)
        (rows_R,) = to_device([asked_R], logits_PV.device)
        if not keep_logits:
            values_RV = reported_values(logits_PV[rows_R].float(), logprobs_mode)
    if needs & PROCESSED:
        logits_PV = logits_PV.float()
        for p, processors, drafts in batch.processed:
            processors.apply(logits_PV[p], drafts)
    if needs & (EDITS | RANDOM) and not keep_logits and sampling.can_run(logits_PV):
        token_ids_P = _natively(logits_PV, batch)
    else:
        token_ids_P = _in_torch(logits_PV, batch, keep_logits)
    if not needs & LOGPROBS:
        return Sampled(token_ids_P, None)
    if keep_logits:
        values_RV = reported_values(logits_PV[rows_R], logprobs_mode)
    num_logprobs_R = batch.num_logprobs_P[asked_R]
    named = [(int(np.searchsorted(asked_R, p)), ids) for p, ids in batch.named_logprobs]
    picked = pick_logprobs(values_RV, token_ids_P[rows_R], int(num_logprobs_R.max()), named)
    return Sampled(token_ids_P, LogprobsTensors(asked_R, num_logprobs_R, picked))


def reads_on_the_host(batch: SamplingBatch, logprobs_mode: LogprobsMode) -> bool:
    """Whether `sample` may wait for the device on the way: what it does for the processed modes of
    log-probabilities, and what logits processors may do."""
    return bool(batch.processed) or (bool(batch.needs & LOGPROBS) and not logprobs_mode.startswith("raw"))


def _natively(logits_PV: Tensor, batch: SamplingBatch) -> Tensor:
    """Tokens of all rows, int64 [P]."""
    edits = sampling.Edits(
        batch.masks,
        batch.allowed,
        None if batch.forbidden is None else (batch.forbidden.p_N, batch.forbidden.ids_N),
        *(
            None if pairs is None else (pairs.p_N, pairs.ids_N, pairs.values_MN)
            for pairs in (batch.bias, batch.penalties)
        ),
    )
    draws = sampling.Draws(
        batch.needs_P & RANDOM, batch.temperature_P, batch.top_p_P, batch.min_p_P, batch.top_k_P, batch.seed_keys_P,
        batch.positions_P,
    )  # fmt: skip
    return sampling.draw_tokens(logits_PV, draws, edits)


def _in_torch(logits_PV: Tensor, batch: SamplingBatch, keep_logits: bool) -> Tensor:
    """The same; float32 logits are edited in place. keep_logits: also to what they are after temperature and limits."""
    needs, device = batch.needs, logits_PV.device
    if needs & EDITS:
        _edit(logits_PV, batch)
    if not needs & RANDOM:
        return greedy(logits_PV)
    random_R = np.flatnonzero(batch.needs_P & RANDOM)
    if len(random_R) == batch.num_rows:
        return _sample_rows(logits_PV, batch, random_R, keep_logits)
    token_ids_P = greedy(logits_PV)
    (rows_R,) = to_device([random_R], device)
    some_RV = logits_PV[rows_R]
    token_ids_P[rows_R] = _sample_rows(some_RV, batch, random_R, keep_logits)
    if keep_logits:
        logits_PV[rows_R] = some_RV
    return token_ids_P


def _edit(logits_PV: Tensor, batch: SamplingBatch) -> None:
    """In place. What is forbidden stays so: no bias and no penalty lifts minus infinity. Where that leaves nothing of
    what a grammar allows, the first token that it allows comes."""
    if batch.masks is not None:
        rows_R, masks_RW = _masks(batch, logits_PV.device)
        may_RV = _bits(masks_RW)[:, : logits_PV.shape[1]]
        logits_PV[rows_R] = logits_PV[rows_R].masked_fill(~may_RV, -torch.inf)
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
    if batch.masks is not None:
        nothing_R = ~(logits_PV[rows_R] > -torch.inf).any(1)
        first_R = may_RV.to(torch.int8).argmax(1)
        logits_PV[rows_R, first_R] = torch.where(nothing_R, 0.0, logits_PV[rows_R, first_R])


def _masks(batch: SamplingBatch, device: torch.device) -> list[Tensor]:
    """Of the R rows that have one: which rows, and the masks, [R, V / 32]."""
    assert batch.masks is not None
    mask_P, masks_NW = batch.masks
    guided_R = np.flatnonzero(mask_P >= 0)
    return to_device([guided_R, masks_NW[mask_P[guided_R]]], device)


def _bits(masks_RW: Tensor) -> Tensor:
    """bool [R, 32 W]: bit i of word w is element 32 w + i."""
    bits = torch.arange(32, dtype=torch.int32, device=masks_RW.device)
    return ((masks_RW[:, :, None] >> bits) & 1).flatten(1).bool()


def _penalise(logits_PV: Tensor, pairs: Pairs) -> None:
    """Repetition over prompt and output (CTRL, arXiv 1909.05858), frequency and presence over output (OpenAI's API)."""
    count_N, repetition_N, presence_N, frequency_N = pairs.values_MN
    logits_N = logits_PV[pairs.p_N, pairs.ids_N]
    logits_N = torch.where(logits_N > 0, logits_N / repetition_N, logits_N * repetition_N)
    logits_N -= frequency_N * count_N + presence_N * (count_N > 0)
    logits_PV[pairs.p_N, pairs.ids_N] = logits_N


def _sample_rows(logits_RV: Tensor, batch: SamplingBatch, rows_R: Ints, keep_logits: bool) -> Tensor:
    """Tokens of the rows with a temperature, int64 [R]. keep_logits: leave the processed logits behind."""
    device = logits_RV.device
    if choice.on_gpu(device) and not keep_logits:
        return _sample_on_gpu(logits_RV, batch, rows_R)
    needs_R = batch.needs_P[rows_R]
    logits_RV /= torch.from_numpy(batch.temperature_P[rows_R]).to(device)[:, None]
    # From here on with probabilities: torch's softmax takes minus infinity in its stride, its exp is slow there.
    probs_RV = logits_RV.softmax(-1)
    if batch.needs & MIN_P:
        least_R = probs_RV.amax(-1) * torch.from_numpy(batch.min_p_P[rows_R]).to(device)
        _drop(probs_RV, least_R, logits_RV if keep_logits else None)
    if batch.needs & (TOP_K | TOP_P):
        least_R = torch.zeros(len(rows_R), device=device)
        limited_R = needs_R & TOP_K != 0
        for chosen_R, function in (
            (limited_R, _least_of_top_k),
            (~limited_R & (needs_R & TOP_P != 0), _least_of_top_p),
        ):
            if chosen_R.any():
                some = np.flatnonzero(chosen_R)
                limits = batch.top_k_P[rows_R[some]], batch.top_p_P[rows_R[some]]
                rows, top_k, top_p = to_device([some, *limits], device)
                least_R[rows] = function(probs_RV if len(some) == len(rows_R) else probs_RV[rows], top_k, top_p)
        _drop(probs_RV, least_R, logits_RV if keep_logits else None)
    return _draw(probs_RV, words(batch.seed_keys_P[rows_R], batch.positions_P[rows_R]))


def _sample_on_gpu(logits_RV: Tensor, batch: SamplingBatch, rows_R: Ints) -> Tensor:
    columns = (
        batch.temperature_P,
        batch.top_k_P,
        batch.top_p_P,
        batch.min_p_P,
        batch.seed_keys_P.view(np.int64),
        batch.positions_P,
    )
    sample_rows: Callable[..., Tensor] = choice.triton_implementation("layers.triton.sampling", "sample")
    return sample_rows(logits_RV, *to_device([column[rows_R] for column in columns], logits_RV.device))


def _drop(probs_RV: Tensor, least_R: Tensor, logits_RV: Tensor | None) -> None:
    """Tokens below their row's least probability are out. In place."""
    if logits_RV is not None:
        logits_RV.masked_fill_(probs_RV < least_R[:, None], -torch.inf)
    kept_RV = torch.empty_like(
        probs_RV
    )  # float32 zeros and ones: multiplying by a bool tensor takes five times as long
    probs_RV *= torch.ge(probs_RV, least_R[:, None], out=kept_RV)


def _least_of_top_k(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """The smallest probability that is kept, float32 [R]; top_p is taken within the top_k."""
    best_RK = _best(probs_RV, int(top_k_R.max()))
    best_RK *= torch.arange(best_RK.shape[1], device=best_RK.device) < top_k_R[:, None]
    kth_R = best_RK.gather(1, top_k_R[:, None] - 1)[:, 0]
    least_R, _ = _nucleus(best_RK, best_RK.double().sum(-1), top_p_R)
    return torch.where(top_p_R < 1, least_R, kth_R)


def _least_of_top_p(probs_RV: Tensor, _: Tensor, top_p_R: Tensor) -> Tensor:
    """The smallest probability that is kept, float32 [R]."""
    vocab_size = probs_RV.shape[1]
    total_R = _stretches(probs_RV).sum(-1).double().sum(-1)
    best_RK = _best(probs_RV, min(_NUM_CANDIDATES, vocab_size))
    least_R, enough_R = _nucleus(best_RK, total_R, top_p_R)
    if best_RK.shape[1] < vocab_size and not enough_R.all():
        short = torch.nonzero(~enough_R)[:, 0]
        least_R[short], _ = _nucleus(_best(probs_RV[short], vocab_size), total_R[short], top_p_R[short])
    return least_R


def _best(probs_RV: Tensor, k: int) -> Tensor:
    """The k largest values of each row in falling order, float32 [R, K].

    On the CPU by numpy, whose sort and partition use vector instructions (a row of 150,000: 0.3 ms, torch 20 ms).
    """
    if probs_RV.device.type != "cpu":
        return probs_RV.topk(k, dim=-1).values
    first = probs_RV.shape[1] - k
    values_RV = probs_RV.numpy()
    rising = np.sort(np.partition(values_RV, first, axis=-1)[:, first:] if first else values_RV, axis=-1)
    return torch.from_numpy(rising[:, ::-1].copy())


def _nucleus(best_RK: Tensor, total_R: Tensor, top_p_R: Tensor) -> tuple[Tensor, Tensor]:
    """Fewest leading candidates that hold a share top_p of total_R: the last one's value, and whether there are enough.

    A candidate is kept when those before it hold less than the share (so the first always is).
    """
    share_R = total_R * top_p_R
    sums_RK = best_RK.cumsum(-1, dtype=torch.float64)
    num_kept_R = ((sums_RK < share_R[:, None]).sum(-1) + 1).clamp_(max=best_RK.shape[1])
    return best_RK.gather(1, num_kept_R[:, None] - 1)[:, 0], sums_RK[:, -1] >= share_R


def _draw(probs_RV: Tensor, words_R: UInt64s) -> Tensor:
    """The winners of the races, int64 [R]. Probabilities need not add up to 1. A row whose every token is forbidden
    gets some valid token id."""
    step = max(1, _NUMBERS_AT_ONCE // probs_RV.shape[1])
    parts = [slice(first, first + step) for first in range(0, len(words_R), step)]
    return torch.cat([_race(probs_RV[rows], words_R[rows]) for rows in parts])


def _race(probs_RV: Tensor, words_R: UInt64s) -> Tensor:
    """Only those are looked at closely that may be ahead of the likeliest."""
    bits_RV = race_bits(words_R, probs_RV.shape[1], probs_RV.device)
    most_R1, winner_R1 = probs_RV.max(-1, keepdim=True)
    ahead_R1 = most_R1 / exponentials(bits_RV.gather(1, winner_R1))
    # Rounded down by more than what follows is rounded.
    row_N, token_N = torch.nonzero(probs_RV > at_least(bits_RV) * (ahead_R1 * (1 - 2.0**-18)).float(), as_tuple=True)
    score_N = probs_RV[row_N, token_N] / exponentials(bits_RV[row_N, token_N])
    best_R = torch.zeros(len(words_R), dtype=score_N.dtype, device=score_N.device)
    best_R.scatter_reduce_(0, row_N, score_N, "amax")
    won_N = score_N == best_R[row_N]
    winner_R = winner_R1[:, 0]
    winner_R[row_N[won_N]] = token_N[won_N]
    return winner_R


def _stretches(probs_RV: Tensor) -> Tensor:
    """[R, V] as [R, B, W], with zeros behind the vocabulary's end (a view when it is a multiple of W).

    Sums are taken per stretch first. One over a whole long row may be cut differently among threads when the row is
    alone, and the result of a row must not depend on its company.
    """
    num_rows, vocab_size = probs_RV.shape
    if vocab_size % _STRETCH:
        probs_RV = torch.nn.functional.pad(probs_RV, (0, -vocab_size % _STRETCH))
    return probs_RV.reshape(num_rows, -1, _STRETCH)
