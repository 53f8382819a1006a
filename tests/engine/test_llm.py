"""LLM and AsyncLLM over a real rank and the embedded model: what the sampling parameters promise, end to end."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from rank_parts import make_plan

from engine.build import build_rank
from engine.process.local_ranks import LocalRanks
from front.async_llm import AsyncLLM
from front.front import EngineBusy
from front.llm import LLM
from front.messages import Outputs, RankFailed, Shutdown
from front.outputs import Prompt
from front.params import SamplingParams
from front.sampling_params import resolve
from front.text.tokenizer import Tokenizer
from front.wire import RankSocket, ZmqRanks
from models.tiny import CHECKPOINT

PLAN = make_plan(CHECKPOINT, max_model_len=256, max_num_seqs=32, max_num_batched_tokens=256, num_kv_blocks=512)
PROMPTS = ["Once upon a time", "The little dog", "One day, Tom and his mom went to the"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM(LocalRanks(build_rank(PLAN)), Tokenizer(CHECKPOINT), block_size=PLAN.block_size) as llm:
        yield llm


def one(llm: LLM, prompt: str, **params):
    [result] = llm.generate(prompt, SamplingParams(**params))
    return result


def test_results_do_not_depend_on_company(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    for prompt, result in zip(PROMPTS, together, strict=True):
        [alone] = llm.generate(prompt, GREEDY)
        assert result.prompt == prompt
        assert result.outputs[0].token_ids == alone.outputs[0].token_ids
        assert result.outputs[0].text == alone.outputs[0].text
        choice = result.outputs[0]
        assert choice.finish_reason in ("stop", "length") and len(choice.token_ids) <= 24
        assert llm.tokenizer.decode(choice.token_ids) == choice.text


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a cat."}]
    [result] = llm.chat(messages, GREEDY)
    assert result.prompt == llm.tokenizer.apply_chat_template(messages) and result.outputs[0].text
    assert result.prompt_token_ids[0] == llm.tokenizer.bos_token_id
    assert result.prompt_token_ids.count(llm.tokenizer.bos_token_id) == 1


def test_seeds(llm: LLM) -> None:
    def texts(**params) -> list[str]:
        return [c.text for c in one(llm, PROMPTS[0], max_tokens=20, temperature=1.0, **params).outputs]

    assert texts(seed=5) == texts(seed=5) != texts(seed=6)
    two = texts(seed=5, n=2)
    assert two[0] == texts(seed=5)[0] != two[1] and two == texts(seed=5, n=2)
    assert texts() != texts()


def test_logprobs(llm: LLM) -> None:
    result = one(llm, PROMPTS[0], max_tokens=8, temperature=0.0, logprobs=3, prompt_logprobs=2)
    [choice] = result.outputs
    assert len(choice.logprobs) == len(choice.token_ids)
    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert position.chosen.token_id == token_id == position.top[0].token_id  # greedy
        assert position.chosen.rank == 1 and [top.rank for top in position.top] == [1, 2, 3]
        values = [top.logprob for top in position.top]
        assert values == sorted(values, reverse=True) and all(value <= 0 for value in values)
    assert math.isclose(choice.cumulative_logprob, sum(p.chosen.logprob for p in choice.logprobs))
    assert b"".join(p.chosen.raw for p in choice.logprobs).decode() == choice.text
    assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(result.prompt_token_ids)
    scored = [position.chosen.token_id for position in result.prompt_logprobs[1:]]
    assert scored == result.prompt_token_ids[1:]

    # What was generated scores the same when it is the prompt.
    whole = [*result.prompt_token_ids, *choice.token_ids]
    [again] = llm.generate([whole], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    for before, after in zip(choice.logprobs, again.prompt_logprobs[-len(choice.token_ids) :], strict=True):
        assert math.isclose(before.chosen.logprob, after.chosen.logprob, abs_tol=1e-3)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(llm: LLM, include: bool) -> None:
    text = one(llm, PROMPTS[0], max_tokens=30, temperature=0.0).outputs[0].text
    stop = text[10:13]
    result = one(
        llm, PROMPTS[0], max_tokens=30, temperature=0.0, stop=(stop, "\x00"), include_stop_str_in_output=include
    )
    [choice] = result.outputs
    at = text.index(stop)
    assert choice.text == text[: at + len(stop) if include else at]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    tail = llm.tokenizer.decode(choice.token_ids)
    assert stop in tail and stop not in llm.tokenizer.decode(choice.token_ids[:-1])


def test_stop_ids_and_min_tokens(llm: LLM) -> None:
    ids = one(llm, PROMPTS[0], max_tokens=12, temperature=0.0).outputs[0].token_ids
    stop_id = ids[5]
    first = ids.index(stop_id)
    [choice] = one(llm, PROMPTS[0], max_tokens=12, temperature=0.0, stop_token_ids=(stop_id,)).outputs
    assert choice.token_ids == ids[: first + 1] and choice.stop_reason == stop_id and choice.finish_reason == "stop"
    assert choice.text == llm.tokenizer.decode(ids[:first])
    [choice] = one(
        llm, PROMPTS[0], max_tokens=12, temperature=0.0, stop_token_ids=(stop_id,), min_tokens=first + 1
    ).outputs
    assert stop_id not in choice.token_ids[: first + 1] and len(choice.token_ids) > first + 1


def test_eos_and_ignore_eos(llm: LLM) -> None:
    """EOS is made the only token that may come."""
    eos = llm.tokenizer.eos_token_ids[0]
    [choice] = one(llm, PROMPTS[0], max_tokens=5, allowed_token_ids=(eos,)).outputs
    assert (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason) == ([eos], "", "stop", None)
    [choice] = one(llm, PROMPTS[0], max_tokens=5, allowed_token_ids=(eos,), ignore_eos=True).outputs
    assert choice.token_ids == [eos] * 5 and choice.finish_reason == "length" and choice.text == ""
    [choice] = one(
        llm, PROMPTS[0], max_tokens=2, allowed_token_ids=(eos,), ignore_eos=True, skip_special_tokens=False
    ).outputs
    assert choice.text == llm.tokenizer.token_str(eos) * 2


def test_bad_words(llm: LLM) -> None:
    """Neither spelling of the word, with or without the space before it, comes again."""
    text = one(llm, PROMPTS[0], max_tokens=16, temperature=0.0).outputs[0].text
    word = text.split()[1]
    spellings = [llm.tokenizer.encode(spelling, add_special_tokens=False) for spelling in (word, " " + word)]
    params = SamplingParams(max_tokens=16, temperature=0.0, bad_words=(word,))
    token_ids = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    for spelling in spellings:
        windows = [token_ids[start : start + len(spelling)] for start in range(len(token_ids))]
        assert spelling not in windows


def test_the_context_is_the_limit(llm: LLM) -> None:
    prompt = [5] * 250
    [result] = llm.generate(prompt, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 6 and result.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="maximum context length is 256 tokens; the prompt has 256"):
        llm.generate([5] * 256, GREEDY)


def test_prefix_cache_is_reported(llm: LLM) -> None:
    prompt = list(range(100, 180))
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens >= 64


def test_interrupted_call_leaves_nothing_behind(llm: LLM) -> None:
    def interrupt(progress) -> None:
        if progress.num_output_tokens >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=100), progress=interrupt)
    [result] = llm.generate(PROMPTS[0], GREEDY)
    assert result.outputs[0].text
    assert llm.front.stats[0].running + llm.front.stats[0].waiting == 0


# ---- asynchronous, over real sockets ----


class RankThread(threading.Thread):
    """A real rank behind real sockets, in a thread so that it needs no process."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.endpoint = endpoint

    def run(self) -> None:
        socket = RankSocket(self.endpoint, 0)
        rank = build_rank(PLAN)
        socket.send(rank.ready)
        while not rank.done:
            for message in socket.poll(0.0 if rank.has_work else 0.02):
                rank.submit(message)
            outputs = rank.step()
            if outputs:
                socket.send(Outputs(0, outputs, rank.stats))
        socket.send(RankFailed(0, "rank 0: left"))
        socket.close()


