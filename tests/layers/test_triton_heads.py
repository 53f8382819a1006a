"""Small layers in Triton: the heads' norm, rotation and write in one launch, and the gate of a feed-forward layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_support import compiling, report, running

from layers.attention import qk_norm_rope_cache
from layers.mlp import silu_mul
from layers.triton import heads as triton_heads
from layers.triton import rope as triton_rope
from layers.triton import silu_mul as triton_silu_mul
from native import Isa, isa, limit_isa

pytestmark = pytest.mark.triton


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 1, 8), (5, 5, 12), (12, 2, 256)])
def test_heads(heads: int, kv_heads: int, size: int, normed: bool, dtype: torch.dtype) -> None:
    tokens = 3
    qkv = normal(tokens, heads + 2 * kv_heads, size).to(dtype)
    norm = normal(heads + kv_heads, size, seed=1).to(dtype) if normed else None
    angle = normal(tokens, size // 2, seed=2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    rope = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    slots = torch.tensor([4, 0, 2])
    ours, theirs = ([torch.zeros(6, kv_heads, size, dtype=dtype) for _ in range(2)] for _ in range(2))
    before = isa()
    limit_isa(Isa.NONE)
    expected = qk_norm_rope_cache(qkv.clone(), heads, norm, 1e-6, rope, tuple(theirs), slots)
    limit_isa(before)
    with running(triton_heads, triton_rope):
        q = triton_heads.qk_norm_rope_cache(qkv, heads, norm, 1e-6, rope, tuple(ours), slots)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threshold(dtype: torch.dtype) -> None:
    wide = normal(5, 700).mul(3).to(dtype)
    for gate_up in (wide, wide[:, 20:620], wide[:0]):
        with running(triton_silu_mul):
            ours = triton_silu_mul.silu_mul(gate_up)
        torch.testing.assert_close(
            ours, silu_mul(gate_up.clone()), rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5
        )


@pytest.mark.parametrize("capability", [90, 100])
def test_compiles_for_qwen3(capability: int) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with compiling(capability, triton_heads, triton_silu_mul) as found:
        caches, rope = (meta(8192, 4, 128), meta(8192, 4, 128)), (meta(64, 1, 128), meta(64, 1, 128))
        slots = meta(64, dtype=torch.int64)
        for norm in (meta(36, 128), None):
            triton_heads.qk_norm_rope_cache(meta(64, 40, 128), 32, norm, 1e-6, rope, caches, slots)
        triton_silu_mul.silu_mul(meta(64, 4096))
    report(found)
    assert len(found) == 3 and all(item.spills == 0 for item in found)
