"""Random numbers that depend on nothing but (seed, position, token id): a request replayed elsewhere draws the same
ones.

SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), used as a counter-based
generator: the seed is mixed into a 64-bit key, and the number for a position is the finaliser applied to key +
(position + 1) * gamma, which is that generator's (position + 1)-th output when it is started with the key. Mixed with a
token's id, its halves make 32 bits that are the token's own bits: race_bits(id) = mix(mix(id + low half) ^ high half),
modulo 2^32.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64s = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD = (1 << 64) - 1


def _finalise(x: UInt64s) -> UInt64s:
    """A bijection of 64-bit words in which every input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def seed_keys(seeds: Sequence[int]) -> UInt64s:
    """One key per seed. Seeds are any integers, taken modulo 2^64; mixing them keeps the sequences of neighbouring
    seeds (0, 1, 2, ...) from being shifted copies of one another."""
    return _finalise(np.array([seed & _WORD for seed in seeds], np.uint64) + _GAMMA)


def words(keys: UInt64s, positions: npt.NDArray[np.int64]) -> UInt64s:
    """64 random bits for each (key, position)."""
    return _finalise(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def race_bits(words_R: UInt64s, num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits for each word and token id, int32 [R, V]; those of one word are all different."""
    halves_R2 = torch.from_numpy(words_R.copy().view(np.int32).reshape(-1, 2)).to(device)
    bits_RV = torch.arange(num_tokens, dtype=torch.int32, device=device) + halves_R2[:, :1]  # the low half comes first
    return _mix(_mix(bits_RV).bitwise_xor_(halves_R2[:, 1:]))


def exponentials(bits: Tensor) -> Tensor:
    """Exponentially distributed numbers, float64: -log(1 - r), where r is made of the 32 bits of `race_bits` and lies
    in the middle of its 2^-32. They are most exact where they are small, which is what wins races."""
    number = bits.to(torch.float64)
    number += (number < 0).to(torch.float64).mul_(2.0**32).add_(0.5)  # int32 has them as signed numbers
    return number.mul_(-(2.0**-32)).log1p_().neg_()


def at_least(bits: Tensor) -> Tensor:
    """What `exponentials` is more than, in float32, for a fraction of the work."""
    return _shifted(bits, 8).to(torch.float32).mul_(2.0**-24)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (int32, whose products wrap around) in which every input bit changes about half of
    the output bits: the multiply and shift form of Wellons' "lowbias32". In place."""
    x ^= _shifted(x, 16)
    x *= 0x7FEB352D
    x ^= _shifted(x, 15)
    x *= 0x846CA68B - (1 << 32)
    x ^= _shifted(x, 16)
    return x


def _shifted(x: Tensor, count: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)
