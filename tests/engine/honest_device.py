"""A scheduler under test and a device that is honest about memory: it samples from what its cache slots really hold."""

from __future__ import annotations

import zlib
from collections import deque

from engine.schedule import Schedule
from engine.scheduler import Scheduler
from front.messages import AddRequest, Logprobs, TokenOutput
from front.params import SamplingParams

VOCAB = 24
EOS = 0


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


class Device:
    """Runs schedules in order. A slot holds the token and position last written to it, and by which step and row."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[tuple[int, int, int, int]] = [(-1, -1, -1, -1)] * (num_blocks * block_size)
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.prompt_len: dict[int, int] = {}

    def run(self, schedule: Schedule) -> tuple[list[list[int]], list[list[Logprobs] | None]]:
        for row in schedule.freed_rows:
            self.tokens.pop(row, None)  # after a rollback rows are freed that are free
            self.tables.pop(row, None)
        for new in schedule.new_rows:
            assert new.row not in self.tokens, "a row was given away before it was freed"
            self.tokens[new.row] = list(new.token_ids)
            self.tables[new.row] = []
            self.prompt_len[new.row] = new.prompt_len
        for row, (blocks,) in schedule.new_blocks:
            self.tables[row] += blocks
        sampled: list[list[int]] = []
        prompts: list[list[Logprobs] | None] = []
        for row, start, count, samples in zip(
            schedule.rows, schedule.starts, schedule.counts, schedule.samples, strict=True
        ):
            end = start + count
            tokens = self.tokens[row]
            for position in range(start, end):
                self.slots[self.slot(row, position)] = (tokens[position], position, schedule.step_id, row)
            context = [self.read(row, position, schedule.step_id) for position in range(end)]
            assert samples == (end == len(tokens))
            new = [next_token(context)] if samples else []
            tokens += new
            sampled.append(new)
            ends = min(end, self.prompt_len[row] - 1)
            prompts.append(
                [Logprobs([context[p + 1] if p + 1 < end else tokens[p + 1]], [0.0], 1) for p in range(start, ends)]
            )
        return sampled, prompts

    def slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.block_size] * self.block_size + position % self.block_size

    def read(self, row: int, position: int, step_id: int) -> int:
        token, written_at, step, by_row = self.slots[self.slot(row, position)]
        assert written_at == position
        assert step < step_id or by_row == row, "a block was shared within the step that fills it"
        return token


class Engine:
    """Scheduler and device, with as many steps in flight as the scheduler allows; a step runs as late as possible."""

    def __init__(self, **options: object) -> None:
        defaults = {
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": 64,
        }
        self.scheduler = Scheduler(**{**defaults, **options})  # type: ignore[arg-type]
        self.device = Device(self.scheduler.kv.num_blocks, self.scheduler.kv.block_size)
        self.flying: deque[Schedule] = deque()
        self.schedules: list[Schedule] = []

    def step(self) -> list[TokenOutput]:
        schedule = self.scheduler.schedule()
        check_schedule(schedule, self.scheduler)
        if schedule.rows:
            self.flying.append(schedule)
            self.schedules.append(schedule)
        if self.flying and (not schedule.rows or len(self.flying) > self.scheduler.async_depth):
            return self.land()
        return []

    def land(self) -> list[TokenOutput]:
        schedule = self.flying.popleft()
        tokens, prompts = self.device.run(schedule)
        logprobs = [[Logprobs([t], [0.0], 1) for t in new] for new in tokens]
        return self.scheduler.update(schedule, tokens, logprobs, prompts)  # type: ignore[arg-type]

    def break_down(self, num_run: int) -> None:
        """The first num_run steps in flight reach the device, but their results do not come back; the rest never starts."""
        for schedule in list(self.flying)[:num_run]:
            self.device.run(schedule)
        self.flying.clear()
        self.scheduler.rollback()

    def run(self, bound: int = 1000) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while self.scheduler.has_unfinished or self.flying:
            outputs += self.step()
            bound -= 1
            assert bound, "no end in sight"
        return outputs


def check_schedule(schedule: Schedule, scheduler: Scheduler) -> None:
    rows = schedule.rows
    assert len(set(rows)) == len(rows) <= scheduler.max_num_seqs
    assert all(0 <= row < scheduler.max_num_seqs for row in rows)
    assert schedule.num_tokens <= scheduler.max_num_batched_tokens
    assert all(count > 0 for count in schedule.counts)
    ones = [count == 1 and sampled for count, sampled in zip(schedule.counts, schedule.samples, strict=True)]
    assert ones == sorted(ones, reverse=True), "rows of one token that sample come first"


def message(request_id: int, tokens: list[int], prompt_len: int | None = None, **fields: object) -> AddRequest:
    names = {"priority", "cache_salt", "arrival", "eos_token_ids"}
    request = {name: fields.pop(name) for name in list(fields) if name in names}
    return AddRequest(
        request_id=request_id,
        token_ids=tokens,
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        params=SamplingParams(**fields),  # type: ignore[arg-type]
        seed=0,
        **{"eos_token_ids": (EOS,), **request},  # type: ignore[arg-type]
    )


def expected(add: AddRequest, max_length: int) -> tuple[list[int], str]:
    """Output and finish reason of a sequence that runs alone, with nothing to optimise."""
    tokens, params = list(add.token_ids), add.params
    while True:
        tokens.append(next_token(tokens))
        output = len(tokens) - add.prompt_len
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(add.eos_token_ids))
        if tokens[-1] in stops and output >= params.min_tokens:
            return tokens[len(add.token_ids) :], "stop"
        if output >= (params.max_tokens or 0) or len(tokens) >= max_length:
            return tokens[len(add.token_ids) :], "length"


# ---- single behaviours -----------------------------------------------------------------------------------------------


def prompt(length: int, seed: int = 1) -> list[int]:
    return [1 + (seed * 7 + i * i) % (VOCAB - 1) for i in range(length)]


def collect(outputs: list[TokenOutput]) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for output in outputs:
        result.setdefault(output.request_id, []).extend(output.new_token_ids)
    return result
