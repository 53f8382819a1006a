"""Drives our models without an engine: steps made by hand over a plain paged cache. Does not import transformers.

Legend: T tokens, V vocabulary, P rows sampled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache.memory import CacheMemory
from cache.spec import CacheSizes, state_groups
from dbo.steps import drain, weave
from ep.backends.local import LocalAllToAll
from ep.parallel import Parallel
from ep.protocol import AllToAll
from ep.table import make_lanes
from ep.transport.group import Group, MailboxGroup, MailboxWorld
from eplb.placement import Placement, linear_placement
from layers.step import StateInput, StepInput
from layers.weights import Checkpoint
from models.base import CausalLM
from models.registry import build, read_config

CPU = torch.device("cpu")
MAX_STATES = 8  # sequences of a model with states


def single_rank(path: Path) -> Parallel:
    """One rank that hosts every expert of the checkpoint at `path`."""
    facts = read_config(path)
    placement: Placement | None = None
    if facts.num_experts:
        placement = linear_placement(facts.num_moe_layers, facts.num_experts, 1)
    return Parallel(0, 1, placement, lambda num_slots, _hidden_size: [LocalAllToAll(num_slots)])


def parallel_of(path: Path, group: Group, backend: str, slots_per_rank: int | None = None) -> Parallel:
    """The place of `group`'s rank among ranks that share the experts of the checkpoint at `path`."""
    facts = read_config(path)
    placement = linear_placement(facts.num_moe_layers, facts.num_experts, group.size, slots_per_rank)

    def lanes(num_slots: int, hidden_size: int) -> Sequence[AllToAll]:
        return make_lanes(backend, group, num_slots, hidden_size, torch.float32, num_lanes=2)

    return Parallel(group.rank, group.size, placement, lanes)


def load_ours(
    path: Path, parallel: Parallel | None = None, dtype: torch.dtype = torch.float32, **choices: Any
) -> CausalLM:
    """Build our model from a checkpoint directory and load it, every key accounted for."""
    model = build(read_config(path), parallel or single_rank(path), dtype, CPU, **choices)
    checkpoint = Checkpoint(path, names=read_config(path).key_names)
    with torch.inference_mode():
        model.load(checkpoint)
    checkpoint.finish()
    return model


def mailbox_models(path: Path, size: int, slots_per_rank: int | None = None) -> list[CausalLM]:
    """Our model on each of `size` ranks in this process."""
    world = MailboxWorld(size)
    groups = [MailboxGroup(world, rank) for rank in range(size)]
    return [load_ours(path, parallel_of(path, group, "mailbox", slots_per_rank)) for group in groups]


def prompts_of(rank: int, vocab_size: int) -> list[list[int]]:
    """Each rank has its own number of sequences, of its own lengths; rank 2 has none."""
    generator = torch.Generator().manual_seed(rank)
    lengths = {0: [5, 1, 33], 1: [70], 2: [], 3: [2, 8]}[rank]
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


