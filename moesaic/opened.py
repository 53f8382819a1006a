"""What is behind `moesaic.LLM`: the plan, the ranks that are started for it, and front.llm.LLM over them. The process
of the first rank is told what it is before the front is imported here."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.engine import EngineConfig, Frontend, Plan
from configs.env import read_env
from engine.plan import make_plan
from front.model_defaults import model_defaults
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


def open_engine(config: EngineConfig, in_process: bool | None, generation_config: str, source: Source | None) -> Opened:
    """in_process, generation_config: as `moesaic.LLM` has them. source: a process that may become a rank; the caller
    drops it where this raises."""
    if generation_config not in ("auto", "vllm"):
        raise ValueError(f"generation_config must be 'auto' or 'vllm', not {generation_config!r:.100}")
    recommended = generation_config == "auto"
    ranks = config.data_parallel_size
    if in_process and ranks > 1:
        raise ValueError(f"in_process is for one rank, not for data_parallel_size {ranks}")
    here = ranks == 1 and ("torch" in sys.modules or bool(config.logits_processors))
    if not (here if in_process is None else in_process):
        plan = make_plan(config, frontend=Frontend.CALLER)
        if in_process is not None or ranks > 1 or plan.device == "cpu":
            return _beside(plan, recommended, source)
    if source is not None:
        source.drop()
    return _here(make_plan(config, frontend=Frontend.IN_PROCESS), recommended)


def _here(plan: Plan, recommended: bool) -> Opened:
    with no_collections():
        own = importlib.import_module("engine.process.local_ranks")
    weights = OwnWeights(plan)
    try:
        ranks = own.start_local(plan, weights.store)
        weights.map_ahead()
        return Opened(plan, _over(ranks, plan, recommended), weights)
    except BaseException:
        weights.close()
        raise


def _beside(plan: Plan, recommended: bool, source: Source | None) -> Opened:
    spawned = SpawnedRanks(plan, read_env().runtime_root, source)
    try:
        llm = _over(spawned, plan, recommended, num_experts=plan.num_experts, slots_per_rank=plan.slots_per_rank)
    except RuntimeError:  # EngineFailed
        if spawned.bad_input:
            raise ValueError(spawned.bad_input) from None
        raise
    return Opened(plan, llm, None)


def _over(ranks: Ranks, plan: Plan, recommended: bool, **numbers: int) -> LLM:
    """recommended: calls without parameters take what generation_config.json has."""
    with no_collections():
        front = importlib.import_module("front.llm")
    of_plan: dict[str, Any] = {name: getattr(plan, name) for name in ("block_size", "max_logprobs", "logprobs_mode")}
    of_plan["processors"] = bool(plan.logits_processors)
    try:
        tokenizer = Tokenizer(plan.model_path, plan.tokenizer_path)
        defaults = model_defaults(plan.model_path) if recommended else None
    except BaseException:
        ranks.close()
        raise
    llm: LLM = front.LLM(ranks, tokenizer, defaults=defaults, **of_plan, **numbers)
    return llm
