"""MLA in Triton equals the reference, and compiles for Hopper and Blackwell."""

from __future__ import annotations

import pytest
import torch
from mla_case import SCALE, make_case
from rounding import assert_within, mla_bound
from torch import Tensor
from triton_support import compiling, report, running

from layers.norm import rms_norm
from layers.rope import apply_rope
from layers.triton import merge as triton_merge
from layers.triton import norm as triton_norm
from layers.triton import rope as triton_rope
from layers.triton import softmax as triton_softmax
from mla import latent_fp8, reference
from mla.merge import merge
from mla.protocol import MlaShape, PrefillMode
from mla.triton import cache as triton_cache
from mla.triton import decode as triton_decode
from mla.triton import prefill as triton_prefill
from mla.triton.configs import DecodeConfig, PrefillConfig
from mla.triton.mla import TritonMla

pytestmark = pytest.mark.triton

SMALL = DecodeConfig(16, 16, 4, 2, programs=16, keys=16)  # several splits, several tiles of each
WHOLE = DecodeConfig(16, 16, 4, 2, programs=1)
PROMPTS = PrefillConfig(16, 16, 4, 2)
KERNELS = (triton_decode, triton_merge, triton_softmax, triton_prefill)
STEPS = {
    "decodes": [(1, 5), (1, 1), (1, 70), (1, 16)],
    "mixed": [(1, 11), (1, 40), (5, 5), (3, 20)],
    "prefill": [(7, 7)],
    "no tokens": [],
}


@pytest.mark.parametrize("config", [SMALL, WHOLE], ids=["splits", "whole"])
@pytest.mark.parametrize("name", STEPS)
def test_equals_the_reference(name: str, config: DecodeConfig) -> None:
    """Rows of the cache that belong to no token of a sequence hold large numbers."""
    case = make_case(STEPS[name], garbage=1e30)
    q_nope, q_pe, cache, w_uk, w_uv = case.tensors
    with running(*KERNELS), torch.inference_mode():
        ours = TritonMla(case.shape, SCALE, "auto", torch.float32, config).prepare(case.step)(*case.tensors)
    expected = reference.naive(q_nope, q_pe, cache, case.step, w_uk, w_uv, SCALE)
    assert_within(ours, expected, mla_bound(case.tensors, case.step, SCALE))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("prefill", ["naive", "absorbed", "auto"])
@pytest.mark.parametrize(
    "lengths", [[(1, 9), (20, 20), (2, 30)], [(3, 3), (18, 70), (0, 5), (9, 40)]], ids=["first", "later"]
)
def test_prompts(lengths: list[tuple[int, int]], prefill: PrefillMode, dtype: torch.dtype) -> None:
    """Contexts in one piece, and cut in the middle of sequences."""
    case = make_case(lengths, dtype=dtype)
    q_nope, q_pe, cache, w_uk, w_uv = case.tensors
    expected = reference.naive(q_nope, q_pe, cache, case.step, w_uk, w_uv, SCALE)
    for max_keys in (1000, 33) if prefill == "naive" else (50,):
        backend = TritonMla(case.shape, SCALE, prefill, dtype, SMALL, PROMPTS, max_keys)
        with running(*KERNELS), torch.inference_mode():
            ours = backend.prepare(case.step)(*case.tensors)
        assert_within(ours, expected, mla_bound(case.tensors, case.step, SCALE))


def test_prompts_over_an_fp8_cache() -> None:
    shape = MlaShape(num_heads=2, qk_nope_head_dim=16, qk_rope_head_dim=4, latent_dim=40, v_head_dim=12)
    case = make_case([(12, 12), (9, 40)], shape=shape, dtype=torch.bfloat16)
    q_nope, q_pe, cache, w_uk, w_uv = case.tensors
    stored = latent_fp8.pack(cache, 40)
    with running(*KERNELS), torch.inference_mode():
        prepared = TritonMla(shape, SCALE, "naive", torch.bfloat16, SMALL, PROMPTS, 30).prepare(case.step)
        ours = prepared(q_nope, q_pe, stored, w_uk, w_uv)
    widened = latent_fp8.unpack(stored, 40, 4)
    expected = reference.naive(q_nope, q_pe, widened, case.step, w_uk, w_uv, SCALE)
    assert_within(ours, expected, mla_bound((q_nope, q_pe, widened, w_uk, w_uv), case.step, SCALE))