@dataclass
class Cache:
    """A paged cache whose sequences take blocks in shuffled order. table: sequence -> its blocks; record: the one of its
    state."""

    kv: CacheMemory
    record: dict[int, int] = field(default_factory=dict)
    table: dict[int, list[int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)

    @staticmethod
    def for_model(model: CausalLM, num_blocks: int = 64, block_size: int = 4, seed: int = 0) -> Cache:
        free = list(range(1, num_blocks))
        random.Random(seed).shuffle(free)
        sizes = CacheSizes(block_size, num_blocks, num_records=1 + 2 * MAX_STATES)
        return Cache(CacheMemory.allocate(model.cache_spec(), sizes, CPU), free=free)

    def next_record(self, sequence: int) -> tuple[int, int]:
        """What a step reads, and what it writes: every sequence has two in turn."""
        read = self.record.get(sequence, 0)
        first = 1 + 2 * sequence
        self.record[sequence] = written = first + 1 if read == first else first
        return read, written

    def blocks_for(self, sequence: int, length: int) -> list[int]:
        blocks = self.table.setdefault(sequence, [])
        while len(blocks) * self.kv.block_size < length:
            blocks.append(self.free.pop())
        return blocks


def make_step(
    cache: Cache, work: Sequence[tuple[int, Sequence[int], int]], all_logits: bool = False, num_pad_blocks: int = 0
) -> StepInput:
    """work: (sequence, its token ids of this step, position of the first of them); those with one token must come
    first. Logits are wanted for the last token of each, or for all."""
    block_size = cache.kv.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, kv_lens, tables, rows = [0], [], [], []
    for sequence, tokens, first in work:
        blocks = cache.blocks_for(sequence, first + len(tokens))
        for position in range(first, first + len(tokens)):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
        token_ids.extend(tokens)
        starts.append(len(token_ids))
        kv_lens.append(first + len(tokens))
        tables.append(blocks[: -(-(first + len(tokens)) // block_size)])
        rows.append(len(token_ids) - 1)
    width = max([len(table) for table in tables], default=0) + num_pad_blocks
    counts = [len(tokens) for _, tokens, _ in work]
    num_decodes = sum(count == 1 for count in counts)
    assert all(count == 1 for count in counts[:num_decodes])
    padded = [table + [0] * (width - len(table)) for table in tables]
    state = None
    if state_groups(cache.kv.spec):
        records = torch.tensor([cache.next_record(sequence) for sequence, _, _ in work], dtype=torch.int64).view(-1, 2)
        state = StateInput(records[:, 0].contiguous(), records[:, 1].contiguous())
    return StepInput(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        slots_T=torch.tensor(slots, dtype=torch.int64),
        query_starts=tuple(starts),
        kv_lens=tuple(kv_lens),
        kv_lens_B=torch.tensor(kv_lens, dtype=torch.int64),
        block_table_BN=torch.tensor(padded, dtype=torch.int64).view(len(work), width),
        num_decodes=num_decodes,
        block_size=block_size,
        logits_rows_P=torch.tensor(list(range(len(token_ids))) if all_logits else rows, dtype=torch.int64),
        state=state,
    )


def run_step(model: CausalLM, step: StepInput, cache: Cache) -> Tensor:
    """Logits of step.logits_rows_P: float32 [P, V]."""
    with torch.inference_mode():
        hidden = drain(model.steps(step, cache.kv))
        return model.logits(hidden[step.logits_rows_P]).float()


def chunked_logits(model: CausalLM, tokens: Sequence[int], chunks: Sequence[int], **cache: Any) -> Tensor:
    """Logits of every token of one sequence that is computed in pieces of the given sizes: float32 [T, V]."""
    assert sum(chunks) == len(tokens)
    paged = Cache.for_model(model, **cache)
    parts, first = [], 0
    for size in chunks:
        parts.append(run_step(model, make_step(paged, [(0, tokens[first : first + size], first)], True), paged))
        first += size
    return torch.cat(parts)


def generate_greedy(model: CausalLM, prompts: Sequence[Sequence[int]], count: int, **cache: Any) -> list[list[int]]:
    """The next `count` tokens of each prompt: one prefill step of all, then decode steps of all."""
    return generate_on_ranks([model], [prompts], count, **cache)[0]


def generate_on_ranks(
    models: Sequence[CausalLM], prompts: Sequence[Sequence[Sequence[int]]], count: int, **cache: Any
) -> list[list[list[int]]]:
    """generate_greedy of several ranks in this process, each with prompts of its own (none is fine), step by step
    together: their forward passes are woven."""
    ranks = [Sequences(model, own, **cache) for model, own in zip(models, prompts, strict=True)]
    for _ in range(count):
        steps = [rank.step() for rank in ranks]
        with torch.inference_mode():
            passes = [rank.model.steps(step, rank.cache.kv) for rank, step in zip(ranks, steps, strict=True)]
            for rank, step, hidden in zip(ranks, steps, drain(weave(*passes)), strict=True):
                rank.append(rank.model.logits(hidden[step.logits_rows_P]).argmax(-1).tolist())
    return [rank.generated() for rank in ranks]


class Sequences:
    """The sequences of one rank, all in step: the prompts first, then one token each at a time."""

    def __init__(self, model: CausalLM, prompts: Sequence[Sequence[int]], **cache: Any) -> None:
        self.model = model
        self.cache = Cache.for_model(model, **cache)
        self.prompts = prompts
        self.order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) > 1)
        self.tokens = [list(prompt) for prompt in prompts]

    def step(self) -> StepInput:
        done = len(self.tokens[0]) - len(self.prompts[0]) if self.tokens else 0
        first = {i: len(self.tokens[i]) - 1 if done else 0 for i in self.order}
        return make_step(self.cache, [(i, self.tokens[i][first[i] :], first[i]) for i in self.order])

    def append(self, chosen: Sequence[int]) -> None:
        for i, token in zip(self.order, chosen, strict=True):
            self.tokens[i].append(token)

    def generated(self) -> list[list[int]]:
        return [self.tokens[i][len(prompt) :] for i, prompt in enumerate(self.prompts)]


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((ours - reference).abs().max() / reference.abs().max())
