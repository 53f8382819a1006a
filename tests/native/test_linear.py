"""Native linear layers equal torch's in float32, rounded once.

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from isas import EVERY_ISA
from rounding import assert_within, matmul_bound

from native import Isa, limit_isa
from native.linear import MAX_DOT_ROWS, MAX_ROWS_F32, best_output, linear

ROWS = [0, 1, 2, 3, 4, 5, 7, 12, 16, 23, 24, 25, 31, 64, 97, 300]


@pytest.fixture(autouse=True, params=EVERY_ISA)
def _level(request: pytest.FixtureRequest) -> Iterator[None]:
    limit_isa(request.param)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", [(64, 64), (1, 1), (33, 7), (31, 130), (1000, 515), (2600, 70)])
def test_equals_torch(sizes: tuple[int, int], threads: int, dtype: torch.dtype) -> None:
    num_inputs, num_outputs = sizes
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((num_outputs, num_inputs), generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    for rows in ROWS:
        # Rows lie apart, and what is between them is NaN.
        x = torch.full((rows, num_inputs + 5), torch.nan).to(dtype)[:, 2 : 2 + num_inputs]
        x[:] = torch.randn((rows, num_inputs), generator=generator)
        for b in (None, bias):
            ours = linear(x, weight, b)
            wanted = F.linear(x.float(), weight.float(), None if b is None else b.float())
            assert_within(ours, wanted, matmul_bound(x, weight, b))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(64, 64), (2, 1), (34, 700), (31, 130), (500, 515)])
def test_best_output_is_the_first_largest(sizes: tuple[int, int], threads: int) -> None:
    num_inputs, num_outputs = sizes
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    # Small whole numbers: many equal products, and no rounding.
    weight = torch.randint(-2, 3, (num_outputs, num_inputs), generator=generator).bfloat16()
    for rows in ROWS:
        x = torch.randint(-1, 2, (rows, num_inputs), generator=generator).bfloat16()
        x[::4] = 0.0  # all products are zero, of either sign
        wanted = F.linear(x.float(), weight.float()).bfloat16().float().numpy().argmax(-1)
        assert best_output(x, weight).tolist() == wanted.tolist()


def test_best_output_of_negative_products() -> None:
    weight = -torch.rand(200, 32).bfloat16() - 1
    x = torch.rand(30, 32).bfloat16()
    assert torch.equal(best_output(x, weight), linear(x, weight).float().argmax(-1))


def test_a_row_does_not_depend_on_its_company() -> None:
    x, weight = torch.randn(9, 2100).bfloat16(), torch.randn(70, 2100).bfloat16()
    together = linear(x, weight)
    for row in range(9):
        assert torch.equal(linear(x[row : row + 1], weight)[0], together[row])


def test_other_types_and_lesser_machines_take_torch() -> None:
    x, weight = torch.randn(MAX_ROWS_F32 + 1, 20), torch.randn(5, 20)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    few = x[:MAX_DOT_ROWS]
    assert_within(linear(few, weight), F.linear(few, weight), matmul_bound(few, weight))  # few rows do not
    limit_isa(Isa.NONE)
    x, weight = x.bfloat16(), weight.bfloat16()
    assert torch.equal(linear(x, weight), F.linear(x, weight))
