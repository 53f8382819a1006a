"""What is kept of a step's tokens, and how it is told apart from what is half written."""

from __future__ import annotations

import numpy as np
import torch

from cache.residuals import NUM_PLACES, KeptTokens, Residuals, no_residuals

NUM_ROWS, MOST = 4, 16


def test_what_is_kept_is_told() -> None:
    size = KeptTokens.num_bytes(NUM_ROWS) + NUM_PLACES * MOST * 8
    residuals = Residuals(np.zeros(size, dtype=np.uint8), NUM_ROWS, MOST, 8)
    stays, starts = np.array([70, 80]), np.array([5, 0])
    residuals.begin(stays, starts, np.array([1, 3]), [0, 1])
    assert residuals.kept() == {}, "no layer is kept yet"
    rows_TD, layer = residuals.place(3, torch.float32)
    rows_TD.copy_(torch.arange(2.0 * MOST).view(MOST, 2))
    layer.fill_(7)
    kept = residuals.kept()
    assert list(kept) == [(70, 5), (80, 0), (80, 1), (80, 2)]
    assert {one.layers for one in kept.values()} == {(-1, 7)}
    assert kept[80, 1].rows[1].view(np.float32).tolist() == [4.0, 5.0]
    residuals.begin(stays, starts, 1, [0, 4])  # three guesses between them
    residuals.advance()
    layer.fill_(8)
    assert list(residuals.kept()) == [(70, 6), (80, 1)]
    assert kept_row(residuals, 80, 1) == [8.0, 9.0]
    residuals.clear()
    assert residuals.layers.tolist() == [-1, -1]


def kept_row(residuals: Residuals, stay: int, position: int) -> list[float]:
    """Of the second place."""
    values: list[float] = residuals.kept()[stay, position].rows[1].view(np.float32).tolist()
    return values


def test_a_rank_that_keeps_none() -> None:
    residuals = no_residuals()
    residuals.advance()
    residuals.clear()
    assert residuals.num_tokens == 0 and residuals.kept() == {}
