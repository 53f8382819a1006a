"""What can be on or off while the same requests run: options of the engine, of requests, and what happens meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.eplb import EplbConfig
from front.chat.forced import forced_calls
from front.chat.format import OutputFormat
from front.params import Grammar, ReasoningBudget, StructuredOutputsParams
from front.structured.grammar import checked_grammar
from front.text.tokenizer import Tokenizer
from models.tiny import CHECKPOINT
from moesaic import AsyncLLM

EVENT_SECONDS = 60.0  # bounds what an event waits for


@dataclass(frozen=True)
class Seen:
    """What a run has shown of itself, to tell whether a feature was at work."""

    hits: int  # tokens found in the prefix cache
    preemptions: int
    split_steps: int
    drafted: int  # tokens
    replayed: int  # requests
    reweights: int
    longest_prompt: int
    aborted: int
    losses: int  # of ranks
    calls: int  # of tools
    llm: AsyncLLM


@dataclass(frozen=True)
class Feature:
    """options: of EngineConfig. params: of every request's SamplingParams. format: how its output is parsed. ranks: at
    least so many. place: features of the same one exclude each other. event: done when a part of the tokens has come. losses: ranks that are lost by it. own: results
    differ from those without it, so it has its own. seen: whether it was at work."""

    options: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    format: OutputFormat | None = None
    ranks: int = 1
    place: str = ""
    event: Callable[[AsyncLLM], Awaitable[None]] | None = None
    losses: int = 0
    own: bool = False
    priorities: bool = False
    aborts: bool = False
    seen: Callable[[Seen], bool] = lambda seen: True


async def _kill(llm: AsyncLLM) -> None:
    os.kill(llm.ready[0].process, signal.SIGKILL)


async def _hang(llm: AsyncLLM) -> None:
    """Of the last rank, so that it is not the one that is killed."""
    os.kill(llm.ready[max(llm.ready)].process, signal.SIGSTOP)


async def _grow(llm: AsyncLLM) -> None:
    """Once all ranks serve: a resize in the middle of a recovery is refused."""
    async with asyncio.timeout(EVENT_SECONDS):
        while len(llm.members.up) < llm.members.count:
            await asyncio.sleep(0.02)
    llm.resize(llm.members.count + 1)


OFTEN = EplbConfig(window_size=8, memory_steps=4, reweight_interval=2, move_interval=4)
PENALTIES = {"presence_penalty": 0.3, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_tokens": 30}
DBO = {"enable_dbo": "on", "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 8}

DRAFTER = Path(__file__).parents[1] / "speculation" / "drafter"  # made by benchmarks/train_eagle3.py
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
EAGLE3 = {"method": "eagle3", "model": str(DRAFTER), "num_speculative_tokens": 3, "adaptive": False}
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2, "adaptive": False
}  # fmt: skip


def _forced_call() -> Grammar:
    """A call whose text is longer than an output may be."""
    schema = {"type": "object", "properties": {"text": {"type": "string", "pattern": "^([a-z]+ ){60}$"}}}
    functions = [{"name": "tell", "parameters": {**schema, "required": ["text"], "additionalProperties": False}}]
    tokenizer = Tokenizer(CHECKPOINT)
    tag = forced_calls(functions, TOOLS, required=True)
    return checked_grammar(StructuredOutputsParams(structural_tag=tag), tokenizer)


def _reasoning() -> ReasoningBudget:
    """Of an output that begins inside of its reasoning, which ends with several tokens."""
    return ReasoningBudget(7, (), (tuple(Tokenizer(CHECKPOINT).encode_bit("</think>")),))


TOOLS = OutputFormat(calls="hermes", tools={"tell": {"type": "object"}})
FEATURES: dict[str, Feature] = {
    "prefix cache": Feature({"enable_prefix_caching": True}, seen=lambda seen: seen.hits > 0),
    "chunked prefill": Feature({"max_num_batched_tokens": 16}, seen=lambda seen: seen.longest_prompt > 16),
    "preemption": Feature({"num_kv_blocks": 16, "max_model_len": 128}, seen=lambda seen: seen.preemptions > 0),
    "asynchronous scheduling": Feature({"async_scheduling": True}, seen=lambda seen: seen.llm.plan.async_scheduling),
    "graphs": Feature({"cudagraph_mode": "auto"}, seen=lambda seen: seen.llm.plan.cudagraph_mode != "none"),
    "prefill cadence": Feature({"prefill_cadence": "on"}, ranks=2, seen=lambda seen: seen.llm.plan.prefill_cadence),
    "DBO": Feature(DBO, ranks=2, seen=lambda seen: seen.split_steps > 0),
    "rebalancing": Feature(
        {"enable_eplb": True, "eplb": OFTEN, "num_redundant_experts": 16}, ranks=2, seen=lambda seen: seen.reweights > 0
    ),
    "MTP drafts": Feature({"speculative_config": MTP}, place="drafts", seen=lambda seen: seen.drafted > 0),
    "EAGLE-3 drafts": Feature({"speculative_config": EAGLE3}, place="drafts", seen=lambda seen: seen.drafted > 0),
    "n-gram drafts": Feature({"speculative_config": NGRAM}, place="drafts", seen=lambda seen: seen.drafted > 0),
    "FP8 rows": Feature({"dispatch_dtype": "fp8"}, ranks=2, own=True),
    "shared memory": Feature({"all2all_backend": "shm"}, ranks=2, place="exchange"),
    "shared vocabulary": Feature(
        {"all2all_backend": "shm", "vocab_parallel": "on"},
        ranks=2,
        place="exchange",
        seen=lambda seen: seen.llm.plan.vocab_parallel,
    ),
    "gloo": Feature({"all2all_backend": "gloo"}, ranks=2, place="exchange"),
    "2 ranks": Feature(ranks=2, place="ranks"),
    "4 ranks": Feature(ranks=4, place="ranks"),
    "n = 2": Feature(params={"n": 2}, own=True),
    "logprobs": Feature(params={"logprobs": 3}, own=True),
    "stop strings": Feature(params={"stop": ("the ", "and")}, own=True),
    "penalties": Feature(params=PENALTIES, own=True),
    "a grammar": Feature(params={"grammar": Grammar("start: /([a-z]+ ){60}/")}, place="grammar", own=True),
    "tools": Feature(
        params={"grammar": _forced_call()}, format=TOOLS, place="grammar", own=True, seen=lambda seen: seen.calls > 0
    ),
    "reasoning budget": Feature(params={"reasoning": _reasoning()}, own=True),
    "priorities": Feature({"scheduling_policy": "priority"}, priorities=True),
    "aborts": Feature(aborts=True, seen=lambda seen: seen.aborted > 0),
    "a kill": Feature(ranks=2, place="kill", event=_kill, losses=1, seen=lambda seen: seen.replayed > 0),
    "a step resumed": Feature(
        {"resume_steps": "on"},
        ranks=2,
        place="kill",
        event=_kill,
        losses=1,
        seen=lambda seen: seen.llm.plan.resume_steps and seen.replayed > 0,
    ),
    "a hang": Feature(ranks=2, event=_hang, losses=1, seen=lambda seen: seen.replayed > 0),
    "growth": Feature(
        ranks=2, event=_grow, seen=lambda seen: seen.llm.members.count > seen.llm.plan.data_parallel_size
    ),
}


def exclude(one: Feature, other: Feature) -> bool:
    return one.place != "" and one.place == other.place
