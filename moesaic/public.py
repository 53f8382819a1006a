"""`moesaic.LLM` and `moesaic.AsyncLLM`: the engine with its ranks started for the caller."""

from __future__ import annotations

import importlib
from typing import Any, Self

from configs.engine import EngineConfig, Plan
from configs.env import read_env
from engine.plan import make_plan
from front import async_llm, llm
from front.messages import RankStats
from front.text import Tokenizer
from launch.spawned import SpawnedRanks
from launch.weights import OwnWeights
from moesaic.rooms import no_collections


class LLM(llm.LLM):
    """Offline generation. One rank runs in this process, which imports torch for it; several in processes of their own.

        with LLM("path/to/model", data_parallel_size=2) as llm:
            results = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    Raises ValueError, one line that names the file or the field, for what cannot run.
    """

    plan: Plan
    _weights: OwnWeights | None = None  # of the one rank

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """model: a Hugging Face directory; None: the embedded model. options: fields of EngineConfig, such as
        data_parallel_size=4, enable_eplb=True, eplb=EplbConfig(window_size=200)."""
        self._open(EngineConfig(model=model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        self = cls.__new__(cls)
        self._open(config)
        return self

    def _open(self, config: EngineConfig) -> None:
        self.plan = make_plan(config, alone=config.data_parallel_size == 1)
        tokenizer = Tokenizer(self.plan.model_path, self.plan.tokenizer_path)
        shared: dict[str, Any] = {
            name: getattr(self.plan, name) for name in ("block_size", "max_logprobs", "logprobs_mode")
        }
        shared["processors"] = bool(self.plan.logits_processors)
        if self.plan.data_parallel_size == 1:
            with no_collections():
                own = importlib.import_module("engine.process.local_ranks")
            self._weights = OwnWeights(self.plan)
            try:
                ranks = own.start_local(self.plan, self._weights.store)
            except BaseException:
                self._weights.close()
                raise
            self._weights.map_ahead()
            super().__init__(ranks, tokenizer, **shared)
        else:
            spawned = SpawnedRanks(self.plan, read_env().runtime_root)
            super().__init__(
                spawned,
                tokenizer,
                **shared,
                num_experts=self.plan.num_experts,
                slots_per_rank=self.plan.slots_per_rank,
            )

    def close(self) -> None:
        super().close()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def stats(self) -> list[RankStats]:
        """The latest of every rank, in rank order."""
        return self.front.stats


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
        self.plan = make_plan(EngineConfig(model=model, **options))
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
