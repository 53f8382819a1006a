"""Counts of tokens per logical expert."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb.load import ExpertLoad


def test_counts_equal_a_histogram_over_many_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    load = ExpertLoad(num_layers=2, num_experts=7)
    record = load.recorder(1)
    expected = np.zeros((2, 7), dtype=np.int64)
    for tokens in (0, 1, 5, 20_000, 3, 20_000):
        ids = torch.randint(0, 6, (tokens, 2), generator=generator)
        record(ids)
        expected[1] += np.bincount(ids.numpy().ravel(), minlength=7)
    assert (load.window() == expected).all()
    assert (load.window() == expected).all()
    load.record(0, torch.tensor([[6, 0]]))
    assert load.window()[0].tolist() == [1, 0, 0, 0, 0, 0, 1]


def test_reset_begins_anew_and_windows_are_copies() -> None:
    load = ExpertLoad(1, 3)
    load.record(0, torch.tensor([[0], [1]]))
    window = load.window()
    load.record(0, torch.tensor([[2]]))
    load.reset()
    assert window.tolist() == [[1, 1, 0]]
    assert load.window().tolist() == [[0, 0, 0]]


def test_a_layer_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="layer is 2; it must be 0 to 1"):
        ExpertLoad(2, 3).recorder(2)
