"""Bounds of tests/rounding.py: sums in any order are within, and what is wrong is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rounding import assert_within, bound, matmul_bound, paged_attention_bound
from torch import Tensor

from layers import reference
from layers.step import StepInput

N = 1000


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_after_the_other(terms_RN: Tensor) -> Tensor:
    total_R = torch.zeros(terms_RN.shape[0])
    for column_R in terms_RN.T:
        total_R = total_R + column_R
    return total_R


@pytest.mark.parametrize(
    "order",
    [
        lambda terms: one_after_the_other(terms),
        lambda terms: one_after_the_other(terms.flip(1)),
        lambda terms: one_after_the_other(terms.sort(1).values),
        lambda terms: one_after_the_other(terms.view(300, N // 8, 8).sum(2)),
    ],
    ids=["forwards", "backwards", "by size", "by eights"],
)
def test_any_order_is_within(order: Callable[[Tensor], Tensor]) -> None:
    terms_RN = normal(300, N, seed=0)
    by_size_R = bound(N, terms_RN.double().abs().sum(1))
    assert_within(order(terms_RN), terms_RN.double().sum(1), by_size_R)
    assert_within(order(terms_RN.abs()), terms_RN.double().abs().sum(1), by_size_R)


def test_sums_of_either_sign_are_within_the_norm() -> None:
    terms_RN = normal(300, N, seed=0)
    assert_within(one_after_the_other(terms_RN), terms_RN.double().sum(1), bound(N, terms_RN.double().norm(dim=1)))


def test_a_lost_term_is_seen() -> None:
    x, w = normal(20, N, seed=1), normal(30, N, seed=2)
    wanted, allowed = x.double() @ w.double().T, matmul_bound(x, w)
    assert_within(x @ w.T, wanted, allowed)
    with pytest.raises(AssertionError, match="of 600 numbers lie too far apart; the worst at "):
        assert_within(x[:, 1:] @ w[:, 1:].T, wanted, allowed)
    with pytest.raises(AssertionError, match="lie too far apart"):
        assert_within((x.bfloat16() @ w.bfloat16().T).float(), wanted, allowed)
    with pytest.raises(AssertionError):
        assert_within(torch.full((20, 30), torch.nan), wanted, allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_wrong_key_is_seen(dtype: torch.dtype) -> None:
    table = torch.arange(20)[None] + 1
    none = torch.zeros(1, dtype=torch.int64)
    step = StepInput(none, none + 299, none, (0, 1), (300,), torch.tensor([300]), table, 1, 16, none)
    q, k, v = (normal(rows, 2, 64, seed=rows).to(dtype) for rows in (1, 336, 337))
    allowed = paged_attention_bound(q, k, v, step, 0.1)
    wanted = reference.paged_attention(q, k, v, step, 0.1)
    wrong, other = k.clone(), 0.1001 if dtype is torch.float32 else 0.13
    wrong[16 + 150] = 0  # one of 300 keys of about equal weight
    with pytest.raises(AssertionError, match="lie too far apart"):
        assert_within(reference.paged_attention(q, wrong, v, step, 0.1), wanted, allowed)
    with pytest.raises(AssertionError, match="lie too far apart"):
        assert_within(reference.paged_attention(q, k, v, step, other), wanted, allowed)
