"""The test support for Triton itself: the repairs of the interpreter, and that nothing of it stays behind."""

from __future__ import annotations

import sys

import pytest
import torch
import triton
import triton.language as tl
from triton_support import Moving, compiling, running

pytestmark = pytest.mark.triton


@triton.jit
def _cast_kernel(x_ptr, out_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, tl.load(x_ptr + place).to(out_ptr.dtype.element_ty))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + place, tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place)))


HERE = sys.modules[__name__]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_casts_round_to_nearest(dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 20
    x[0] = 7.94  # whose mantissa carries in e4m3
    out = torch.empty(4096, dtype=dtype)
    with running(HERE):
        _cast_kernel[(1,)](x, out, COUNT=4096)
    assert torch.equal(out.float(), x.to(dtype).float())


def test_dot_of_bfloat16() -> None:
    a, b = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(32, 32)
    with running(HERE):
        _dot_kernel[(1,)](a, b, out, SIZE=32)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_a_launch_that_moves_brings_back_what_was_written() -> None:
    memory = torch.arange(16.0)
    with running(HERE):
        Moving(_cast_kernel, "cpu")[(1,)](memory[4:12], memory[8:], COUNT=4)
    assert memory.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 12, 13, 14, 15]


def test_kernels_are_what_they_were_afterwards() -> None:
    before = _cast_kernel, tl.load, tl.sum, tl.cdiv, vars(tl.tensor).get("__index__")
    with running(HERE):
        _cast_kernel[(1,)](torch.zeros(16), torch.zeros(16), COUNT=16)
    with compiling(90, HERE) as found:
        _cast_kernel[(1,)](torch.zeros(16), torch.zeros(16), COUNT=16)
    assert [item.kernel for item in found] == ["_cast_kernel"]
    assert before == (_cast_kernel, tl.load, tl.sum, tl.cdiv, vars(tl.tensor).get("__index__"))
