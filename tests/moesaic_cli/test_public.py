"""`moesaic.LLM` and `moesaic.AsyncLLM` as users call them: one rank here, several in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import moesaic
from front.outputs import Prompt
from moesaic import LLM, AsyncLLM, SamplingParams

PROMPTS = ["Once upon a time", "Lily had a red ball", "The dog"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def test_two_ranks_say_what_one_says_and_leave_nothing() -> None:
    with LLM() as llm:
        expected = texts(llm)
        assert llm.stats()[0].generation_tokens == 36
    before = children()
    with LLM(data_parallel_size=2) as llm:
        assert texts(llm) == expected
        assert sum(stats.kv_blocks_used for stats in llm.stats()) == 0
    assert children() == before


def test_a_killed_rank_changes_nothing_but_the_time() -> None:
    before = children()
    with LLM(data_parallel_size=2) as llm:
        expected = texts(llm)
        (victim, *_) = [pid for pid in children() if pid not in before]
        os.kill(victim, signal.SIGKILL)
        assert texts(llm) == expected
    assert children() == before


def test_async_llm_streams_and_stops() -> None:
    async def run() -> tuple[str, int]:
        llm = AsyncLLM()
        try:
            await llm.wait_ready(60)
            prompt = Prompt(request_id="a", token_ids=llm.tokenizer.encode(PROMPTS[0]), params=GREEDY)
            pieces = [delta.text async for deltas in llm.stream(prompt) for delta in deltas]
            return "".join(pieces), llm.num_requests
        finally:
            await llm.close()

    text, left = asyncio.run(run())
    with LLM() as llm:
        assert text == texts(llm)[0]
    assert left == 0


def test_only_the_public_names_are_there() -> None:
    for name in moesaic.__all__:
        assert getattr(moesaic, name)
    with pytest.raises(AttributeError, match="no attribute 'Scheduler'"):
        _ = moesaic.Scheduler  # type: ignore[attr-defined]


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(max_model_len=10**6)
    with pytest.raises(TypeError, match="no_such_option"):
        LLM(no_such_option=1)