def make_prompt(tokenizer: Tokenizer, request_id: str, text: str, **params) -> Prompt:
    token_ids = tokenizer.encode(text)
    resolved = resolve(SamplingParams(**params), tokenizer, len(token_ids), PLAN.max_model_len)
    return Prompt(request_id=request_id, token_ids=token_ids, params=resolved, text=text)


def test_async_over_sockets(llm: LLM, tmp_path: Path) -> None:
    expected = [result.outputs[0].text for result in llm.generate(PROMPTS, GREEDY)]
    endpoint = f"ipc://{tmp_path}/front.ipc"
    tokenizer = llm.tokenizer

    async def body() -> None:
        async with asyncio.timeout(120), AsyncLLM(ZmqRanks(endpoint, 1), tokenizer) as engine:
            thread.start()
            await engine.wait_ready(60)
            prompts = [
                make_prompt(tokenizer, str(number), PROMPTS[number % 3], temperature=0.0, max_tokens=24)
                for number in range(24)
            ]
            results = await asyncio.gather(*(engine.generate(prompt) for prompt in prompts))
            assert [result.outputs[0].text for result in results] == expected * 8

            async with aclosing(engine.stream(make_prompt(tokenizer, "x", PROMPTS[0], max_tokens=200))) as stream:
                async for deltas in stream:
                    assert deltas
                    break
            assert engine.num_requests == 0
            after = await engine.generate(make_prompt(tokenizer, "y", PROMPTS[0], max_tokens=3, ignore_eos=True))
            assert len(after.outputs[0].token_ids) == 3
            assert engine.stats[0].running <= 1  # the one that was left has gone

            engine._ranks.send(0, Shutdown())
            while engine.shortage is None:
                await asyncio.sleep(0.01)
            assert engine.shortage == "0 of 1 ranks serve; waiting for rank 0 (rank 0: left)" and engine.failed is None
            with pytest.raises(EngineBusy):
                await engine.generate(make_prompt(tokenizer, "z", "a", max_tokens=3))

    thread = RankThread(endpoint)
    asyncio.run(body())
    thread.join(30)
    assert not thread.is_alive()
