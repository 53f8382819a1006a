"""Plans, ranks and jobs that the tests of batch, runner, rank and wire share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from msgspec import Struct, field

from configs.engine import Plan
from dbo.steps import drain, weave
from engine.build import build_rank
from engine.doorbell import SharedDoorbell
from engine.rank import Rank
from engine.team import Groups, Meet, Opened, Opening
from ep.transport.group import MailboxGroup, MailboxWorld
from front.messages import Abort, AddRequest, TokenOutput
from front.params import SamplingParams
from models.registry import read_config

DEFAULTS: dict[str, Any] = {
    "served_model_names": ("test",),
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 4,
    "num_kv_blocks": 64,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "scheduling_policy": "fcfs",
    "async_scheduling": False,
    "data_parallel_size": 1,
    "all2all_backend": "local",
    "threads_per_rank": 1,
    "mla_prefill": "auto",
    "logprobs_mode": "raw_logprobs",
    "max_logprobs": 20,
    "exchange_timeout": 10.0,
    "cudagraph_mode": "full_decode_only",
}


def make_plan(path: Path, **overrides: Any) -> Plan:
    facts = read_config(path)
    values = {**DEFAULTS, **overrides}
    if values["device"] == "cuda":  # without sizes it is a CPU's
        values["cudagraph_mode"] = overrides.get("cudagraph_mode", "none")
    slots = -(-facts.num_experts // values["data_parallel_size"]) if facts.num_experts else 0
    values.setdefault("slots_per_rank", slots)
    values.setdefault("num_experts", facts.num_experts)
    return Plan(model_path=str(path), architecture=facts.architecture, **values)


def mailbox_ranks(path: Path, size: int, **overrides: Any) -> list[Rank]:
    """`size` ranks that take turns in one thread."""
    plan = make_plan(path, data_parallel_size=size, all2all_backend="mailbox", **overrides)
    worlds, bell = dict[int, MailboxWorld](), SharedDoorbell()
    return [build_rank(plan, rank, meet_in(worlds), bell) for rank in range(size)]


def meet_in(worlds: dict[int, MailboxWorld]) -> Meet:
    """Ranks of one thread meet in the world of their epoch; whoever comes first makes it."""

    def meet(epoch: int, rank: int, size: int) -> Opening:
        group = MailboxGroup(worlds.setdefault(epoch, MailboxWorld(size)), rank)
        return Opened(Groups(group, group))

    return meet


class Job(Struct):
    """A request that comes before step `arrive`, and is perhaps aborted before step `abort`."""

    prompt: list[int]
    max_tokens: int
    arrive: int = 0
    abort: int | None = None
    params: dict[str, Any] = field(default_factory=dict)

    def message(self, request_id: int) -> AddRequest:
        params = SamplingParams(**{"max_tokens": self.max_tokens, "temperature": 0.0, **self.params})
        return AddRequest(
            request_id=request_id,
            token_ids=self.prompt,
            prompt_len=len(self.prompt),
            params=params,
            seed=request_id,
            arrival=float(request_id),
        )


class Got(Struct):
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    outputs: list[TokenOutput] = field(default_factory=list)


def drive(ranks: Sequence[Rank], jobs: Sequence[Job], max_steps: int = 2000) -> list[Got]:
    """Job i goes to rank i mod n. Runs until all ranks sleep."""
    got = [Got() for _ in jobs]
    for step in range(max_steps):
        for index, job in enumerate(jobs):
            rank = ranks[index % len(ranks)]
            if job.arrive == step:
                rank.submit(job.message(index))
            if job.abort == step and job.abort >= job.arrive:
                rank.submit(Abort([index]))
        for outputs in drain(weave(*(rank.steps() for rank in ranks))):
            for output in outputs:
                assert got[output.request_id].finish_reason is None, "output after the last one"
                got[output.request_id].tokens += output.new_token_ids
                got[output.request_id].finish_reason = output.finish_reason
                got[output.request_id].outputs.append(output)
        last = max((max(job.arrive, job.abort or 0) for job in jobs), default=0)
        if step >= last and all(rank.idle and not rank.has_work for rank in ranks):
            return got
    raise AssertionError(f"not done after {max_steps} steps")


def engine_choices(fewest_blocks: int) -> st.SearchStrategy[dict[str, Any]]:
    """Of a plan: prompts are cut, requests preempted, prefixes found, steps scheduled beside others, or not."""
    return st.fixed_dictionaries(
        {
            "num_kv_blocks": st.integers(fewest_blocks, 30),
            "max_num_seqs": st.integers(1, 5),
            "max_num_batched_tokens": st.sampled_from([3, 7, 16, 64]),
            "enable_prefix_caching": st.booleans(),
            "async_scheduling": st.booleans(),
        }
    )


def check_any(
    path: Path, jobs: Sequence[Job], arrivals: Sequence[int], expected: dict[int, list[int]], size: int, **plan: Any
) -> None:
    """Jobs that come at any time to ranks of such a plan get these tokens, and no block of the cache is lost."""
    jobs = [Job(job.prompt, job.max_tokens, at, params=job.params) for job, at in zip(jobs, arrivals, strict=True)]
    ranks = [build_rank(make_plan(path, **plan))] if size == 1 else mailbox_ranks(path, size, **plan)
    assert {index: got.tokens for index, got in enumerate(drive(ranks, jobs))} == expected
    for rank in ranks:
        rank._scheduler.kv.check([])
        rank.close()
