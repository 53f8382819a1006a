"""From a plan to a rank that can step: config, model, weights, cache, and whom it meets."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from cache.manager import CacheManager
from cache.memory import CacheMemory
from cache.rows import CacheRows
from cache.spec import CacheSpec, state_groups, token_groups
from configs.cache import num_checkpoints, planned_sizes
from configs.engine import Plan
from configs.hosts import Network
from dbo.split import context_cost
from dbo.steps import Steps
from engine.capture import MANY, Capture, Forward, GraphPolicy
from engine.device import AtOnce, check_room, graph_library, make_readback, open_device
from engine.doorbell import Doorbell, SharedDoorbell
from engine.hooks import StepCompanion
from engine.overlap.cadence import Cadence
from engine.overlap.measure import Measure
from engine.overlap.policy import Overlap
from engine.process.rank_cache import RankCache
from engine.rank import Rank
from engine.rebalance.follower import Balance
from engine.rebalance.start import start_placement
from engine.recovery.reading import Unread, reader
from engine.runner import Runner
from engine.sampling.processors import LogitsProcessors
from engine.sampling.sampling_table import SamplingTable
from engine.scheduler import Scheduler
from engine.speculation.build import make_gate, make_speculation
from engine.speculation.mtp import MtpPasses
from engine.speculation.plan import planned_facts
from engine.step_buffers import StepBuffers
from engine.step_memory import Limits
from engine.structured.grammars import Grammars
from engine.team import Meet, Opening, Team
from engine.timeline import Timeline
from ep.backends.dispatchers import StepState
from ep.experts import WeightFormat
from ep.instrumented import ExchangeTimes
from ep.parallel import Parallel
from ep.protocol import AllToAll
from ep.requirements import FEW_TOKENS
from ep.table import make_lanes
from ep.transport.group import Group
from ep.transport.shm_group import ShmGroup
from ep.vocab_parallel import VocabParallel
from eplb.placement import Placement, linear_placement
from front.messages import RankReady
from layers.identity import check
from layers.step import StepInput
from layers.weights import Checkpoint
from models.base import CausalLM
from models.facts import ModelFacts
from models.graph_breaks import GraphBreaks
from models.registry import build
from native import Isa, choose, isa, limit_isa, parse
from native.tape import CpuGraphs
from store.memory import Store

# Of the cache, brought in while there is nothing to do: as much as the first prompts are likely to fill, and never more
# than the weights take.
PREPARED_BYTES = 1 << 30
# Of a rank whose weights lie in a store: more would read most of a large model's experts before it serves.
STORED_PRACTICE_TOKENS = 4
PRACTICE_TOKENS = 32  # on a CPU; on a GPU kernels are compiled for the largest step
MAX_EXACT = 256  # sequences of a decode step: with more, the Python between the kernels is lost in them


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_rank(
    plan: Plan,
    rank: int = 0,
    meet: Meet | None = None,
    bell: Doorbell | None = None,
    progress: Callable[[int, int], None] | None = None,
    join: bool = False,
    store: Store | None = None,
    network: Network | None = None,
    caches: Callable[[int], Sequence[Path]] | None = None,
) -> Rank:
    """Read the config, build and load the model, allocate the cache; the ranks of epoch 0 begin to meet before they
    load.

    meet: opens the groups of an epoch; None: there are no others. progress(bytes_done, bytes_total). join: the others
    are at work already, so a Membership is waited for instead of epoch 0. store: where the ranks of this machine have
    their weights. network: the machines of the ranks; None: this one. caches: as RankCache has them. Raises ValueError,
    one line, for a checkpoint or a plan that cannot run.
    """
    began = time.monotonic()
    device = _open(plan, rank)
    mapped = store is not None and store.complete
    if plan.checkpoint and not mapped:
        check(plan.model_path, plan.checkpoint)
    facts = planned_facts(plan)
    size = plan.data_parallel_size
    placement = _placement(plan, facts, join, network) if facts.num_moe_layers else None
    parallel = Parallel(rank, size, placement, _no_lanes)
    model = _model(plan, facts, parallel, device)
    exchange, times = StepState(), ExchangeTimes()
    lanes = partial(_lanes, plan, exchange, times, facts.vocab_size)
    checkpoint = Unread() if mapped else Checkpoint(plan.model_path, progress, plan.checkpoint, facts.key_names)
    read = reader(model, checkpoint)
    team = Team(rank, size, placement, model, _fingerprint(plan, facts), meet or _no_peers, lanes, read)
    if not join:
        team.begin(0, (True,) * size)
    model.load(checkpoint, store)
    checkpoint.finish()
    cache = RankCache(plan, model, device, rank, caches)
    scheduler = _scheduler(plan, model.cache_spec(), facts.vocab_size, device, cache.rows)
    ready = _ready(plan, rank, network, scheduler, facts, time.monotonic() - began, checkpoint.bytes_read, store)
    timeline, kv = Timeline(rank, model), cache.memory
    runner = _runner(plan, model, cache, facts, device, exchange, timeline)
    scheduler.takeover = cache.takeover(scheduler.kv, runner.between)
    balance = _balance(plan, team, model, device)
    balancing = [] if balance is None else [balance, balance.counter]
    return Rank(
        scheduler,
        team,
        runner,
        bell or SharedDoorbell(),
        ready,
        plan.exchange_timeout,
        companions=[*balancing, *_companions(plan, scheduler, cache, team)],
        overlap=_overlap(plan, model, times, exchange, runner, device),
        timeline=timeline,
        preparation=_preparation(scheduler, kv, checkpoint.bytes_read if store is None else store.used // size),
        practice_tokens=_practice_tokens(plan, store is not None),
        forget_former=cache.forget_former,
    )


def _open(plan: Plan, rank: int) -> torch.device:
    """This process's threads and kernels are the plan's from now on, and it has the rank's device."""
    torch.set_num_threads(plan.threads_per_rank)
    limit_isa(min(isa(), Isa[plan.native_kernels.upper()]))
    choose(parse(plan.native_choice), plan.deterministic)
    device = open_device(plan.device, rank, plan.ranks_per_machine)
    check_room(device, plan.rank_bytes, plan.graph_bytes)
    return device


