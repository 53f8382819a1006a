"""Real processes: a prompt has the same tokens and the same log-probabilities on every rank, before a rank is killed and after;
and a seed gives the text that a single rank gives."""

from __future__ import annotations

import os
import signal

import pytest
from served import command_line, descendants

import moesaic
from front.outputs import RequestOutput
from moesaic import SamplingParams

PROMPTS = ["Once upon a time there was a fox", "The little girl went"]
PARAMS = [
    SamplingParams(max_tokens=16, temperature=0.0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.9, seed=23, logprobs=2, ignore_eos=True),
]


def rank_process(rank: int) -> int:
    words = {pid: command_line(pid) for pid in descendants(os.getpid())}
    lines = {pid: line for pid, line in words.items() if "engine.process.rank_process" in line}
    return next(pid for pid, line in lines.items() if int(line[line.index("--rank") + 1]) == rank)


def bits(result: RequestOutput) -> str:
    """Tokens and log-probabilities; equal texts have equal numbers."""
    choice = result.outputs[0]
    return repr((choice.token_ids, choice.logprobs))


def serve(llm: moesaic.LLM, copies: int, together: bool) -> list[set[str]]:
    """Of each prompt what so many ranks make of it. Not `together`: one after another, each alone on the rank whose turn it
    is."""
    batches = [copies] if together else [1] * (2 * copies)
    return [
        {bits(result) for batch in batches for result in llm.generate([prompt] * batch, params)}
        for prompt in PROMPTS
        for params in PARAMS
    ]


@pytest.mark.attacks
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_every_rank_before_and_after_a_kill(dtype: str) -> None:
    together = dtype == "bfloat16"  # float32 rounds by how many sequences a rank has
    with moesaic.LLM(dtype=dtype, enable_prefix_caching=False, enable_dbo="off") as llm:
        alone = serve(llm, 1, together)
    assert all(len(one) == 1 for one in alone)
    for size in (2, 4):
        with moesaic.LLM(dtype=dtype, data_parallel_size=size, enable_prefix_caching=False, enable_dbo="off") as llm:
            assert serve(llm, size, together) == alone
            os.kill(rank_process(0), signal.SIGKILL)
            assert serve(llm, size - 1, together) == alone


@pytest.mark.attacks
@pytest.mark.slow
def test_a_seed_gives_one_text_on_any_number_of_ranks() -> None:
    """float32 rounds by how many tokens a step has; draws have to bear that."""
    prompts = [f"{number} little foxes and a bird that" for number in range(24)]
    params = [SamplingParams(max_tokens=24, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(24)]
    texts = []
    for size in (1, 4):
        with moesaic.LLM(dtype="float32", data_parallel_size=size, enable_dbo="off") as llm:
            texts.append([result.outputs[0].token_ids for result in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
