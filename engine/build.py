"""From a plan to a rank that can step: config, model, weights, cache, and whom it meets."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

import torch

from configs.engine import Plan
from engine.balance import Balance
from engine.balance_start import start_placement
from engine.batch import Batch
from engine.messages import RankReady
from engine.rank import Doorbell, Rank, SharedDoorbell
from engine.runner import Runner
from engine.sampling_table import SamplingTable
from engine.scheduler import Scheduler
from engine.team import Meet, Opening, Team
from ep.experts import WeightFormat
from ep.group import Group
from ep.parallel import Parallel
from ep.protocol import AllToAll
from ep.table import make_lanes
from eplb.placement import Placement, linear_placement
from layers.paged_kv import PagedKV
from layers.weights import Checkpoint
from models.base import CausalLM
from models.facts import ModelFacts
from models.registry import build, read_config
from native import Isa, isa, limit_isa

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_rank(
    plan: Plan,
    rank: int = 0,
    meet: Meet | None = None,
    bell: Doorbell | None = None,
    progress: Callable[[int, int], None] | None = None,
    join: bool = False,
) -> Rank:
    """Read the config, build and load the model, allocate the cache; the ranks of epoch 0 begin to meet before they load.

    meet: opens the groups of an epoch; None: there are no others. progress(bytes_done, bytes_total). join: the others are
    at work already, so a Membership is waited for instead of epoch 0.
    Raises ValueError, one line, for a checkpoint or a plan that cannot run.
    """
    began = time.monotonic()
    torch.set_num_threads(plan.threads_per_rank)
    limit_isa(min(isa(), Isa[plan.native_kernels.upper()]))
    device = torch.device(plan.device)
    facts = read_config(plan.model_path)
    size = plan.data_parallel_size
    placement = _placement(plan, facts, join) if facts.num_moe_layers else None
    parallel = Parallel(rank, size, placement, _no_lanes)
    model = build(facts, parallel, DTYPES[plan.dtype], device, plan.mla_prefill)
    model.keep_experts(WeightFormat(plan.expert_format))
    model.keep_linears(WeightFormat(plan.linear_format))
    fingerprint = zlib.crc32(f"{plan.dtype} {facts}".encode())

    def lanes(group: Group, num_slots: int, hidden_size: int) -> Sequence[AllToAll]:
        return make_lanes("auto", group, num_slots, hidden_size, DTYPES[plan.dtype])

    team = Team(rank, size, placement, model, fingerprint, meet or _nobody, lanes, plan.model_path)
    if not join:
        team.begin(0, (True,) * size)
    checkpoint = Checkpoint(plan.model_path, progress)
    model.load(checkpoint)
    checkpoint.finish()
    scheduler = _scheduler(plan)
    ready = RankReady(
        rank=rank,
        num_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
        max_model_len=scheduler.max_length,
        vocab_size=facts.vocab_size,
        load_seconds=time.monotonic() - began,
        bytes_read=checkpoint.bytes_read,
        reasons=plan.reasons,
    )
    runner = _runner(plan, model, facts.vocab_size, device)
    balance = None
    if plan.eplb is not None and placement is not None:
        name = next(iter(plan.served_model_names), "")
        balance = Balance(team, model, plan.eplb, name, device, threaded=plan.all2all_backend != "mailbox")
    return Rank(scheduler, team, runner, bell or SharedDoorbell(), ready, plan.exchange_timeout, balance=balance)


def _placement(plan: Plan, facts: ModelFacts, join: bool) -> Placement:
    """Which experts a rank begins with: an operator's file, or the linear placement, which is what one that joins the
    others gets from them (eplb/repair.py)."""
    if join or plan.eplb is None or plan.eplb.placement is None:
        return linear_placement(facts.num_moe_layers, facts.num_experts, plan.data_parallel_size, plan.slots_per_rank)
    shape = (facts.num_moe_layers, plan.data_parallel_size, plan.slots_per_rank)
    return start_placement(plan.eplb.placement, facts.num_experts, shape)


def _scheduler(plan: Plan) -> Scheduler:
    return Scheduler(
        num_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=plan.enable_prefix_caching,
        enable_chunked_prefill=plan.enable_chunked_prefill,
        policy=plan.scheduling_policy,
        async_depth=int(plan.async_scheduling),
    )


def _runner(plan: Plan, model: CausalLM, vocab_size: int, device: torch.device) -> Runner:
    return Runner(
        model,
        PagedKV.allocate(model.kv_spec(), plan.num_kv_blocks, plan.block_size, device),
        Batch(plan.max_num_seqs, plan.max_model_len, plan.block_size, device),
        SamplingTable(plan.max_num_seqs, vocab_size, device),
        plan.logprobs_mode,
        # Ranks that share one thread take turns within a step, so it cannot run on another.
        threaded=plan.async_scheduling and plan.all2all_backend != "mailbox",
    )


def _no_lanes(num_slots: int, hidden_size: int) -> Sequence[AllToAll]:
    """A model has none before its rank has met the others (Team.form)."""
    return ()


def _nobody(epoch: int, rank: int, size: int) -> Opening:
    raise ValueError(f"rank {rank} of {size} has no way to meet the others")
