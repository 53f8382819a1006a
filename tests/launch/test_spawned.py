"""Offline generation on ranks in processes of their own: a lost one is survived there too."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from hf_tiny import make_qwen3
from served import command_line, descendants, until

import moesaic
from front.llm import Progress
from front.outputs import Prompt
from models.tiny import CHECKPOINT
from moesaic import SamplingParams

PROMPTS = [f"{number} little foxes" for number in range(8)]
PARAMS = SamplingParams(max_tokens=64, temperature=0.7, seed=3, ignore_eos=True)


def rank_processes() -> dict[int, int]:
    """Process id -> rank."""
    words = {pid: command_line(pid) for pid in descendants(os.getpid())}
    return {
        pid: int(line[line.index("--rank") + 1]) for pid, line in words.items() if "engine.process.rank_process" in line
    }


@pytest.fixture(params=["experts", "dense"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """None: the embedded model, which has experts."""
    if request.param == "experts":
        return None
    make_qwen3(tmp_path / "dense", vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, tmp_path / "dense")
    return str(tmp_path / "dense")


@pytest.mark.slow
def test_a_lost_rank(model: str | None) -> None:
    killed = []

    def kill(progress: Progress) -> None:
        if not killed and progress.num_output_tokens > 100:
            killed.append(next(pid for pid, rank in rank_processes().items() if rank == 0))
            os.kill(killed[0], signal.SIGKILL)

    with moesaic.LLM(model, data_parallel_size=2) as llm:
        expected = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, PARAMS)]
        results = llm.generate(PROMPTS, PARAMS, progress=kill)
        assert [result.outputs[0].token_ids for result in results] == expected and killed

        def back() -> bool:
            llm.generate("x", SamplingParams(max_tokens=1))
            return llm.stats()[0].steps > 0 and 0 in rank_processes().values()

        until(back, 60, "rank 0 serves again")
        assert [result.outputs[0].token_ids for result in llm.generate(PROMPTS, PARAMS)] == expected
    assert not rank_processes()


@pytest.mark.slow
def test_an_async_engine_grows_and_shrinks_while_it_works() -> None:
    async def run() -> None:
        llm = moesaic.AsyncLLM(data_parallel_size=2)
        try:
            await llm.wait_ready(60)
            expected = await asyncio.gather(*[one(llm, number) for number in range(8)])
            llm.resize(3)
            deadline = time.monotonic() + 60
            while llm.members.mode != "full":
                assert time.monotonic() < deadline and not llm.members.shortage
                assert await asyncio.gather(*[one(llm, number) for number in range(8)]) == expected
            working = [asyncio.create_task(one(llm, number)) for number in range(8)]
            await asyncio.sleep(0.05)
            llm.resize(1)
            assert await asyncio.gather(*working) == expected and llm.members.up == [0]
            await asyncio.to_thread(until, lambda: sorted(rank_processes().values()) == [0], 30, "two have left")
        finally:
            await llm.close()

    asyncio.run(run())
    assert not rank_processes()


async def one(llm: moesaic.AsyncLLM, number: int) -> list[int]:
    token_ids = llm.tokenizer.encode(PROMPTS[number])
    prompt = Prompt(request_id=f"{number} {time.monotonic()}", token_ids=token_ids, params=PARAMS)
    return (await llm.generate(prompt)).outputs[0].token_ids
