"""Running without the native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from native import Isa, isa, limit_isa


@pytest.fixture
def in_torch() -> Iterator[None]:
    before = isa()
    limit_isa(Isa.NONE)
    yield
    limit_isa(before)
