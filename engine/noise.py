"""Random numbers that depend on nothing but (seed, position): a request replayed elsewhere draws the same ones.

SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), used as a counter-based
generator: the seed is mixed into a 64-bit key, and the number for a position is the finaliser applied to
key + (position + 1) * gamma, which is that generator's (position + 1)-th output when it is started with the key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


def uniform(keys: UInt64s, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number of [0, 1) for each (key, position), with 53 random bits."""
    words = _finalise(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (words >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)
