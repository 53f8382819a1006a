"""A beam search of a server: what comes of it, as deltas of ordinary requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from front.async_llm import AsyncLLM
from front.messages import TokenOutput
from front.outputs import Delta, PositionLogprobs, Prompt
from front.search.beams import Beam, BeamSearchParams, Search
from front.sequences import LiveRequest
from front.sequences import Sequence as Choice


async def beam_deltas(
    engine: AsyncLLM, prompts: Sequence[Prompt], params: BeamSearchParams
) -> AsyncGenerator[list[Delta], None]:
    """The n best outputs of each prompt, all at once, as deltas with the choice numbers of the whole request."""
    ends = engine.tokenizer.eos_token_ids
    searches = [Search(prompt, params, ends) for prompt in prompts]
    with engine.series(name for search in searches for name in search.names()) as aborted:
        while asked := [prompt for search in searches for prompt in search.prompts()]:
            tasks = [asyncio.create_task(engine.generate(prompt, goes_on=True)) for prompt in asked]
            try:
                results = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for search in searches:
                search.take_results(results)
                if aborted.intersection(search.names()):
                    search.stop("abort")
    yield [
        delta
        for place, (prompt, search) in enumerate(zip(prompts, searches, strict=True))
        for delta in _deltas(engine, prompt, search, place * prompt.params.n)
    ]


def _deltas(engine: AsyncLLM, prompt: Prompt, search: Search, first: int) -> list[Delta]:
    """Of the best beams, read as outputs of ordinary requests are. Where there are fewer, choices are empty."""
    beams = [*search.best, *[Beam() for _ in range(prompt.params.n)]][: prompt.params.n]
    shown = prompt.params.logprobs
    deltas = []
    for index, beam in enumerate(beams):
        hidden = prompt.params.skip_special_tokens
        tags = prompt.format.tags if prompt.format is not None else ()
        detokenizer = engine.tokenizer.detokenizer(prompt.token_ids, hidden, tags)
        choice = Choice(index, 0, LiveRequest(prompt, 0.0), detokenizer)
        delta = choice.delta(TokenOutput(0, beam.tokens, beam.finish_reason, beam.stop_reason))
        delta.index = first + index
        if shown is not None:
            delta.logprobs = [PositionLogprobs(one.chosen, one.top[:shown]) for one in beam.logprobs]
        delta.num_cached_tokens = search.num_cached if index == 0 else 0
        deltas.append(delta)
    return deltas
