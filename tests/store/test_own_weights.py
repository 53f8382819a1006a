"""A rank in the caller's process: what it packs is kept on disk too, and mapped by the next."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.processes import RuntimeDir
from launch.weights import WeightsKept
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


def locked_bytes() -> int:
    """What this process keeps in memory."""
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_weights_of_the_cache_stay_in_memory_by_one_process(tmp_path: Path) -> None:
    """That of the only rank, or the one that has started the ranks, as long as it has them; not what was just packed."""
    with LLM(weight_cache=str(tmp_path)) as llm:
        plan = llm.plan
        until(lambda: bool(list(tmp_path.glob("*.weights"))))
        assert locked_bytes() == 0
    (size,) = (path.stat().st_size for path in tmp_path.glob("*.weights"))
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] not in range(2 * size):
        with LLM(weight_cache=str(tmp_path)):
            until(lambda: locked_bytes() >= size)
            assert locked_bytes() < 2 * size, "it is mapped once"
        assert locked_bytes() == 0
        runtime = RuntimeDir(tmp_path)
        weights = WeightsKept(plan, runtime)
        assert locked_bytes() == 0
        weights.look()
        assert weights._locking is None, "not beside the first request"

        def looked() -> bool:
            weights.look()
            return locked_bytes() >= size

        until(looked)
        del weights, looked
        runtime.close()


def test_off(tmp_path: Path) -> None:
    with LLM(weight_cache="off") as llm:
        assert not llm.plan.weight_store and not mapped(tmp_path)
