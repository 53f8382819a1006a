"""What a checkpoint says about its rotary positions, as a value. Free of torch (configs are read without it)."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

RopeKind = Literal["default", "linear", "llama3", "yarn", "none"]  # none: nothing is rotated


class RopeParameters(Struct, frozen=True):
    """dim: rotated dimensions of a head; unrotated: the others, where positions rotate a part of it. Fields of other
    kinds than `kind` are unused.

    Names and meaning as in Hugging Face `rope_parameters`; attention_factor None means: derive it from the rest.
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    attention_factor: float | None = None  # yarn
    attn_factor: float = 1.0  # yarn; vLLM's: multiplies what would be the scale, where attention_factor replaces it
    truncate: bool = True  # yarn
    unrotated: int = 0

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            both = yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
            return self.attn_factor * both
        return self.attn_factor * yarn_mscale(self.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Yarn's temperature of attention for a context stretched by `factor` (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
