"""A rank in the caller's process: what it packs is kept on disk too, and mapped by the next."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moesaic import LLM, SamplingParams

pytestmark = pytest.mark.store
WORDS = SamplingParams(max_tokens=12, temperature=0.0)


def mapped(folder: Path) -> bool:
    return str(folder) in Path("/proc/self/maps").read_text() or "memfd:weights" in Path("/proc/self/maps").read_text()


def test_the_next_one_maps_what_was_packed(tmp_path: Path) -> None:
    """It says the same, reads nothing, and leaves nothing mapped."""
    with LLM() as llm:
        assert not llm.plan.weight_store  # packed in a moment
        expected = llm.generate("Once upon a time", WORDS)[0].outputs[0].token_ids
    for kept in (False, True):
        with LLM(weight_cache=str(tmp_path)) as llm:
            assert llm.plan.weight_store and llm.plan.weight_cache == str(tmp_path) and mapped(tmp_path)
            assert (llm.front.ready[0].bytes_read == 0) is kept
            assert llm.generate("Once upon a time", WORDS)[0].outputs[0].token_ids == expected
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob("*.weights")) and time.monotonic() < deadline:
                time.sleep(0.05)
        assert not mapped(tmp_path)
    assert len(list(tmp_path.glob("*.weights"))) == 1


def test_off(tmp_path: Path) -> None:
    with LLM(weight_cache="off") as llm:
        assert not llm.plan.weight_store and not mapped(tmp_path)
