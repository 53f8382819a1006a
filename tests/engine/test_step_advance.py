"""Decode steps that are laid out by counting on, against steps that are laid out in full."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prepared import GraphSize, PreparedStep
from engine.schedule import NewRow, Schedule
from engine.step_buffers import StepBuffers
from engine.step_memory import Limits
from front.params import SamplingParams
from layers.step import StepInput

BLOCK = 4
MAX_LEN = 40
MAX_SEQS = 3
SCRATCH = 999
CPU = torch.device("cpu")
LIMITS = Limits(MAX_SEQS + 1, 64, MAX_LEN, BLOCK, scratch_blocks=(SCRATCH,))
GROUPS = LIMITS._replace(num_tables=2, has_state=True, scratch_blocks=(SCRATCH, SCRATCH))


def new_row(row: int, tokens: list[int]) -> NewRow:
    return NewRow(row, row, list(tokens), len(tokens), SamplingParams(), seed=1, eos_token_ids=())


def padded(counts: list[int], decodes: list[bool]) -> list[GraphSize | None]:
    """As if there were graphs of 2 and of 4 rows."""
    return [GraphSize(True, 2 if counts[0] <= 2 else 4) if decodes[0] else None]


class Twins:
    """Two buffers that see the same steps; of the second all rows are stated anew in each, so that it never counts
    on."""

    def __init__(self, limits: Limits = LIMITS, on_device: bool = False, pads: bool = False, ahead: int = 0) -> None:
        """ahead: blocks that come before there are tokens for them."""
        self.limits = limits
        self.ahead = ahead
        self.buffers = StepBuffers(limits, CPU, on_device=on_device)
        self.plain = StepBuffers(limits, CPU)
        self.choose = padded if pads else None
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, int] = {}
        self.num_steps = 0
        self.num_counted = 0
        self.last: PreparedStep | None = None

    def new_blocks(self, row: int, first: int) -> list[list[int]]:
        """Of each table from the first-th on."""
        numbers = range(first, self.blocks[row])
        tables = [[100 * row + n + 1 for n in numbers], [50 + 100 * row + n for n in numbers]]
        return tables[: self.limits.num_tables]

    def step(self, rows: list[int], new: list[NewRow], freed: list[int]) -> PreparedStep:
        schedule, again = (Schedule(self.num_steps, freed_rows=list(freed)) for _ in range(2))
        schedule.new_rows = new
        self.num_steps += 1
        for row in freed:
            del self.tokens[row], self.blocks[row]
        for item in new:
            self.tokens[item.row], self.blocks[item.row] = list(item.token_ids), 0
        fresh = {item.row for item in new}
        for row in sorted(rows, key=lambda row: row in fresh):
            length, had = len(self.tokens[row]), self.blocks[row]
            self.blocks[row] = max(had, -(-length // BLOCK) + self.ahead)
            if self.blocks[row] > had:
                schedule.new_blocks.append((row, self.new_blocks(row, had)))
            again.new_rows.append(new_row(row, self.tokens[row]))
            again.new_blocks.append((row, self.new_blocks(row, 0)))
            for lists in (schedule, again):
                lists.rows.append(row)
                lists.starts.append(0 if row in fresh else length - 1)
                lists.counts.append(length - lists.starts[-1])
                lists.samples.append(True)
                if self.limits.has_state:
                    lists.state_reads.append(7 * row + self.num_steps % 3)
                    lists.state_writes.append(7 * row + (self.num_steps + 1) % 3)
        prepared, full = self.buffers.fill(schedule, choose=self.choose), self.plain.fill(again)
        self.num_counted += self.last is not None and prepared.entries_S is self.last.entries_S
        same(prepared, full)
        tokens = torch.arange(len(rows)) + 10 * self.num_steps
        self.buffers.write_tokens(prepared, tokens)
        for row, token in zip(prepared.rows_S.tolist(), tokens.tolist(), strict=True):
            self.tokens[row].append(token)
        self.last = prepared
        return prepared

    def same_tables(self) -> None:
        known = self.buffers.rows.known.tolist()
        assert known == [len(self.tokens.get(row, ())) for row in range(MAX_SEQS + 1)]
        for row, tokens in self.tokens.items():
            assert self.buffers.rows.token_ids[row, : known[row]].tolist() == tokens


def same(prepared: PreparedStep, full: PreparedStep) -> None:
    (step,), (other,) = prepared.inputs, full.inputs
    for mine, theirs in zip(tensors(step), tensors(other), strict=True):
        assert mine.dtype is theirs.dtype and mine.stride(-1) == 1
    for name in ("token_ids_T", "positions_T", "slots_T", "kv_lens_B", "logits_rows_P"):
        assert getattr(step, name).tolist() == getattr(other, name).tolist(), name
    assert [x.tolist() for x in tensors(step)] == [x.tolist() for x in tensors(other)]
    for name in ("query_starts", "kv_lens", "num_decodes", "block_size"):
        assert getattr(step, name) == getattr(other, name), name
    assert prepared.num_entries == full.num_entries and prepared.entries_S == full.entries_S
    assert prepared.rows_S.tolist() == full.rows_S.tolist()
    assert prepared.positions_S.tolist() == full.positions_S.tolist()
    assert prepared.prompt_parts == full.prompt_parts == ()
    assert prepared.samples_all == full.samples_all


def tensors(step: StepInput) -> list[torch.Tensor]:
    state = [] if step.state is None else [step.state.reads_B, step.state.writes_B]
    return [step.block_table_BN, *(x for table in step.more_tables for x in table), *state]


@pytest.mark.parametrize("limits", [LIMITS, GROUPS], ids=["one table", "two tables and a state"])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("pads", [False, True])
@given(data=st.data(), ahead=st.integers(0, 2))
@settings(max_examples=20, deadline=None)
def test_counting_on_gives_the_same_steps(
    limits: Limits, on_device: bool, pads: bool, data: st.DataObject, ahead: int
) -> None:
    twins = Twins(limits, on_device, pads, ahead)
    twins.step([0, 1], [new_row(0, [1, 2, 3]), new_row(1, [4])], [])
    for _ in range(data.draw(st.integers(1, 25))):
        rows = sorted(twins.tokens)
        event = data.draw(st.sampled_from(["none"] * 6 + ["skip", "come", "go", "return"]))
        new: list[NewRow] = []
        freed: list[int] = []
        if event == "skip" and len(rows) > 1:
            rows = rows[1:]
        elif event == "come" and len(rows) < MAX_SEQS:
            row = next(row for row in range(MAX_SEQS) if row not in rows)
            new = [new_row(row, list(range(50, 50 + data.draw(st.integers(1, 6)))))]
            rows.append(row)
        elif event == "go" and len(rows) > 1:
            freed = [rows.pop(0)]
        elif event == "return" and rows:  # freed and taken again in one step
            freed, new = [rows[0]], [new_row(rows[0], [7, 8])]
        if max(map(len, twins.tokens.values())) >= MAX_LEN - 2 * BLOCK:
            break
        twins.step(rows, new, freed)
    if not on_device:
        twins.same_tables()


@pytest.mark.parametrize("limits", [LIMITS, GROUPS], ids=["one table", "two tables and a state"])
def test_most_steps_are_counted(limits: Limits) -> None:
    """All but the prompt and the first decode, also those that come to another block."""
    twins = Twins(limits)
    twins.step([0], [new_row(0, [1, 2, 3])], [])
    for _ in range(24):
        twins.step([0], [], [])
    assert twins.num_counted == 23
    twins.same_tables()


@pytest.mark.parametrize("pads", [False, True])
def test_steps_of_one_size_lie_in_the_same_place(pads: bool) -> None:
    """However they are laid out, and whatever was laid out between them: graphs read them there."""
    twins = Twins(GROUPS, pads=pads)
    twins.step([0, 1], [new_row(0, [1, 2, 3]), new_row(1, [4])], [])
    places = set()
    for freed, new in (([], []), ([], []), ([], [new_row(2, [5, 6, 7])]), ([2], []), ([], [])):
        rows = [0, 1, *(item.row for item in new)]
        (step,) = twins.step(rows, new, freed).inputs
        if not new:
            whole = [step.token_ids_T, step.positions_T, step.slots_T, step.kv_lens_B, *tensors(step)]
            places.add(tuple(x.data_ptr() for x in whole))
    assert len(places) == 1


def test_rows_of_padding_see_the_scratch_block_only() -> None:
    twins = Twins(pads=True)
    for row in range(3):
        twins.step([*range(row + 1)], [new_row(row, [1, 2])], [])
    (step,) = twins.step([0, 1, 2], [], []).inputs  # padded to 4
    memory = twins.buffers.lane(0)
    behind = [x.as_strided((4,), (1,))[3].item() for x in (step.positions_T, step.slots_T, step.kv_lens_B)]
    assert behind == [0, SCRATCH * BLOCK, 1] and memory.tables[0][3, 0] == SCRATCH


def test_a_step_whose_tokens_never_came_is_not_counted_on() -> None:
    """It failed, and the same rows are computed again."""
    buffers = StepBuffers(Limits(1, MAX_LEN, MAX_LEN, 16), CPU)
    schedule = Schedule(0, new_rows=[new_row(0, [1, 2, 3])], new_blocks=[(0, [[5]])])
    schedule.rows, schedule.starts, schedule.counts, schedule.samples = [0], [0], [3], [True]
    buffers.write_tokens(buffers.fill(schedule), torch.tensor([7]))
    decode = Schedule(1, rows=[0], starts=[3], counts=[1], samples=[True])
    buffers.fill(decode)
    (again,) = buffers.fill(decode).inputs
    assert again.token_ids_T.tolist() == [7] and again.positions_T.tolist() == [3] and again.slots_T.tolist() == [83]
    buffers.write_tokens(buffers.fill(decode), torch.tensor([8]))
    (following,) = buffers.fill(Schedule(2, rows=[0], starts=[4], counts=[1], samples=[True])).inputs
    assert following.token_ids_T.tolist() == [8] and following.positions_T.tolist() == [4]
    buffers.fill(Schedule(3, rows=[0], starts=[4], counts=[1], samples=[True]))
    assert buffers.rows.known.tolist() == [5] and buffers.rows.token_ids[0, :5].tolist() == [1, 2, 3, 7, 8]
