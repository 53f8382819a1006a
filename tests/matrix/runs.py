"""The same seeded requests under some features at once: `run` gives what clients saw, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from front.chat.events import Message
from front.collector import Collector
from front.outputs import Prompt, RequestOutput
from front.params import SamplingParams
from moesaic import AsyncLLM
from tests.matrix.features import Feature, Seen

NUM_REQUESTS, MAX_TOKENS = 8, 48
ABORTED = (2, 5)
READY_SECONDS, RUN_SECONDS = 120.0, 180.0
STEM = "Once upon a time there was a small fox who lived in a green forest with her mother and many friends. "
PLAIN = {
    "dtype": "bfloat16", "max_model_len": 256, "block_size": 8, "num_kv_blocks": 400,
    "max_num_seqs": 8, "max_num_batched_tokens": 512, "enable_prefix_caching": False, "async_scheduling": False,
    "cudagraph_mode": "none", "enable_dbo": "off", "prefill_cadence": "off", "threads_per_rank": 1,
    "speculative_config": {"method": "none"},
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What clients saw: all that they did, by the number of the request and of its wave; and how many tokens."""

    seen: dict[tuple[int, int], str]
    tokens: int

    def differing(self, expected: Result) -> tuple[int, ...]:
        """Requests that differ from those of an only wave."""
        return tuple(number for (wave, number), bits in self.seen.items() if bits != expected.seen[0, number])


def options_of(features: Sequence[Feature], deterministic: bool) -> dict[str, Any]:
    """Of the engine. Where one fault may meet another a rank more is there to survive them."""
    events = sum(feature.event is not None for feature in features)
    ranks = max([feature.ranks for feature in features], default=1)
    merged: dict[str, Any] = {**PLAIN, "deterministic": deterministic}
    for feature in features:
        merged |= feature.options
    return {**merged, "data_parallel_size": max(ranks, 1 + events if events > 1 else 1)}


def prompts_of(llm: AsyncLLM, features: Sequence[Feature]) -> list[Prompt]:
    """Half of them greedy, half drawn with a seed; every second one begins like the others."""
    params: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    for feature in features:
        params |= feature.params
    prompts = []
    for number in range(NUM_REQUESTS):
        text = (STEM if number % 2 else "") + f"The {number} friends of the fox"
        drawn = {"temperature": 0.9, "seed": number} if number % 4 > 1 else {"temperature": 0.0}
        priority = (number * 5) % 7 if any(feature.priorities for feature in features) else 0
        token_ids = llm.tokenizer.encode(text)
        prompts.append(
            Prompt(
                request_id=str(number),
                token_ids=token_ids,
                params=SamplingParams(**params, **drawn),
                text=text,
                priority=priority,
                format=next((feature.format for feature in features if feature.format is not None), None),
            )
        )
    return prompts


def bits(output: RequestOutput) -> str:
    """All that a client sees; equal texts have equal numbers."""
    return repr((output.outputs, output.prompt_logprobs))


class Run:
    """Some requests on an engine. Events come when a third and when two thirds of the tokens have come; requests that
    are to be aborted are so after two tokens. When all events are over the requests come once more."""

    def __init__(self, llm: AsyncLLM, features: Sequence[Feature], tokens: int) -> None:
        """tokens: that will come in a wave."""
        self._llm, self._features = llm, features
        self._events = [feature.event for feature in features if feature.event is not None]
        self._expected, self._tokens = tokens, 0
        self._counts: dict[tuple[int, str], int] = {}
        self._longest = self._aborted = self._reweights = self._calls = 0
        self._running: list[asyncio.Task[None]] = []

    async def results(self) -> Result:
        aborts = any(feature.aborts for feature in self._features)
        async with asyncio.timeout(RUN_SECONDS):
            seen = await self._wave(0, aborts)
            tokens = self._tokens
            if self._running:
                await asyncio.gather(*self._running)
                seen |= await self._wave(1, False)
        return Result(seen, tokens)

    async def _wave(self, wave: int, aborts: bool) -> dict[tuple[int, int], str]:
        prompts = prompts_of(self._llm, self._features)
        self._longest = max(len(prompt.token_ids) for prompt in prompts)
        # Two with a prefix come first, so that it can be found by those after them.
        first = await asyncio.gather(*(self._one(prompt, aborts) for prompt in prompts[:2]))
        rest = await asyncio.gather(*(self._one(prompt, aborts) for prompt in prompts[2:]))
        return {(wave, int(output.request_id)): bits(output) for output in [*first, *rest] if output is not None}

    async def _one(self, prompt: Prompt, aborts: bool) -> RequestOutput | None:
        """None: it was aborted."""
        collector = Collector(prompt)
        messages = [Message() for _ in range(prompt.params.n)]
        to_abort = aborts and int(prompt.request_id) in ABORTED
        async for deltas in (stream := self._llm.stream(prompt)):
            for delta in deltas:
                collector.add(delta)
                messages[delta.index].add(delta.events or ())
                self._on_tokens(len(delta.token_ids))
            if to_abort and collector.num_output_tokens >= 2:
                await stream.aclose()
                self._aborted += 1
                return None
        output = collector.output()
        for choice, message in zip(output.outputs, messages, strict=True):
            choice.message = message
        self._calls += sum(len(message.calls) for message in messages)
        return output

    def _on_tokens(self, count: int) -> None:
        self._tokens += count
        self._note_stats()
        due = self._expected * (1 + len(self._running)) // 3
        if len(self._running) < len(self._events) and self._tokens >= due:
            self._running.append(asyncio.ensure_future(self._events[len(self._running)](self._llm)))

    def _note_stats(self) -> None:
        """Counters of a lost rank begin anew: the most that each has shown is kept."""
        for rank, stats in enumerate(self._llm.stats):
            for name in ("prefix_hits", "preemptions", "dbo_steps", "spec_draft_tokens"):
                self._counts[rank, name] = max(self._counts.get((rank, name), 0), getattr(stats, name))

        balance = self._llm.front.balance
        self._reweights = max(self._reweights, 0 if balance is None else balance.reweights)

    def _sum(self, name: str) -> int:
        return sum(count for (_, other), count in self._counts.items() if other == name)

    def seen(self) -> Seen:
        return Seen(
            hits=self._sum("prefix_hits"),
            preemptions=self._sum("preemptions"),
            split_steps=self._sum("dbo_steps"),
            drafted=self._sum("spec_draft_tokens"),
            replayed=self._llm.num_replayed,
            reweights=self._reweights,
            longest_prompt=self._longest,
            aborted=self._aborted,
            calls=self._calls,
            losses=len(self._llm.take_recoveries()) + len(self._llm.front.members.open),
            llm=self._llm,
        )


async def run(
    features: Sequence[Feature], tokens: int = NUM_REQUESTS * MAX_TOKENS, deterministic: bool = True
) -> tuple[Result, Seen]:
    """What clients saw, and what the run has shown of itself. tokens: that are expected."""
    async with AsyncLLM(None, **options_of(features, deterministic)) as llm:
        await llm.wait_ready(READY_SECONDS)
        running = Run(llm, features, tokens)
        results = await running.results()
        return results, running.seen()
