"""With a fixed order a row's result has the same bits alone and in company, on any number of threads (native/choice.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from isas import EVERY_ISA
from torch import Tensor

from layers.paged_prefill import PagedPrefill
from moe_kernels.topk import router_logits32
from native import Choice, choose, fixed_order, limit_isa
from native.linear import best_output, can_run, linear
from native.packed_linear import PackedLinear

pytestmark = pytest.mark.deterministic
NUM_ROWS = 150
COMPANIES = [(0, 1), (0, 4), (3, 8), (10, 26), (7, 40), (31, 64), (20, 118), (0, NUM_ROWS)]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True, params=EVERY_ISA)
def _in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    limit_isa(request.param)
    choose(Choice(), fixed_order=True)
    yield
    choose(Choice())
    torch.set_num_threads(1)


def check(multiply: Callable[[Tensor], Tensor], x: Tensor) -> None:
    alone = torch.cat([multiply(x[i : i + 1]) for i in range(len(x))])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for first, last in COMPANIES:
            assert torch.equal(multiply(x[first:last]), alone[first:last]), (first, last, threads)


def test_it_can_be_asked() -> None:
    assert fixed_order()
    choose(Choice())
    assert not fixed_order()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(31, 7), (130, 70), (2100, 200)])
def test_linear(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    x, weight, bias = torch.randn(NUM_ROWS, sizes[0]), torch.randn(sizes[1], sizes[0]), torch.randn(sizes[1])
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    check(lambda rows: linear(rows, weight, bias), x)
    check(lambda rows: linear(rows, weight), x)
    if can_run(x):
        check(lambda rows: best_output(rows, weight), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 7), (130, 70), (1500, 200)])
@pytest.mark.parametrize("form", [None, torch.int8, torch.float8_e4m3fn])
def test_packed_linear(dtype: torch.dtype, sizes: tuple[int, int], form: torch.dtype | None) -> None:
    num_inputs, num_outputs = sizes
    x, bias = torch.randn(NUM_ROWS, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    if form is None:
        layer = PackedLinear(torch.randn(num_outputs, num_inputs).to(dtype))
    else:
        weight = (torch.randn(num_outputs, num_inputs) * 20).to(form)
        layer = PackedLinear(weight, torch.rand(num_outputs, -(-num_inputs // 128)))
    check(lambda rows: layer(rows, bias), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_plain_weights_multiply_as_they_are(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 130).to(dtype), torch.randn(70, 130).to(dtype)
    wanted = x.double() @ weight.double().T
    torch.testing.assert_close(
        PackedLinear(weight)(x).double(), wanted, rtol=1e-2, atol=0.2 if dtype is torch.bfloat16 else 1e-4
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_router(dtype: torch.dtype) -> None:
    weight = torch.randn(20, 130)
    check(lambda rows: router_logits32(rows, weight), torch.randn(NUM_ROWS, 130).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(8, 2, 64, 64), (4, 1, 40, 32)])
def test_attention(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    """A prompt whole, cut anywhere, and one query at a time, as decodes; longer than the keys that are packed at once."""
    num_heads, num_kv_heads, key_dim, value_dim = sizes
    length, block_size = 330, 16
    num_blocks = -(-length // block_size)
    q = torch.randn(length, num_heads, key_dim).to(dtype)
    keys = torch.randn(num_blocks * block_size, num_kv_heads, key_dim).to(dtype)
    values = torch.randn(num_blocks * block_size, num_kv_heads, value_dim).to(dtype)
    table = torch.randperm(num_blocks)[None]

    def attend(first: int, last: int) -> Tensor:
        out = torch.empty(last - first, num_heads, value_dim, dtype=dtype)
        PagedPrefill([(0, last - first)], [last], table, block_size)(q[first:last], keys, values, 0.1, out)
        return out

    whole = attend(0, length)
    for first, last in [(0, 1), (0, 17), (17, 18), (18, 300), (299, 330), (100, 164)]:
        assert torch.equal(attend(first, last), whole[first:last])
    places = [0, 5, 255, 256, 257, 329]
    lens = torch.tensor([place + 1 for place in places])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        decodes = PagedPrefill.of_decodes(lens, table.expand(len(places), -1).contiguous(), block_size)
        out = torch.empty(len(places), num_heads, value_dim, dtype=dtype)
        decodes(q[places], keys, values, 0.1, out)
        assert torch.equal(out, whole[places])
