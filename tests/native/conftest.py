"""Leaves the instruction set as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from native import isa, limit_isa


@pytest.fixture(autouse=True)
def same_isa_afterwards() -> Iterator[None]:
    before = isa()
    yield
    limit_isa(before)
