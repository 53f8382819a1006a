"""moesaic.LLM and AsyncLLM balance experts when asked to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moesaic import LLM, AsyncLLM, EplbConfig, SamplingParams

PROMPTS = ["Once upon a time", "A little dog", "The moon"] * 4
PARAMS = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
RESTLESS = EplbConfig(window_size=10, memory_steps=4, reweight_interval=2, move_interval=4, min_gain=0.0)
OPTIONS: dict[str, Any] = {"data_parallel_size": 2, "num_redundant_experts": 2, "dtype": "float32"}


def test_balanced_or_not_the_text_is_the_same() -> None:
    with LLM(dtype="float32") as alone:
        expected = [result.outputs[0].token_ids for result in alone.generate(PROMPTS, PARAMS)]
        assert alone.balance is None
    with LLM(enable_eplb=True, eplb=RESTLESS, **OPTIONS) as llm:
        assert llm.plan.eplb == RESTLESS
        assert [result.outputs[0].token_ids for result in llm.generate(PROMPTS, PARAMS)] == expected
        assert llm.balance is not None and llm.balance.steps >= 10 and llm.balance.failures == 0
        assert len(llm.balance.window_balance) == 4 and llm.balance.reweights > 0


@pytest.mark.slow  # a server asks its engine in the same way: tests/launch/test_eplb_serving.py
def test_the_async_engine_answers_for_its_balancer() -> None:
    async def run() -> None:
        llm = AsyncLLM(enable_eplb=True, eplb=RESTLESS, **OPTIONS)
        try:
            await llm.wait_ready(60.0)
            assert json.loads(await llm.balancing.ask("status")).get("steps", 0) == 0
            placement = json.loads(await llm.balancing.ask("placement"))
            assert placement["ranks"] == 2 and placement["slots"] == [9, 9, 9, 9]
            assert llm.front.balance is not None
        finally:
            await llm.close()

    asyncio.run(run())


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="window_size"):
        LLM(enable_eplb=True, eplb=EplbConfig(window_size=0), **OPTIONS)