def _preparation(scheduler: Scheduler, kv: CacheMemory, num_bytes: int) -> Iterator[int]:
    yield from kv.prefault(min(num_bytes, PREPARED_BYTES))
    scheduler.grammars.warm()  # a thread works for a while: not in the first moment without work


def _model(plan: Plan, facts: ModelFacts, parallel: Parallel, device: torch.device) -> CausalLM:
    """With uninitialised weights."""
    kernels = plan.mla_prefill, plan.attention_backend, plan.kv_cache_dtype == "fp8"
    model = build(facts, parallel, DTYPES[plan.dtype], device, *kernels)
    model.keep_experts(WeightFormat(plan.expert_format), plan.moe_backend)
    model.keep_linears(WeightFormat(plan.linear_format))
    return model


def _fingerprint(plan: Plan, facts: ModelFacts) -> int:
    """Of what must be equal on all ranks, on all machines, besides the placement."""
    files = {name: (size, digest) for name, (size, _, _, digest) in plan.checkpoint.items()}
    return zlib.crc32(f"{plan.dtype} {facts} {files}".encode())


def _practice_tokens(plan: Plan, stored: bool) -> int:
    """stored: its weights lie in a store."""
    if plan.device == "cpu":
        return STORED_PRACTICE_TOKENS if stored else PRACTICE_TOKENS
    return plan.max_num_batched_tokens


def _ready(
    plan: Plan,
    rank: int,
    network: Network | None,
    scheduler: Scheduler,
    facts: ModelFacts,
    load_seconds: float,
    bytes_read: int,
    store: Store | None,
) -> RankReady:
    return RankReady(
        rank=rank,
        num_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
        max_model_len=scheduler.max_length,
        vocab_size=facts.vocab_size,
        load_seconds=load_seconds,
        bytes_read=bytes_read,
        mapped_bytes=0 if store is None else store.used,
        part=0 if network is None else network.parts[rank],
        reasons=plan.reasons,
    )


def _balance(plan: Plan, team: Team, model: CausalLM, device: torch.device) -> Balance | None:
    if plan.eplb is None or team.placement is None:
        return None
    name = next(iter(plan.served_model_names), "")
    return Balance(team, model, plan.eplb, name, device, threaded=plan.all2all_backend != "mailbox")


