"""Step buffers against the slow, obvious construction of a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.manager import GONE
from cache.rows import CacheRows
from engine.prepared import PreparedStep
from engine.schedule import NewRow, Schedule
from engine.step_buffers import StepBuffers
from engine.step_memory import Limits
from front.params import SamplingParams
from layers.step import StepInput

BLOCK = 4
MAX_LEN = 24
MAX_SEQS = 4
LIMITS = Limits(MAX_SEQS, MAX_SEQS * 12, MAX_LEN, BLOCK)


@dataclass
class Sequence:
    """What the obvious construction knows of one row."""

    tokens: list[int]
    prompt_len: int
    asks: bool
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


def new_row(row: int, tokens: list[int], asks: bool = False) -> NewRow:
    params = SamplingParams(prompt_logprobs=0 if asks else None)
    return NewRow(row, row + 100, list(tokens), len(tokens), params, seed=1, eos_token_ids=())


def check(prepared: PreparedStep, schedule: Schedule, rows: dict[int, Sequence]) -> None:
    (step,) = prepared.inputs
    assert prepared.logits_rows_P is step.logits_rows_P
    entries = sorted(range(len(schedule.rows)), key=lambda i: schedule.counts[i] != 1)
    tokens, positions, slots, starts, kv_lens, last = [], [], [], [0], [], {}
    for entry in entries:
        sequence = rows[schedule.rows[entry]]
        start, count = schedule.starts[entry], schedule.counts[entry]
        for position in range(start, start + count):
            tokens.append(sequence.tokens[position])
            positions.append(position)
            slots.append(sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK)
        starts.append(len(tokens))
        kv_lens.append(start + count)
        last[entry] = len(tokens) - 1
    assert step.token_ids_T.tolist() == tokens
    assert step.positions_T.tolist() == positions
    assert step.slots_T.tolist() == slots
    assert step.query_starts == tuple(starts)
    assert step.kv_lens == tuple(kv_lens) == tuple(step.kv_lens_B.tolist())
    assert step.num_decodes == sum(count == 1 for count in schedule.counts)
    assert step.num_tokens == schedule.num_tokens
    for index, entry in enumerate(entries):
        blocks = rows[schedule.rows[entry]].blocks
        width = step.block_table_BN.shape[1]
        assert width * BLOCK >= kv_lens[index]
        assert step.block_table_BN[index].tolist() == (blocks + [0] * width)[:width]
    sampled = [entry for entry in entries if schedule.samples[entry]]
    assert prepared.entries_S == sampled
    assert prepared.rows_S.tolist() == [schedule.rows[entry] for entry in sampled]
    assert prepared.positions_S.tolist() == [schedule.starts[e] + schedule.counts[e] for e in sampled]
    assert step.logits_rows_P[: len(sampled)].tolist() == [last[entry] for entry in sampled]
    wanted = {}
    for entry in entries:
        sequence = rows[schedule.rows[entry]]
        start, count = schedule.starts[entry], schedule.counts[entry]
        targets = [p + 1 for p in range(start, start + count) if p + 1 < sequence.prompt_len]
        if sequence.asks and targets:
            first = last[entry] - count + 1
            wanted[entry] = ([sequence.tokens[t] for t in targets], [first + t - 1 - start for t in targets])
    found = {}
    for part in prepared.prompt_parts:
        logits = step.logits_rows_P[part.first_logit : part.first_logit + len(part.target_ids)]
        found[part.entry] = (part.target_ids, logits.tolist())
    assert found == wanted


def check_parts(whole: PreparedStep, split: PreparedStep, num_ubatches: int) -> None:
    """The parts are the step: the same tokens, and of each part what the whole step has of its tokens."""
    assert len(split.inputs) == num_ubatches and split.num_entries == whole.num_entries
    (step,) = whole.inputs

    def tokens(step: StepInput) -> list[tuple[int, ...]]:
        """Everything that the cache and the mask are made of, token by token."""
        found = []
        for b in range(step.num_sequences):
            first, last = step.query_starts[b], step.query_starts[b + 1]
            assert (last - first == 1) == (b < step.num_decodes) and last > first
            assert step.kv_lens[b] == int(step.kv_lens_B[b]) == int(step.positions_T[last - 1]) + 1
            blocks = step.block_table_BN[b].tolist()
            for t in range(first, last):
                position, slot = int(step.positions_T[t]), int(step.slots_T[t])
                assert slot == blocks[position // BLOCK] * BLOCK + position % BLOCK
                found.append((slot, int(step.token_ids_T[t]), position))
        return found

    parts = [tokens(part) for part in split.inputs]
    assert sorted(token for part in parts for token in part) == sorted(tokens(step))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 2
    behind: dict[int, int] = {}  # block -> the furthest position of it so far: a prompt's parts come in order
    for part in parts:
        for slot, _, position in sorted(part, key=lambda token: token[2]):
            assert behind.get(slot // BLOCK, -1) < position
            behind[slot // BLOCK] = position

    def wanted(prepared: PreparedStep) -> list[tuple[int, ...]]:
        """The tokens whose logits are wanted, in the order of logits_rows_P."""
        all_tokens = [token for step in prepared.inputs for token in tokens(step)]
        return [all_tokens[row] for row in prepared.logits_rows_P.tolist()]

    def sampled(prepared: PreparedStep) -> list[tuple[object, ...]]:
        rows, positions = prepared.rows_S.tolist(), prepared.positions_S.tolist()
        return sorted(zip(prepared.entries_S, rows, positions, wanted(prepared)[: len(rows)], strict=True))

    def asked(prepared: PreparedStep) -> dict[int, tuple[int, list[int], list[tuple[int, ...]]]]:
        found: dict[int, tuple[int, list[int], list[tuple[int, ...]]]] = {}
        rows = wanted(prepared)
        for part in prepared.prompt_parts:
            _, ids, at = found.setdefault(part.entry, (part.num_logprobs, [], []))
            ids += part.target_ids
            at += rows[part.first_logit : part.first_logit + len(part.target_ids)]
        return found

    assert sampled(split) == sampled(whole) and asked(split) == asked(whole)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_the_obvious_construction(data: st.DataObject) -> None:
    buffers = StepBuffers(LIMITS, torch.device("cpu"))
    other = StepBuffers(LIMITS, torch.device("cpu"))  # lays the same steps out in parts
    rows: dict[int, Sequence] = {}
    next_block, next_token = 1, 1
    for step_id in range(data.draw(st.integers(1, 8))):
        schedule = Schedule(step_id)
        for row in [row for row in rows if data.draw(st.integers(0, 4)) == 0]:
            schedule.freed_rows.append(row)
            del rows[row]
        for row in range(MAX_SEQS):
            if row not in rows and data.draw(st.booleans()):
                length = data.draw(st.integers(1, 12))
                rows[row] = Sequence(list(range(next_token, next_token + length)), length, data.draw(st.booleans()))
                next_token += length
                schedule.new_rows.append(new_row(row, rows[row].tokens, rows[row].asks))
        for row in data.draw(st.permutations(sorted(rows))):
            sequence = rows[row]
            left = len(sequence.tokens) - sequence.computed
            if len(sequence.tokens) >= MAX_LEN or data.draw(st.integers(0, 3)) == 0:
                continue
            count = left if left == 1 else data.draw(st.integers(1, left))
            end = sequence.computed + count
            missing = -(-end // BLOCK) - len(sequence.blocks)
            if missing > 0:
                blocks = list(range(next_block, next_block + missing))
                next_block += missing
                sequence.blocks += blocks
                schedule.new_blocks.append((row, [blocks]))
            schedule.rows.append(row)
            schedule.starts.append(sequence.computed)
            schedule.counts.append(count)
            schedule.samples.append(end == len(sequence.tokens))
            sequence.computed = end
        prepared = buffers.fill(schedule)
        check(prepared, schedule, rows)
        num_ubatches = data.draw(st.integers(2, 4))
        split = other.fill(schedule, num_ubatches)
        check_parts(prepared, split, num_ubatches)
        tokens = np.arange(next_token, next_token + prepared.num_sampled, dtype=np.int64)
        next_token += prepared.num_sampled
        buffers.write_tokens(prepared, torch.from_numpy(tokens))
        by_row = dict(zip(prepared.rows_S.tolist(), tokens.tolist(), strict=True))
        other.write_tokens(split, torch.tensor([by_row[row] for row in split.rows_S.tolist()], dtype=torch.int64))
        for row, token in zip(prepared.rows_S.tolist(), tokens.tolist(), strict=True):
            rows[row].tokens.append(token)
        for row, sequence in rows.items():
            assert buffers.rows.token_ids[row, : buffers.rows.known[row]].tolist() == sequence.tokens


def test_a_step_without_work_has_zero_tokens() -> None:
    buffers = StepBuffers(LIMITS, torch.device("cpu"))
    (step,) = buffers.fill(Schedule(0)).inputs
    assert step.num_tokens == 0 and step.num_sequences == 0 and step.num_decodes == 0
    assert step.token_ids_T.shape == (0,) and step.logits_rows_P.shape == (0,)
    assert step.block_table_BN.shape[0] == 0
    assert step.token_ids_T.dtype == step.block_table_BN.dtype == torch.int64


def test_a_full_sequence_still_notes_its_last_token() -> None:
    buffers = StepBuffers(LIMITS, torch.device("cpu"))
    schedule = Schedule(0, new_rows=[new_row(0, list(range(MAX_LEN)))], new_blocks=[(0, [list(range(6))])])
    schedule.rows, schedule.starts, schedule.counts, schedule.samples = [0], [0], [MAX_LEN], [True]
    buffers.write_tokens(buffers.fill(schedule), torch.tensor([7]))
    assert buffers.rows.token_ids[0, MAX_LEN] == 7


def test_256_decodes_are_laid_out_fast() -> None:
    """A guard against per-row Python; the usual figure is 0.1 ms."""
    num = 256
    buffers = StepBuffers(Limits(num, num, 512, 16), torch.device("cpu"))
    schedule = Schedule(0)
    for row in range(num):
        schedule.new_rows.append(new_row(row, [1] * 64))
        schedule.new_blocks.append((row, [[row * 4 + i for i in range(5)]]))
    buffers.fill(schedule)
    decode = Schedule(1, rows=list(range(num)), starts=[63] * num, counts=[1] * num, samples=[True] * num)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        prepared = buffers.fill(decode)
        buffers.write_tokens(prepared, torch.zeros(num, dtype=torch.int64))
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 1e-3
    print(f"{min(seconds) * 1e6:.0f} us")


def test_a_block_behind_a_window_is_zero_in_its_table() -> None:
    """Of two token groups; the second has given its first block back before the row is stated anew."""
    buffers = StepBuffers(LIMITS._replace(num_tables=2), torch.device("cpu"))
    schedule = Schedule(0, new_rows=[new_row(1, list(range(10)))], new_blocks=[(1, [[5, 6, 7], [GONE, 3, 4]])])
    schedule.rows, schedule.starts, schedule.counts, schedule.samples = [1], [8], [2], [True]
    (step,) = buffers.fill(schedule).inputs
    (windowed,) = step.more_tables
    assert step.block_table_BN.tolist() == [[5, 6, 7]] and windowed.block_table_BN.tolist() == [[0, 3, 4]]
    assert step.slots_T.tolist() == [7 * BLOCK, 7 * BLOCK + 1]
    assert windowed.slots_T.tolist() == step.of_group(1).slots_T.tolist() == [4 * BLOCK, 4 * BLOCK + 1]


def test_a_row_in_two_parts_is_computed_as_far_as_before_the_first() -> None:
    rows = CacheRows.own(MAX_SEQS, MAX_LEN // BLOCK, 1)
    buffers = StepBuffers(LIMITS, torch.device("cpu"), rows=rows)
    schedule = Schedule(0, new_rows=[new_row(2, list(range(12)))], new_blocks=[(2, [[5, 6, 7]])])
    schedule.rows, schedule.starts, schedule.counts, schedule.samples = [2], [4], [8], [True]
    prepared = buffers.fill(schedule, num_ubatches=2)
    assert [step.kv_lens for step in prepared.inputs] == [(8,), (12,)]
    assert rows.computed.tolist() == [0, 0, 4, 0]
