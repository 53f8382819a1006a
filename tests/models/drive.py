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
from cache.spec import CacheSizes, state_groups, token_groups
from dbo.steps import drain, weave
from ep.backends.local import LocalAllToAll
from ep.parallel import Parallel
from ep.protocol import AllToAll
from ep.table import make_lanes
from ep.transport.group import Group, MailboxGroup, MailboxWorld
from eplb.placement import Placement, linear_placement
from layers.step import StateInput, StepInput, TableInput
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
    """A paged cache whose sequences take blocks in shuffled order. free: of each token group. tables: sequence -> of
    each token group its blocks; 0: behind the window, and given back. record: the one of a sequence's state."""

    kv: CacheMemory
    free: list[list[int]]
    tables: dict[int, list[list[int]]] = field(default_factory=dict)
    record: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def for_model(model: CausalLM, num_blocks: int = 64, block_size: int = 4, seed: int = 0) -> Cache:
        spec, shuffle = model.cache_spec(), random.Random(seed)
        free = [list(range(1, num_blocks)) for _ in token_groups(spec)]
        for blocks in free:
            shuffle.shuffle(blocks)
        return Cache(
            CacheMemory.allocate(spec, CacheSizes(block_size, num_blocks, num_blocks, 1 + 2 * MAX_STATES), CPU), free
        )

    def next_record(self, sequence: int) -> tuple[int, int]:
        """What a step reads, and what it writes: every sequence has two in turn."""
        read = self.record.get(sequence, 0)
        first = 1 + 2 * sequence
        self.record[sequence] = written = first + 1 if read == first else first
        return read, written

    def blocks_for(self, sequence: int, first: int, length: int) -> list[list[int]]:
        """Of each token group: for so many tokens, of which those from `first` on are this step's. What is behind
        their windows is given back."""
        size = self.kv.block_size
        tables = self.tables.setdefault(sequence, [[] for _ in self.free])
        for group, free, blocks in zip(token_groups(self.kv.spec), self.free, tables, strict=True):
            gone = max(0, first - group.window + 1) // size if group.window else 0
            for index in range(min(gone, len(blocks))):
                if blocks[index]:
                    free.insert(0, blocks[index])
                blocks[index] = 0
            while len(blocks) * size < length:
                blocks.append(free.pop() if len(blocks) >= gone else 0)
        return tables

    @property
    def num_held(self) -> list[int]:
        """Blocks of each token group that sequences have."""
        return [
            self.kv.sizes.blocks_of(group) - 1 - len(free)
            for group, free in zip(token_groups(self.kv.spec), self.free, strict=True)
        ]


def make_step(
    cache: Cache, work: Sequence[tuple[int, Sequence[int], int]], all_logits: bool = False, num_pad_blocks: int = 0
) -> StepInput:
    """work: (sequence, its token ids of this step, position of the first of them); those with one token must come
    first. Logits are wanted for the last token of each, or for all."""
    block_size = cache.kv.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[list[int]] = [[] for _ in cache.free]
    tables: list[list[list[int]]] = [[] for _ in cache.free]
    starts, kv_lens, rows = [0], [], []
    for sequence, tokens, first in work:
        places = range(first, first + len(tokens))
        positions.extend(places)
        for group, blocks in enumerate(cache.blocks_for(sequence, first, places.stop)):
            slots[group] += [blocks[place // block_size] * block_size + place % block_size for place in places]
            tables[group].append(blocks[: -(-places.stop // block_size)])
        token_ids.extend(tokens)
        starts.append(len(token_ids))
        kv_lens.append(first + len(tokens))
        rows.append(len(token_ids) - 1)
    width = max([len(table) for table in tables[0]], default=0) + num_pad_blocks
    counts = [len(tokens) for _, tokens, _ in work]
    num_decodes = sum(count == 1 for count in counts)
    assert all(count == 1 for count in counts[:num_decodes])
    padded = [[table + [0] * (width - len(table)) for table in group] for group in tables]
    first_table, *more_tables = [
        TableInput(torch.tensor(slot, dtype=torch.int64), torch.tensor(table, dtype=torch.int64).view(len(work), width))
        for slot, table in zip(slots, padded, strict=True)
    ]
    state = None
    if state_groups(cache.kv.spec):
        records = torch.tensor([cache.next_record(sequence) for sequence, _, _ in work], dtype=torch.int64).view(-1, 2)
        state = StateInput(records[:, 0].contiguous(), records[:, 1].contiguous())
    return StepInput(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        slots_T=first_table.slots_T,
        query_starts=tuple(starts),
        kv_lens=tuple(kv_lens),
        kv_lens_B=torch.tensor(kv_lens, dtype=torch.int64),
        block_table_BN=first_table.block_table_BN,
        num_decodes=num_decodes,
        block_size=block_size,
        logits_rows_P=torch.tensor(list(range(len(token_ids))) if all_logits else rows, dtype=torch.int64),
        state=state,
        more_tables=tuple(more_tables),
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