def _companions(plan: Plan, scheduler: Scheduler, cache: RankCache, team: Team) -> list[StepCompanion]:
    gate = make_gate(plan, scheduler.speculation, team.rank == 0)
    cadence = [Cadence(scheduler)] if plan.prefill_cadence else []
    return [gate, *cadence, *cache.resumption(scheduler, lambda: team.epoch > 0)]


def _overlap(
    plan: Plan, model: CausalLM, times: ExchangeTimes, exchange: StepState, runner: Runner, device: torch.device
) -> Overlap | None:
    dbo = plan.dbo
    if dbo is None:
        return None

    def measure() -> Measure:
        sizes = plan.max_num_batched_tokens, plan.max_num_seqs, plan.max_model_len, plan.block_size
        return Measure(model, times, exchange, device, *sizes, context_cost(model.config.hidden_size))

    memory = Path(dbo.memory) if dbo.memory else None
    return Overlap(runner, times, dbo.num_ubatches, dbo.decode_tokens, dbo.prefill_tokens, measure, memory)


def _lanes(
    plan: Plan,
    exchange: StepState,
    times: ExchangeTimes,
    vocab_size: int,
    group: Group,
    num_slots: int,
    hidden_size: int,
) -> Sequence[AllToAll]:
    """Those of an epoch. exchange: of all epochs. times: of steps that may be split."""
    exchange.forget()
    name = "auto" if plan.all2all_backend == "local" else plan.all2all_backend  # it began alone, and has grown
    many, few = plan.max_num_batched_tokens, _few_tokens(plan)
    sizes, dtype, rows = (num_slots, hidden_size), DTYPES[plan.dtype], plan.dispatch_rows
    num_lanes = 1 if plan.dbo is None else plan.dbo.num_ubatches
    made = make_lanes(name, group, *sizes, dtype, num_lanes, rows=rows, max_tokens=many, few_tokens=few, state=exchange)
    if plan.vocab_parallel and isinstance(group, ShmGroup):  # one that is alone, until others join, is none
        exchange.vocab = VocabParallel(group, hidden_size, vocab_size, dtype)
    return made if plan.dbo is None else times.timed(made)


def _placement(plan: Plan, facts: ModelFacts, join: bool, network: Network | None) -> Placement:
    """Which experts a rank begins with: an operator's file, or the linear placement, which is what one that joins the
    others gets from them (eplb/repair.py)."""
    ranks, slots = plan.data_parallel_size, plan.slots_per_rank
    machines, parts = ((), (0,) * ranks) if network is None else (network.machines, network.parts)
    stores = parts if plan.weight_store and not plan.store_nodes else ()  # of nodes of memory none knows the others'
    if join or plan.eplb is None or plan.eplb.placement is None:
        return linear_placement(facts.num_moe_layers, facts.num_experts, ranks, slots, machines, stores)
    shape = (facts.num_moe_layers, ranks, slots)
    found = start_placement(plan.eplb.placement, facts.num_experts, shape)
    return replace(found, failure_domains=machines or found.failure_domains, stores=stores)


def _scheduler(plan: Plan, spec: CacheSpec, vocab_size: int, device: torch.device, rows: CacheRows | None) -> Scheduler:
    sizes = planned_sizes(plan, spec)
    blocks = plan.num_kv_blocks, plan.block_size, plan.enable_prefix_caching
    behind = None if rows is None else rows.behind
    return Scheduler(
        cache=CacheManager(*blocks, spec, sizes, num_checkpoints(plan), behind),
        num_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=plan.enable_prefix_caching,
        enable_chunked_prefill=plan.enable_chunked_prefill,
        policy=plan.scheduling_policy,
        async_depth=int(plan.async_scheduling),
        speculation=make_speculation(plan),
        grammars=Grammars(plan.model_path, plan.tokenizer_path, vocab_size),
        processors=LogitsProcessors(plan.logits_processors, vocab_size, device) if plan.logits_processors else None,
        batch_rows=rows,
    )


