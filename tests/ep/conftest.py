"""One thread: these tests run beside others on a few cores. Makes the parts of fakes importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "fakes" / "fake_parts"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
