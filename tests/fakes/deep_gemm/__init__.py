"""A fake of DeepGEMM for the CPU, by the names that upstream 2.6 to 2.8 and sgl-deep-gemm 0.1.5 to 0.2.5 share: what its grouped
products ask for, what they compute, and what they leave undefined (NaN here). `set_arch(100)` makes it a Blackwell's, which takes
scales that are powers of two.

Legend: M rows, N outputs, K inputs, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import utils
from .utils.math import ceil_div

__all__ = [
    "get_mk_alignment_for_contiguous_layout",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "set_arch",
    "utils",
]

_ALIGNMENT = 128
_arch = [90]
Scaled = tuple[Tensor, Tensor]


def set_arch(arch: int) -> None:
    _arch[0] = arch


def get_mk_alignment_for_contiguous_layout() -> int:
    return _ALIGNMENT


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Scaled, b: Scaled, d: Tensor, grouped_layout: Tensor, recipe: object = None, recipe_a: object = None,
    recipe_b: object = None, compiled_dims: str = "nk", disable_ue8m0_cast: bool = False, use_psum_layout: bool = False,
    ensure_zero_padding: bool = True, expected_m_for_psum_layout: int | None = None,
) -> None:  # fmt: skip
    x, weights = _wide_rows(*a), _wide_weights(*b)
    _contiguous(x, weights, d, grouped_layout, use_psum_layout)


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor, b: Tensor, d: Tensor, grouped_layout: Tensor, compiled_dims: str = "nk", use_psum_layout: bool = False,
    ensure_zero_padding: bool = True, expected_m_for_psum_layout: int | None = None,
) -> None:  # fmt: skip
    _contiguous(*_plain(a, b), d, grouped_layout, use_psum_layout)


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Scaled, b: Scaled, d: Tensor, masked_m: Tensor, expected_m: int, recipe: object = None, recipe_a: object = None,
    recipe_b: object = None, compiled_dims: str = "nk", disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    _masked(_wide_rows(*a), _wide_weights(*b), d, masked_m, expected_m)


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int, compiled_dims: str = "nk"
) -> None:
    _masked(*_plain(a, b), d, masked_m, expected_m)


def _contiguous(x_MK: Tensor, weights_GNK: Tensor, d: Tensor, layout: Tensor, psum: bool) -> None:
    num_rows = x_MK.shape[0]
    assert x_MK.dim() == 2 and num_rows % _ALIGNMENT == 0, "rows in whole blocks"
    assert layout.dtype is torch.int32 and layout.is_contiguous()
    _check_out(d, (num_rows, weights_GNK.shape[1]))
    d.fill_(float("nan"))
    if psum:
        assert layout.shape == (weights_GNK.shape[0],)
        start = 0
        for group, end in enumerate(layout.tolist()):
            assert start <= end <= num_rows
            d[start:end] = x_MK[start:end] @ weights_GNK[group].T
            start = ceil_div(end, _ALIGNMENT) * _ALIGNMENT
        return
    assert layout.shape == (num_rows,)
    for start in range(0, num_rows, _ALIGNMENT):
        block = layout[start : start + _ALIGNMENT].tolist()
        group = block[0]
        assert -1 <= group < weights_GNK.shape[0]
        assert all(member in (group, -1) for member in block), "a block of rows has one group"
        real = [start + i for i, member in enumerate(block) if member >= 0]
        d[real] = (x_MK[real] @ weights_GNK[group].T).to(d.dtype)


def _masked(x_GMK: Tensor, weights_GNK: Tensor, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
    groups, capacity = x_GMK.shape[:2]
    assert x_GMK.dim() == 3 and weights_GNK.shape[0] == groups
    assert (
        masked_m.dtype is torch.int32 and masked_m.shape == (groups,) and isinstance(expected_m, int) and expected_m > 0
    )
    _check_out(d, (groups, capacity, weights_GNK.shape[1]))
    d.fill_(float("nan"))
    for group, count in enumerate(masked_m.tolist()):
        assert 0 <= count <= capacity
        d[group, :count] = x_GMK[group, :count] @ weights_GNK[group].T


def _check_out(d: Tensor, shape: tuple[int, ...]) -> None:
    assert d.dtype is torch.bfloat16 and d.is_contiguous() and d.shape == shape


def _plain(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    assert a.dtype is b.dtype is torch.bfloat16 and a.is_contiguous() and b.is_contiguous() and b.dim() == 3
    assert a.shape[-1] == b.shape[-1] and a.shape[-1] % 64 == 0
    return a.float(), b.float()


def _wide_rows(x: Tensor, scale: Tensor) -> Tensor:
    assert x.dtype is torch.float8_e4m3fn and x.is_contiguous(), "K-major"
    assert scale.dtype is torch.float32 and scale.shape == (*x.shape[:-1], ceil_div(x.shape[-1], 128))
    return x.float() * _usable(scale).repeat_interleave(128, -1)[..., : x.shape[-1]]


def _wide_weights(weight: Tensor, scale: Tensor) -> Tensor:
    groups, outputs, inputs = weight.shape
    assert weight.dtype is torch.float8_e4m3fn and weight.is_contiguous(), "K-major"
    assert scale.dtype is torch.float32 and scale.is_contiguous()
    assert scale.shape == (groups, ceil_div(outputs, 128), ceil_div(inputs, 128))
    wide = _usable(scale).repeat_interleave(128, 1)[:, :outputs].repeat_interleave(128, 2)[..., :inputs]
    return weight.float() * wide


def _usable(scale: Tensor) -> Tensor:
    """A Blackwell keeps the exponents."""
    if _arch[0] < 100:
        return scale
    return (scale.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