def test_more_heads_than_a_program_takes() -> None:
    shape = MlaShape(num_heads=20, qk_nope_head_dim=8, qk_rope_head_dim=4, latent_dim=32, v_head_dim=8)
    case = make_case([(1, 20)], shape=shape)
    q_nope, q_pe, cache, w_uk, w_uv = case.tensors
    with running(*KERNELS), torch.inference_mode():
        ours = TritonMla(shape, SCALE, "auto", torch.float32, SMALL).prepare(case.step)(*case.tensors)
    expected = reference.absorbed(q_nope, q_pe, cache, case.step, w_uk, w_uv, SCALE)
    assert_within(ours, expected, mla_bound(case.tensors, case.step, SCALE))


@pytest.mark.parametrize("latent_dim", [256, 20])
@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
def test_bfloat16_and_fp8_cache(latent_dim: int, cache_format: str) -> None:
    shape = MlaShape(num_heads=3, qk_nope_head_dim=8, qk_rope_head_dim=6, latent_dim=latent_dim, v_head_dim=7)
    case = make_case(STEPS["decodes"], shape=shape, dtype=torch.bfloat16, garbage=1e4)
    q_nope, q_pe, cache, w_uk, w_uv = case.tensors
    w_uk *= 20**0.5 / latent_dim**0.5  # scores of one size whatever the width
    if cache_format == "fp8":
        stored = latent_fp8.pack(cache, latent_dim)
        assert stored.shape[1] == latent_fp8.row_bytes(latent_dim, 6)
        cache = latent_fp8.unpack(stored, latent_dim, 6)
    else:
        stored = cache
    with running(*KERNELS), torch.inference_mode():
        prepared = TritonMla(shape, SCALE, "auto", torch.bfloat16, SMALL).prepare(case.step)
        ours = prepared(q_nope, q_pe, stored, w_uk, w_uv)
    expected = reference.naive(q_nope, q_pe, cache, case.step, w_uk, w_uv, SCALE)
    assert_within(ours, expected, mla_bound((q_nope, q_pe, cache, w_uk, w_uv), case.step, SCALE))


def test_fp8_rows_come_back_within_a_sixteenth() -> None:
    entry_TX = torch.randn(5, 140, generator=torch.Generator().manual_seed(0))
    entry_TX[2, :136] = 0.0
    stored_TW = latent_fp8.pack(entry_TX, 136)
    back_TX = latent_fp8.unpack(stored_TW, 136, 4).float()
    step_TX = entry_TX[:, :136].abs().amax(1, keepdim=True) / 448 / 256
    assert ((back_TX - entry_TX)[:, :136].abs() <= entry_TX[:, :136].abs() / 15 + step_TX).all()
    torch.testing.assert_close(back_TX[:, 136:], entry_TX[:, 136:].bfloat16().float())
    assert latent_fp8.row_bytes(512, 64) == 656
    with pytest.raises(ValueError, match="multiples of 4 and 2"):
        latent_fp8.row_bytes(510, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("latent_dim", "qk_rope_head_dim"), [(20, 6), (384, 8)])
