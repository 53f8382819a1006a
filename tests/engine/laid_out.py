"""Steps made by hand, laid out as the engine lays them out: for tests of what runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import drive
import hf_tiny
import torch

from cache.spec import state_groups
from engine.prepared import Chooser, PreparedStep
from engine.schedule import NewRow, Schedule
from engine.step_buffers import StepBuffers
from engine.step_memory import Limits
from front.params import SamplingParams

Work = Sequence[tuple[int, Sequence[int], int]]  # sequence, tokens, position of the first; one token each comes first


class LaidOut:
    """Sequences of a drive.Cache as rows of step buffers. Decodes that follow the step before count on it."""

    def __init__(
        self,
        cache: drive.Cache,
        max_num_seqs: int,
        max_len: int,
        max_tokens: int = 64,
        scratch: int = 0,
        context_cost: float = 0.0,
    ) -> None:
        self.cache = cache
        num, scratches = len(cache.free), (scratch,) * len(cache.free)
        self._has_state = bool(state_groups(cache.kv.spec))
        sizes = max_num_seqs, max_tokens, max_len, cache.kv.block_size, num
        limits = Limits(*sizes, scratch_blocks=scratches, has_state=self._has_state)
        self.buffers = StepBuffers(limits, drive.CPU, context_cost)
        self.num_advanced = 0
        self._last: PreparedStep | None = None
        self._ends: list[tuple[int, int]] = []  # of the last step: (sequence, its length)

    @property
    def last(self) -> PreparedStep:
        assert self._last is not None
        return self._last

    def fill(self, work: Work, num_ubatches: int = 1, choose: Chooser | None = None) -> PreparedStep:
        last, schedule = self._last, Schedule(0)
        follows = last is not None and all(len(tokens) == 1 for _, tokens, _ in work)
        follows = follows and [(sequence, first) for sequence, _, first in work] == self._ends
        if follows and last is not None and work:
            self.buffers.write_tokens(last, torch.tensor([tokens[0] for _, tokens, _ in work]))
            self.num_advanced += 1
        for sequence, tokens, first in work:
            end = first + len(tokens)
            had = 0 if not follows else -(-first // self.cache.kv.block_size)
            tables = self.cache.blocks_for(sequence, first, end)
            new = [table[had : -(-end // self.cache.kv.block_size)] for table in tables]
            if not follows:
                known = [*[0] * first, *tokens]
                schedule.new_rows.append(NewRow(sequence, sequence, known, end, SamplingParams(), 1, ()))
            if new[0]:
                schedule.new_blocks.append((sequence, new))
            schedule.rows.append(sequence)
            schedule.starts.append(first)
            schedule.counts.append(len(tokens))
            schedule.samples.append(True)
            if self._has_state:
                read, written = self.cache.next_record(sequence)
                schedule.state_reads.append(read)
                schedule.state_writes.append(written)
        self._last = self.buffers.fill(schedule, num_ubatches, choose)
        self._ends = [(sequence, first + len(tokens)) for sequence, tokens, first in work]
        return self._last


@dataclass(frozen=True)
class TwoRankStep:
    """counts: of each rank the number of its sequences that get one more token. new: of each rank the length of a
    prompt that comes besides; 0: none. split: in two parts."""

    counts: tuple[int, int]
    new: tuple[int, int] = (0, 0)
    split: bool = False

    @property
    def tokens(self) -> list[int]:
        return [count + new for count, new in zip(self.counts, self.new, strict=True)]


class Sequences:
    """Those of one rank, as they grow."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lengths: list[int] = []

    def work(self, step: TwoRankStep) -> Work:
        count, new = step.counts[self.rank], step.new[self.rank]
        work = [(b, [(7 * b + 3 * self._lengths[b]) % hf_tiny.VOCAB], self._lengths[b]) for b in range(count)]
        for b in range(count):
            self._lengths[b] += 1
        return [*work, *self.prompts([new] if new else [])]

    def prompts(self, lengths: list[int]) -> Work:
        first = len(self._lengths)
        self._lengths += lengths
        return [
            (first + b, [(5 * b + i + self.rank) % hf_tiny.VOCAB for i in range(n)], 0) for b, n in enumerate(lengths)
        ]