def _runner(
    plan: Plan,
    model: CausalLM,
    cache: RankCache,
    facts: ModelFacts,
    device: torch.device,
    exchange: StepState,
    timeline: Timeline,
) -> Runner:
    spec, kv = model.cache_spec(), cache.memory
    policy = graph_policy(plan)
    # Drafts are made of tokens that the host has seen.
    readback = make_readback(device, plan.exchange_timeout) if plan.speculation is None else AtOnce()
    limits = Limits(
        plan.max_num_seqs,
        max((plan.max_num_batched_tokens, *policy.piecewise)),
        plan.max_model_len,
        plan.block_size,
        len(token_groups(spec)),
        bool(state_groups(spec)),
        tuple(kv.sizes.blocks_of(group) - 1 for group in token_groups(spec)),
        kv.sizes.num_records - 1,
        _most_drafts(plan),
    )
    cost = context_cost(facts.hidden_size)
    buffers = StepBuffers(limits, device, cost, readback.late, cache.rows, kv.residuals)
    passes = None
    if plan.speculation is not None and plan.speculation.model_drafts:
        graphs = CpuGraphs(exchange.wait_late)

        def make_capture(forward: Forward) -> Capture:
            return Capture(forward, graphs, policy, buffers, exchange, lambda: timeline.on)

        captured = plan.cudagraph_mode != "none" and not plan.cudagraph_capture_sizes
        num_lanes = 1 if plan.dbo is None else plan.dbo.num_ubatches
        passes = MtpPasses(model, kv, buffers, facts.vocab_size, num_lanes, make_capture if captured else None)
    return Runner(
        model,
        kv,
        buffers,
        SamplingTable(plan.max_num_seqs, facts.vocab_size, device),
        plan.logprobs_mode,
        # Ranks that share one thread take turns within a step, so it cannot run on another.
        threaded=plan.async_scheduling and plan.all2all_backend != "mailbox",
        capture=_capture(plan, policy, model, kv, buffers, exchange, timeline),
        exchange=exchange,
        readback=readback,
        passes=passes,
    )


def _capture(
    plan: Plan,
    policy: GraphPolicy,
    model: CausalLM,
    kv: CacheMemory,
    buffers: StepBuffers,
    exchange: StepState,
    timeline: Timeline,
) -> Capture | None:
    """None: all steps run eager."""
    if plan.cudagraph_mode == "none":
        return None

    def forward(step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
        return model.steps(step, kv, lane, breaks)

    if not plan.cudagraph_capture_sizes:  # they do not see what a profile wants to see of the layers
        return Capture(forward, CpuGraphs(exchange.wait_late), policy, buffers, exchange, lambda: timeline.on)
    return Capture(forward, graph_library(kv.device), policy, buffers, exchange)


def _few_tokens(plan: Plan) -> int:
    """Tokens of a rank in a step, up to which the backend for few of them is taken: those of decodes."""
    return min(plan.max_num_seqs, plan.max_num_batched_tokens, FEW_TOKENS)


def graph_policy(plan: Plan) -> GraphPolicy:
    """What the plan wants captured. A rank whose experts are balanced counts their tokens as the layers go."""
    rows, mode = plan.cudagraph_capture_sizes, plan.cudagraph_mode
    num_ubatches, break_exchanges = 1 if plan.dbo is None else plan.dbo.num_ubatches, plan.eplb is not None
    if not rows:
        exact = 0 if mode == "none" else min(plan.max_num_seqs + _most_drafts(plan), MAX_EXACT)
        return GraphPolicy(exact=exact, num_ubatches=num_ubatches, break_exchanges=break_exchanges)
    alone = plan.all2all_backend == "local"
    most = plan.max_num_seqs if alone else _few_tokens(plan)
    return GraphPolicy(
        full=sorted({min(size, most) for size in rows}) if "full" in mode else (),
        piecewise=rows if "piecewise" in mode else (),
        few_tokens=MANY if alone else most,
        num_ubatches=num_ubatches,
        break_exchanges=break_exchanges,
        together=not alone,  # alone: the plan has not asked whether an exchange could be captured
    )


def _most_drafts(plan: Plan) -> int:
    return 0 if plan.speculation is None else plan.speculation.most_drafts(plan.max_num_seqs)


def _no_lanes(num_slots: int, hidden_size: int) -> Sequence[AllToAll]:
    """A model has none before its rank has met the others (Team.form)."""
    return ()


def _no_peers(epoch: int, rank: int, size: int) -> Opening:
    raise ValueError(f"rank {rank} of {size} has no way to meet the others")
