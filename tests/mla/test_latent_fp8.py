"""A latent cache in FP8 without a GPU: it is written and attended to in torch, whatever native kernels there are."""

from __future__ import annotations

import pytest
import torch
from mla_case import SCALE, make_case

from layers.norm import RMSNorm
from mla import latent_fp8, latent_kv, reference
from mla.attention import TorchMla
from mla.backend import make_backend
from mla.protocol import MlaShape

SHAPE = MlaShape(num_heads=3, qk_nope_head_dim=10, qk_rope_head_dim=6, latent_dim=140, v_head_dim=7)


@pytest.mark.parametrize("prefill", ["naive", "absorbed", "auto"])
def test_equals_the_reference_over_what_the_cache_says(prefill: str) -> None:
    case = make_case([(1, 11), (1, 40), (5, 5), (3, 20)], shape=SHAPE, dtype=torch.bfloat16)
    q_nope, q_pe, cache, w_uk, w_uv = case.tensors
    w_uk *= 0.3
    stored = latent_fp8.pack(cache, 140)
    backend = make_backend(SHAPE, SCALE, prefill, torch.bfloat16, torch.device("cpu"), fp8_cache=True)  # type: ignore[arg-type]
    assert isinstance(backend, TorchMla)
    with torch.inference_mode():
        ours = backend.prepare(case.step)(q_nope, q_pe, stored, w_uk, w_uv)
    widened = latent_fp8.unpack(stored, 140, 6)
    expected = reference.naive(q_nope, q_pe, widened, case.step, w_uk, w_uv, SCALE)
    torch.testing.assert_close(ours.float(), expected.float(), rtol=0.03, atol=0.03)


def test_what_is_placed_is_packed() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(140, 1e-6, torch.bfloat16, torch.device("cpu"))
    norm.weight.copy_(torch.rand(140, generator=generator))
    q, latent = (
        torch.randn(4, 3, 16, generator=generator).bfloat16(),
        torch.randn(4, 146, generator=generator).bfloat16(),
    )
    angle = torch.randn(4, 3, generator=generator)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    rope = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    plain = torch.zeros(8, 146, dtype=torch.bfloat16)
    packed = torch.zeros(8, latent_fp8.row_bytes(140, 6), dtype=torch.uint8)
    slots = torch.tensor([5, 0, 3, 6])
    ours = latent_kv.place(q.clone(), latent, norm, rope, packed, slots)
    theirs = latent_kv.place(q.clone(), latent, norm, rope, plain, slots)
    torch.testing.assert_close(ours, theirs)
    widened = latent_fp8.unpack(packed[slots], 140, 6)
    torch.testing.assert_close(widened.float(), plain[slots].float(), rtol=0.07, atol=0.02)
    assert not packed[[1, 2, 4, 7]].any()
