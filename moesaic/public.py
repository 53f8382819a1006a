"""`moesaic.LLM` and `moesaic.AsyncLLM`: the engine with its ranks started for the caller."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Self

from configs.engine import EngineConfig, Plan
from configs.env import read_env
from engine.plan import make_plan
from front import async_llm, llm
from front.front import EngineFailed
from front.messages import RankStats
from front.text import Tokenizer
from launch.early import Source, take_source
from launch.spawned import SpawnedRanks
from launch.weights import OwnWeights
from moesaic.rooms import no_collections


class LLM(llm.LLM):
    """Offline generation. Every rank is a process of its own; one may also run in this process (`in_process`).

        with LLM("path/to/model", data_parallel_size=2) as llm:
            results = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    Raises ValueError, one line that names the file or the field, for what cannot run.
    """

    plan: Plan
    _weights: OwnWeights | None = None  # of a rank in this process

    def __init__(self, model: str | None = None, *, in_process: bool | None = None, **options: Any) -> None:
        """model: a Hugging Face directory; None: the embedded model. options: fields of EngineConfig, such as
        data_parallel_size=4, enable_eplb=True, eplb=EplbConfig(window_size=200).

        in_process: the one rank computes in this process, which imports torch for it: then a debugger, a profiler or
        hooks of torch reach the model. None: where torch has been imported already, or there are logits processors,
        which may be classes of this script, or there is a GPU. A process of its own is ready sooner, as it imports
        beside this one, and less; and it is started again if it is lost."""
        self._open(EngineConfig(model=model, **options), in_process)

    @classmethod
    def from_config(cls, config: EngineConfig, *, in_process: bool | None = None) -> Self:
        self = cls.__new__(cls)
        self._open(config, in_process)
        return self

    def _open(self, config: EngineConfig, in_process: bool | None) -> None:
        ranks = config.data_parallel_size
        if in_process and ranks > 1:
            raise ValueError(f"in_process is for one rank, not for data_parallel_size {ranks}")
        here = ranks == 1 and ("torch" in sys.modules or bool(config.logits_processors))
        if here if in_process is None else in_process:
            self._open_here(make_plan(config, alone=True))
            return
        source = take_source()  # it imports while all this is decided
        try:
            plan = make_plan(config)
            if in_process is None and ranks == 1 and plan.device != "cpu":
                source.drop()
                self._open_here(make_plan(config, alone=True))
            else:
                self._open_beside(plan, source)
        except BaseException:
            source.drop()
            raise

    def _open_here(self, plan: Plan) -> None:
        self.plan, tokenizer = plan, Tokenizer(plan.model_path, plan.tokenizer_path)
        with no_collections():
            own = importlib.import_module("engine.process.local_ranks")
        self._weights = OwnWeights(plan)
        try:
            ranks = own.start_local(plan, self._weights.store)
        except BaseException:
            self._weights.close()
            raise
        self._weights.map_ahead()
        super().__init__(ranks, tokenizer, **_of_front(plan))

    def _open_beside(self, plan: Plan, source: Source) -> None:
        self.plan, tokenizer = plan, Tokenizer(plan.model_path, plan.tokenizer_path)
        spawned = SpawnedRanks(plan, read_env().runtime_root, source)
        numbers: dict[str, Any] = {"num_experts": plan.num_experts, "slots_per_rank": plan.slots_per_rank}
        try:
            super().__init__(spawned, tokenizer, **_of_front(plan), **numbers)
        except EngineFailed:
            if spawned.bad_input:
                raise ValueError(spawned.bad_input) from None
            raise

    def close(self) -> None:
        super().close()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def stats(self) -> list[RankStats]:
        """The latest of every rank, in rank order."""
        return self.front.stats


def _of_front(plan: Plan) -> dict[str, Any]:
    fields = {name: getattr(plan, name) for name in ("block_size", "max_logprobs", "logprobs_mode")}
    return {**fields, "processors": bool(plan.logits_processors)}


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
