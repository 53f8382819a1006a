"""How contexts are cut into pieces: every key once, in order, and never more than there is room for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla.triton.prefill import _cut

pytestmark = pytest.mark.triton


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=6), st.integers(1, 50))
def test_every_key_once(lengths: list[int], room: int) -> None:
    pieces = _cut(list(enumerate(lengths)), room)
    assert all(0 < sum(last - first for _, first, last in piece) <= room for piece in pieces)
    seen = [(b, key) for piece in pieces for b, first, last in piece for key in range(first, last)]
    assert seen == [(b, key) for b, length in enumerate(lengths) for key in range(length)]
    assert len(pieces) == -(-sum(lengths) // room)
