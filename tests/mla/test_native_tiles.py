"""Decodes of many heads on matrix tiles equal the specification; skipped where there are none, or where they are slower."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_case import SCALE, MlaCase, make_case
from msgspec.structs import replace
from rounding import assert_within, mla_bound

from mla import native_tiles, reference
from mla.attention import TorchMla
from mla.native_decode import NativeDecode, absorb, expand
from mla.native_tiles import LatentTiles
from mla.protocol import MlaShape
from native import best_isa, isa, limit_isa

before = isa()
limit_isa(best_isa())
pytestmark = pytest.mark.skipif(
    not native_tiles.can_run(MlaShape(16, 2, 2, 2, 2), torch.bfloat16), reason="no matrix tiles, or slower ones"
)
limit_isa(before)


@pytest.fixture(autouse=True)
def on_tiles() -> Iterator[None]:
    limit_isa(best_isa())
    yield
    limit_isa(before)
    torch.set_num_threads(1)


def shape_of(heads: int, rope: int = 6, latent: int = 20) -> MlaShape:
    return MlaShape(heads, qk_nope_head_dim=10, qk_rope_head_dim=rope, latent_dim=latent, v_head_dim=7)


def decodes(lens: list[int], shape: MlaShape, block_size: int = 16) -> MlaCase:
    """Rows that no sequence has are NaN."""
    case = make_case([(1, length) for length in lens], block_size, shape, torch.bfloat16)
    used = torch.zeros(case.cache.shape[0], dtype=torch.bool)
    for b, length in enumerate(lens):
        at = torch.arange(length)
        used[case.step.block_table_BN[b, at // block_size] * block_size + at % block_size] = True
    case.cache[~used] = torch.nan
    return case


def run(case: MlaCase) -> torch.Tensor:
    decode = NativeDecode(case.step, case.shape, SCALE, torch.bfloat16)
    assert isinstance(decode._attend, LatentTiles)
    return decode(*case.tensors)


def check(case: MlaCase, threads: int = 1) -> None:
    torch.set_num_threads(threads)
    q_nope, q_pe, cache, w_uk, w_uv = case.tensors
    wanted = reference.naive(q_nope, q_pe, cache, case.step, w_uk, w_uv, SCALE)
    assert_within(run(case), wanted, mla_bound(case.tensors, case.step, SCALE))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("heads", [16, 17, 33, 128])
def test_equals_the_reference(heads: int, threads: int) -> None:
    check(decodes([1, 2, 63, 64, 65, 127, 128, 129], shape_of(heads)), threads)
    check(decodes([256, 257, 700], shape_of(heads, 4, 70)), threads)
    assert not native_tiles.can_run(shape_of(15), torch.bfloat16)
    assert not native_tiles.can_run(shape_of(heads), torch.float32)


def test_the_widths_of_deepseek_v3() -> None:
    case = decodes([300, 40], MlaShape(128, 128, 64, 512, 128))
    case.w_uk.mul_(0.1)
    check(case, 2)


@settings(max_examples=20, deadline=None)
@given(
    lens=st.lists(st.one_of(st.integers(1, 40), st.integers(200, 600)), min_size=1, max_size=4),
    heads=st.integers(16, 70),
    rope=st.integers(1, 9).map(lambda half: 2 * half),
    latent=st.integers(1, 50).map(lambda half: 2 * half),
    block_size=st.sampled_from([1, 3, 16, 64]),
)
def test_any_sizes(lens: list[int], heads: int, rope: int, latent: int, block_size: int) -> None:
    check(decodes(lens, shape_of(heads, rope, latent), block_size))


def test_more_parts_than_a_sequence_may_have() -> None:
    check(decodes([256 * 70 + 5, 9], shape_of(16)), 2)


def test_neither_company_nor_threads_change_a_result() -> None:
    case = decodes([900, 5, 300], shape_of(20))
    together = run(case)
    step = replace(
        case.step, query_starts=(0, 1), kv_lens=(900,), kv_lens_B=torch.tensor([900]), num_decodes=1,
        block_table_BN=case.step.block_table_BN[:1],
    )  # fmt: skip
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        q_nope, q_pe, *others = case.tensors
        assert torch.equal(
            TorchMla(case.shape, SCALE, "auto", torch.bfloat16).prepare(step)(q_nope[:1], q_pe[:1], *others),
            together[:1],
        )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("last", [5, 67, 128, 131, 258, 700, 2049])
def test_a_token_and_its_drafts_read_the_cache_together(last: int, threads: int) -> None:
    """With the bits of each alone; what a later one has written does not reach an earlier one, whatever it is."""
    case, count = decodes([last, 40, 2100], shape_of(20)), 5
    block = case.step.block_table_BN
    lens = [*range(last - count + 1, last + 1), 40, *range(2096, 2101)]
    owner = [0] * count + [1] + [2] * 5
    q_nope, q_pe = torch.randn(len(lens), 20, 10).bfloat16(), torch.randn(len(lens), 20, 6).bfloat16()
    newest = case.step.block_table_BN[0, (last - 1) // 16] * 16 + (last - 1) % 16
    case.cache[newest] = torch.nan

    def together(first: int, end: int) -> torch.Tensor:
        step = replace(
            case.step, query_starts=tuple(range(end - first + 1)), kv_lens=tuple(lens[first:end]),
            kv_lens_B=torch.tensor(lens[first:end]), num_decodes=end - first, block_table_BN=block[owner[first:end]],
        )  # fmt: skip
        decode = NativeDecode(step, case.shape, SCALE, torch.bfloat16)
        return decode(q_nope[first:end], q_pe[first:end], case.cache, case.w_uk, case.w_uv)

    torch.set_num_threads(threads)
    found = together(0, len(lens))
    for b in range(len(lens)):
        assert torch.equal(found[b].nan_to_num(7.0), together(b, b + 1)[0].nan_to_num(7.0)), lens[b]
        assert bool(found[b].isnan().any()) == (b == count - 1)


@pytest.mark.parametrize("num_tokens", [15, 16, 40, 100])
@pytest.mark.parametrize("heads", [1, 3])
def test_into_the_latent_space_and_out_of_it(num_tokens: int, heads: int) -> None:
    """With and without tiles, and columns that do not fill a panel."""
    torch.manual_seed(num_tokens)
    torch.set_num_threads(2)
    q, up = torch.randn(num_tokens, heads, 32 + 6), torch.randn(heads, 32, 96) / 6
    mixed, down = torch.randn(num_tokens, heads, 96), torch.randn(heads, 70, 96) / 10
    q, up, mixed, down = (tensor.to(torch.bfloat16) for tensor in (q, up, mixed, down))
    inside = absorb(q[..., :32], q[..., 32:], up)
    expected = torch.einsum("thn,hnc->thc", q[..., :32].double(), up.double())
    torch.testing.assert_close(inside[..., :96].double(), expected, rtol=2**-8, atol=1e-4)
    assert torch.equal(inside[..., 96:], q[..., 32:])
    expected = torch.einsum("thc,hvc->thv", mixed.double(), down.double())
    torch.testing.assert_close(expand(mixed, down).double(), expected, rtol=2**-8, atol=1e-4)