@pytest.mark.parametrize("fp8", [False, True])
def test_write_of_an_entry(latent_dim: int, qk_rope_head_dim: int, dtype: torch.dtype, fp8: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    entry_TX = torch.randn(3, latent_dim + qk_rope_head_dim + 2, generator=generator).to(dtype)[:, 2:]
    weight_C = torch.randn(latent_dim, generator=generator).to(dtype)
    angle_TR = torch.randn(3, qk_rope_head_dim // 2, generator=generator)
    cos, sin = angle_TR.cos().to(dtype), angle_TR.sin().to(dtype)
    rope = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    latent_TC = rms_norm(entry_TX[:, :latent_dim], weight_C, 1e-6)
    expected_TX = torch.cat([latent_TC, apply_rope(entry_TX[:, None, latent_dim:], *rope)[:, 0]], 1)
    slots_T = torch.tensor([4, 0, 2])
    if fp8:
        cache = torch.zeros(5, latent_fp8.row_bytes(latent_dim, qk_rope_head_dim), dtype=torch.uint8)
    else:
        cache = torch.zeros(5, latent_dim + qk_rope_head_dim, dtype=dtype)
    with running(triton_cache, triton_norm, triton_rope):
        triton_cache.write_entry(entry_TX, weight_C, 1e-6, *rope, slots_T, cache)
    assert not cache[[1, 3]].any()
    if fp8:
        # A number between two of FP8's may be rounded to either.
        written = latent_fp8.unpack(cache[slots_T], latent_dim, qk_rope_head_dim).float()
        expected = latent_fp8.unpack(latent_fp8.pack(expected_TX, latent_dim), latent_dim, qk_rope_head_dim).float()
        torch.testing.assert_close(written, expected, rtol=0.13, atol=1e-3)
        assert (written == expected).float().mean() > 0.98
    else:
        torch.testing.assert_close(cache[slots_T], expected_TX)


def test_merge_is_the_fold_of_merge() -> None:
    generator = torch.Generator().manual_seed(0)
    part_BGHY, lse_BGH = torch.randn(2, 3, 2, 5, generator=generator), torch.randn(2, 3, 2, generator=generator)
    lse_BGH[0, 1] = -torch.inf
    out, lse = part_BGHY[:, 0].clone(), lse_BGH[:, 0].clone()
    for split in (1, 2):
        merge(out, lse, part_BGHY[:, split], lse_BGH[:, split])
    with running(*KERNELS):
        torch.testing.assert_close(triton_merge.merge_splits(part_BGHY, lse_BGH, torch.float32), out)
        none = triton_merge.merge_splits(torch.zeros(1, 2, 1, 3), torch.full((1, 2, 1), -torch.inf), torch.float32)
    assert not none.any()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("heads", [16, 128])
def test_compiles_for_deepseek_v3(capability: int, heads: int) -> None:
    q = meta(heads, 4, 512).transpose(0, 1), meta(4, heads, 64)
    step = meta(4, 600, dtype=torch.int64), meta(4, dtype=torch.int64), 64, 32768, 0.1
    with compiling(capability, triton_decode, triton_merge) as found:
        for cache in (meta(6400, 576), meta(6400, 656, dtype=torch.uint8)):
            triton_decode.decode(*q, cache, *step)
    report(found)
    assert len(found) == 3
    assert all(item.spills == 0 for item in found)
    if heads == 128:
        assert found[0].matrix_unit == {90: "wgmma", 100: "tcgen05.mma"}[capability]


@pytest.mark.parametrize("capability", [90, 100])
def test_prompts_compile_for_deepseek_v3(capability: int) -> None:
    """128 heads, keys of 128 + 64 and values of 128, with and without more than one piece of the context."""
    case = make_case([(300, 900)], 64)
    q = meta(300, 128, 192), meta(300, 128, 64)
    with compiling(capability, triton_prefill) as found:
        for max_keys in (1000, 500):
            plan = triton_prefill.PrefillPlan(case.step, [0], 128, max_keys, torch.bfloat16)
            k, k_pe = meta(max_keys, 128 * 128), meta(max_keys, 576)[:, 512:]
            out = meta(300, 128, 128, dtype=torch.float32 if len(plan.pieces) > 1 else torch.bfloat16)
            lse = meta(300, 128, dtype=torch.float32)
            plan._launch(q[0][..., :128], q[1], k, k_pe, k, plan.pieces[0].tiles, 0.1, out, lse)
    report(found)
    assert len(found) == 2 and all(item.spills == 0 for item in found)
    assert found[0].matrix_unit == {90: "wgmma", 100: "tcgen05.mma"}[capability]


@pytest.mark.parametrize("capability", [90, 100])
def test_the_write_compiles(capability: int) -> None:
    cos, slots_T = meta(8, 1, 64), meta(8, dtype=torch.int64)
    with compiling(capability, triton_cache) as found:
        for cache in (meta(6400, 576), meta(6400, 656, dtype=torch.uint8)):
            triton_cache.write_entry(meta(8, 2112)[:, 1536:], meta(512), 1e-6, cos, cos, slots_T, cache)
    report(found)
    assert len(found) == 2 and all(item.spills == 0 for item in found)


def test_float32_compiles() -> None:
    step = meta(4, 600, dtype=torch.int64), meta(4, dtype=torch.int64), 64, 32768, 0.1
    with compiling(90, triton_decode, triton_merge) as found:
        q = meta(4, 128, 512, dtype=torch.float32), meta(4, 128, 64, dtype=torch.float32)
        triton_decode.decode(*q, meta(6400, 576, dtype=torch.float32), *step)
    case = make_case([(300, 900)], 64)
    with compiling(90, triton_prefill) as prompts:
        f32 = {"dtype": torch.float32}
        plan = triton_prefill.PrefillPlan(case.step, [0], 128, 1000, torch.float32)
        q, k, out = meta(300, 128, 192, **f32), meta(900, 128 * 128, **f32), meta(300, 128, 128, **f32)
        k_pe, tiles = meta(900, 576, **f32)[:, 512:], plan.pieces[0].tiles
        plan._launch(q[..., :128], q[..., 128:], k, k_pe, k, tiles, 0.1, out, meta(300, 128, **f32))
    report(found + prompts)
    assert all(item.spills == 0 for item in found + prompts)
