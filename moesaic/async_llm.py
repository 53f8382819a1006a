"""`moesaic.AsyncLLM`: the engine on an event loop, with its ranks started for the caller."""

from __future__ import annotations

from typing import Any

from configs.engine import Frontend, Plan
from configs.env import read_env
from engine.plan import make_plan
from front import async_llm
from front.text.tokenizer import Tokenizer
from launch.spawned import SpawnedRanks
from moesaic.opened import config_of


class AsyncLLM(async_llm.AsyncLLM):
    """The engine on a running event loop; every rank is a process of its own.

    llm = AsyncLLM("path/to/model")
    await llm.wait_ready(timeout=60)
    async for deltas in llm.stream(prompt): ...
    await llm.close()
    """

    plan: Plan

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Inside a running event loop. model and options as for LLM."""
        self.plan = make_plan(config_of({"model": model, **options}), frontend=Frontend.CALLER)
        tokenizer = Tokenizer(self.plan.model_path, self.plan.tokenizer_path)
        ranks = SpawnedRanks(self.plan, read_env().runtime_root)
        super().__init__(
            ranks,
            tokenizer,
            block_size=self.plan.block_size,
            num_experts=self.plan.num_experts,
            slots_per_rank=self.plan.slots_per_rank,
            log_balancedness=self.plan.eplb is not None and self.plan.eplb.log_balancedness,
        )
