# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Sampling in Triton: temperature, min_p, top_k, top_p and the draw of one row in one program, without sorting.
engine/sampling/sampler.py says what comes out, engine/sampling/noise.py which random number a token has.

Nothing is written but the token: probabilities are computed anew from the logits in every pass, which the second-level
cache holds. The least probability that is kept is found by bisection of its bits: of positive floats they are ordered
as the numbers. A row's result does not depend on the other rows.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096  # logits read at a time
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _finalise(x):
    """SplitMix64's, of a uint64."""
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _word(key, position):
    """engine.sampling.noise.words, uint64."""
    gamma = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    return _finalise(key + (position.to(tl.uint64) + tl.full((), 1, tl.uint64)) * gamma)


@triton.jit
def _mix(x):
    """engine.sampling.noise._mix, of uint32."""
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _exponentials(word, token):
    """engine.sampling.noise.exponentials of these tokens, in float32. The rounding of 1 - r is taken out again, so that
    small numbers are as exact as large ones."""
    low, high = word.to(tl.uint32), (word >> 32).to(tl.uint32)
    r = (_mix(_mix(token.to(tl.uint32) + low) ^ high).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    left = 1.0 - r
    taken = 1.0 - left
    return tl.where(taken > 0, -tl.log(left) * (r / taken), r)


@triton.jit
def _scores(row_ptr, at, size, temperature, CHUNK: tl.constexpr):
    """Logits over temperature, float32 [CHUNK]; -inf behind the vocabulary."""
    place = at + tl.arange(0, CHUNK)
    return tl.load(row_ptr + place, mask=place < size, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def _powers(row_ptr, at, size, temperature, highest, least, CHUNK: tl.constexpr):
    """Probabilities times the sum that would make them such: the best token's is 1. 0 where below `least`."""
    power = tl.exp2((_scores(row_ptr, at, size, temperature, CHUNK) - highest) * _LOG2_E)
    return tl.where(power >= least, power, 0.0)


@triton.jit
def _held(row_ptr, size, temperature, highest, least, bits, COUNTED: tl.constexpr, CHUNK: tl.constexpr):
    """How many tokens (or how much, float64) have a power of at least the float with these bits."""
    bound = bits.to(tl.float32, bitcast=True)
    total = tl.full((), 0.0, tl.float64)
    for at in range(0, size, CHUNK):
        power = _powers(row_ptr, at, size, temperature, highest, least, CHUNK)
        kept = power >= bound
        if COUNTED:
            kept = kept & (at + tl.arange(0, CHUNK) < size)
            total += tl.sum(kept.to(tl.int32), 0).to(tl.float64)
        else:
            total += tl.sum(tl.where(kept, power, 0.0), 0).to(tl.float64)
    return total


@triton.jit
def _least_that_holds(
    row_ptr, size, temperature, highest, least, low, wanted, COUNTED: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Bits of a bound at or above which `wanted` is held and above whose next token it is not; at `low` it is."""
    high = tl.full((), 0x3F800001, tl.int32)  # just above 1
    while high - low > 1:
        middle = low + (high - low) // 2
        held = _held(row_ptr, size, temperature, highest, least, middle, COUNTED, CHUNK)
        low = tl.where(held >= wanted, middle, low)
        high = tl.where(held >= wanted, high, middle)
        if COUNTED:  # exactly as many: no bound between these tokens and the next would keep others
            high = tl.where(held == wanted, low + 1, high)
    return low


@triton.jit
def _draw(row_ptr, size, temperature, highest, least, bound, word, CHUNK: tl.constexpr):
    """The token of the largest power / number among those of at least `bound`."""
    best, chosen = tl.full((), -1.0, tl.float32), tl.full((), 0, tl.int32)
    for at in range(0, size, CHUNK):
        token = at + tl.arange(0, CHUNK)
        power = _powers(row_ptr, at, size, temperature, highest, least, CHUNK)
        runs = (power >= bound) & (power > 0) & (token < size)
        score = tl.where(runs, power / _exponentials(word, token), -1.0)
        most = tl.max(score, 0)
        first = tl.min(tl.where(score == most, token, size), 0)
        chosen = tl.where(most > best, first, chosen)
        best = tl.maximum(most, best)
    return chosen


@triton.jit(
    do_not_specialize=["size", "stride"],
    do_not_specialize_on_alignment=[
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "key_ptr",
        "position_ptr",
    ],
)  # as in layers/triton/attention.py
def _sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, key_ptr, position_ptr, token_ptr, stride, size,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row).to(tl.int32), tl.load(top_p_ptr + row)
    highest = tl.full((), float("-inf"), tl.float32)
    for at in range(0, size, CHUNK):
        highest = tl.maximum(highest, tl.max(_scores(row_ptr, at, size, temperature, CHUNK), 0))
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # every token is forbidden
    least = tl.load(min_p_ptr + row)
    low = tl.full((), 0, tl.int32)
    if top_k > 0:
        low = _least_that_holds(row_ptr, size, temperature, highest, least, low, top_k.to(tl.float64), True, CHUNK)
    if top_p < 1.0:
        total = _held(row_ptr, size, temperature, highest, least, low, False, CHUNK)
        if top_k > 0:  # of equals at the end only as many as top_k has room for count
            more = _held(row_ptr, size, temperature, highest, least, low, True, CHUNK) - top_k.to(tl.float64)
            total -= tl.maximum(more, 0.0) * low.to(tl.float32, bitcast=True).to(tl.float64)
        share = total * top_p.to(tl.float64)
        low = _least_that_holds(row_ptr, size, temperature, highest, least, low, share, False, CHUNK)
    word = _word(tl.load(key_ptr + row).to(tl.uint64, bitcast=True), tl.load(position_ptr + row))
    bound = low.to(tl.float32, bitcast=True)
    token = _draw(row_ptr, size, temperature, highest, least, bound, word, CHUNK)
    tl.store(token_ptr + row, token.to(tl.int64))


def sample(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, seed_keys_R: Tensor,
    positions_R: Tensor,
) -> Tensor:  # fmt: skip
    """int64 [R]: the tokens that engine.sampling.sampler.sample draws for rows with a temperature.

    logits float32 or bfloat16, rows of any stride; temperature, top_p (1: off) and min_p (0: off) float32; top_k (0:
    off), seed_keys (the bits of engine.sampling.noise.seed_keys) and positions int64.
    """
    num_rows, size = logits_RV.shape
    assert logits_RV.stride(1) == 1 and all(x.is_contiguous() for x in (temperature_R, top_k_R, top_p_R, min_p_R))
    token_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    if num_rows:
        chunk = min(_CHUNK, triton.next_power_of_2(size))
        _sample_kernel[(num_rows,)](
            logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seed_keys_R, positions_R, token_R,
            logits_RV.stride(0), size, CHUNK=chunk, num_warps=16,
        )  # fmt: skip
    return token_R
