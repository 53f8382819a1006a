"""Rotary position embedding (arXiv 2104.09864) and the ways to stretch it; numbers equal to transformers'.

Legend: T tokens, H heads, D rotated dimensions of a head, R = D / 2 rotation planes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from layers import choice
from layers.rope_parameters import RopeParameters
from native import rows

MAX_NATIVE_ROWS = 512  # with more torch is as fast


def inverse_frequencies(rope: RopeParameters) -> Tensor:
    """Radians per position of each plane: float32 [R]."""
    if rope.kind == "none":
        return torch.zeros(rope.dim // 2)
    exponent_R = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    wavelength_R = rope.theta**exponent_R
    plain_R = 1.0 / wavelength_R
    if rope.kind == "linear":
        return plain_R / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain_R)
    if rope.kind == "yarn":
        return _yarn(rope, plain_R, 1.0 / (rope.factor * wavelength_R))
    return plain_R


def _llama3(rope: RopeParameters, plain_R: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between interpolated."""
    original = rope.original_max_position
    longest_kept = original / rope.high_freq_factor
    shortest_stretched = original / rope.low_freq_factor
    wave_R = 2 * math.pi / plain_R
    smooth_R = (original / wave_R - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between_R = (1 - smooth_R) * plain_R / rope.factor + smooth_R * plain_R
    out_R = torch.where(wave_R > shortest_stretched, plain_R / rope.factor, between_R)
    return torch.where(wave_R < longest_kept, plain_R, out_R)


def _yarn(rope: RopeParameters, plain_R: Tensor, stretched_R: Tensor) -> Tensor:
    """Planes that turn often over the original context are kept, those that turn seldom are stretched (NTK by
    parts)."""

    def plane_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = plane_of(rope.beta_fast), plane_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    ramp_R = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep_R = 1 - ramp_R
    return stretched_R * (1 - keep_R) + plain_R * keep_R


class Rope:
    """Makes cos and sin for the positions of a step; do it once per step and hand the pair to every layer.

    They are computed, not looked up: a few operations per step are cheaper than tables for 100k positions.
    """

    def __init__(self, parameters: RopeParameters, dtype: torch.dtype, device: torch.device) -> None:
        frequency_R = inverse_frequencies(parameters)
        still = parameters.unrotated // 2  # planes that do not turn
        self.inv_freq_R = F.pad(frequency_R, (0, still)).to(device)
        self.scale = parameters.scale
        self._scale_R: Tensor | None = None  # of each plane, where they differ
        if still and self.scale != 1.0:
            self._scale_R = torch.where(self.inv_freq_R > 0, self.scale, 1.0)
        self.dtype = dtype
        self._like = torch.empty(0, dtype=dtype, device=device)

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] -> (cos, sin) for `apply_rope`, each [T, 1, D] in the model's dtype, computed in float32."""
        few = positions_T.shape[0] <= MAX_NATIVE_ROWS
        if few and self._scale_R is None and rows.can_run(self._like):
            return rows.rope(positions_T.contiguous(), self.inv_freq_R, self.scale, self.dtype)
        angle_TR = positions_T[:, None] * self.inv_freq_R
        cos_TR, sin_TR = angle_TR.cos(), angle_TR.sin_()
        if self.scale != 1.0:
            scale = self.scale if self._scale_R is None else self._scale_R
            cos_TR, sin_TR = cos_TR.mul_(scale), sin_TR.mul_(scale)
        cos_TR, sin_TR = cos_TR.to(self.dtype), sin_TR.to(self.dtype)
        return torch.cat((cos_TR, cos_TR), -1)[:, None], torch.cat((-sin_TR, sin_TR), -1)[:, None]


def apply_rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate every head by its token's position: a new tensor [T, H, D]. cos and sin are what `Rope` gives.

    Plane r is the pair of dimensions (r, r + R). Checkpoints whose pairs are (2r, 2r + 1) have their rows put in this
    order when they are loaded. Where a part of a head is rotated, its planes come first, and the others stand still.
    """
    if choice.on_gpu(x_THD.device):
        rotate: Callable[..., Tensor] = choice.triton_implementation("layers.triton.rope", "apply_rope")
        return rotate(x_THD, cos_T1D, sin_T1D)
    half = x_THD.shape[-1] // 2
    partner_THD = torch.cat((x_THD[..., half:], x_THD[..., :half]), -1)
    return partner_THD.mul_(sin_T1D).addcmul_(x_THD, cos_T1D)
