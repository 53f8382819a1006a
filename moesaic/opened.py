"""What is behind `moesaic.LLM`: the plan, the ranks that are started for it, and front.llm.LLM over them. The process
of the first rank is told what it is before the front is imported here."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.engine import EngineConfig, Frontend, Plan
from configs.env import read_env
from engine.plan import make_plan
from front.text.tokenizer import Tokenizer
from launch.early import Source
from launch.spawned import SpawnedRanks
from launch.weights import OwnWeights
from moesaic.rooms import no_collections

if TYPE_CHECKING:
    from front.llm import LLM
    from front.wire import Ranks


class Opened(NamedTuple):
    plan: Plan
    llm: LLM
    weights: OwnWeights | None  # of a rank in this process


def config_of(asked: dict[str, Any]) -> EngineConfig:
    """asked: keyword arguments. TypeError, ValueError."""
    if asked.get("max_model_len") == -1:  # vLLM's "auto"
        return _read(asked)
    try:
        return EngineConfig(**asked)
    except TypeError:
        return _read(asked)
    except ValueError as error:
        try:
            return _read(asked)
        except ValueError:
            raise error from None


def _read(asked: dict[str, Any]) -> EngineConfig:
    """In vLLM's words; few ask so, and what reads them takes a while to import."""
    config: EngineConfig = importlib.import_module("moesaic.keywords").config_of(asked)
    return config


def open_engine(config: EngineConfig, in_process: bool | None, source: Source | None) -> Opened:
    """in_process: as `moesaic.LLM` has it. source: a process that may become a rank; the caller drops it where this
    raises."""
    ranks = config.data_parallel_size
    if in_process and ranks > 1:
        raise ValueError(f"in_process is for one rank, not for data_parallel_size {ranks}")
    here = ranks == 1 and ("torch" in sys.modules or bool(config.logits_processors))
    if not (here if in_process is None else in_process):
        plan = make_plan(config, frontend=Frontend.CALLER)
        if in_process is not None or ranks > 1 or plan.device == "cpu":
            return _beside(plan, source)
    if source is not None:
        source.drop()
    return _here(make_plan(config, frontend=Frontend.IN_PROCESS))


def _here(plan: Plan) -> Opened:
    with no_collections():
        own = importlib.import_module("engine.process.local_ranks")
    weights = OwnWeights(plan)
    try:
        ranks = own.start_local(plan, weights.store)
    except BaseException:
        weights.close()
        raise
    weights.map_ahead()
    return Opened(plan, _over(ranks, plan), weights)


def _beside(plan: Plan, source: Source | None) -> Opened:
    spawned = SpawnedRanks(plan, read_env().runtime_root, source)
    try:
        llm = _over(spawned, plan, num_experts=plan.num_experts, slots_per_rank=plan.slots_per_rank)
    except RuntimeError:  # EngineFailed
        if spawned.bad_input:
            raise ValueError(spawned.bad_input) from None
        raise
    return Opened(plan, llm, None)


def _over(ranks: Ranks, plan: Plan, **numbers: int) -> LLM:
    with no_collections():
        front = importlib.import_module("front.llm")
    of_plan: dict[str, Any] = {name: getattr(plan, name) for name in ("block_size", "max_logprobs", "logprobs_mode")}
    tokenizer = Tokenizer(plan.model_path, plan.tokenizer_path)
    llm: LLM = front.LLM(ranks, tokenizer, processors=bool(plan.logits_processors), **of_plan, **numbers)
    return llm
