"""Whatever drafts, and whatever else the engine does: every stream is the one without drafts (float32)."""

from __future__ import annotations

import pytest
import torch
from amounts import examples
from balanced import RESTLESS
from drafting import EDITS, METHODS, RANDOM, Streams
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.speculation
torch.set_num_threads(1)

STREAMS = Streams([{}, RANDOM, EDITS, {}, RANDOM, EDITS])


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_whatever_the_engine_does(data: st.DataObject) -> None:
    STREAMS.check(data, METHODS)


@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_kills_and_moves_at_any_moment(data: st.DataObject) -> None:
    """A request goes on elsewhere, where other drafts are proposed; experts move, those of the layer that drafts too."""
    STREAMS.endure(data, speculation=data.draw(METHODS), eplb=data.draw(st.sampled_from([None, RESTLESS])))
