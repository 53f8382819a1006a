"""Options of the whole suite. Threads: the machine's cores are shared with the processes that tests start."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-weights", metavar="DIR", help="checkpoints made by benchmarks/real_weights.py (make real)")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
