"""The scheduler with a device that is honest about memory: it samples from what its cache slots really hold."""

from __future__ import annotations

import zlib
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.messages import AddRequest, Logprobs, SamplingParams, TokenOutput
from engine.schedule import Schedule
from engine.scheduler import Scheduler

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
        for row, blocks in schedule.new_blocks:
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


@pytest.mark.parametrize("async_depth", [0, 1])
def test_prompt_is_cut_at_the_budget_and_decodes_keep_going(async_depth: int) -> None:
    engine = Engine(max_num_batched_tokens=8, async_depth=async_depth)
    engine.scheduler.add(message(1, prompt(3), ignore_eos=True, max_tokens=12))
    engine.step()
    engine.scheduler.add(message(2, prompt(20, seed=2), ignore_eos=True, max_tokens=2))
    engine.run()
    second, third = engine.schedules[1], engine.schedules[2]
    assert second.rows == [0, 1] and second.counts == [1, 7] and second.samples == [True, False]
    assert third.starts == [4, 7] and third.counts == [1, 7] and not third.new_rows


def test_whole_prompts_only_when_chunked_prefill_is_off() -> None:
    engine = Engine(max_num_batched_tokens=64, enable_chunked_prefill=False)
    for i in range(3):
        engine.scheduler.add(message(i, prompt(30, seed=i), ignore_eos=True, max_tokens=2))
    engine.run()
    assert [schedule.counts for schedule in engine.schedules][:2] == [[30, 30], [1, 1, 30]]
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(63\) must be at least max_model_len \(64\)"):
        Engine(max_num_batched_tokens=63, enable_chunked_prefill=False)


def test_prefix_is_reused_across_requests_and_salts_are_kept_apart() -> None:
    engine = Engine()
    shared = prompt(17)
    outputs = []
    for i, salt in enumerate(["", "", "other"]):
        engine.scheduler.add(message(i, shared, max_tokens=1, cache_salt=salt))
        outputs += engine.run()
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 0]
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (51, 16, 51)
    engine.scheduler.reset_prefix_cache()
    engine.scheduler.add(message(9, shared, max_tokens=1))
    assert engine.run()[0].num_cached_tokens == 0


def test_one_token_is_computed_even_when_the_whole_prompt_is_cached() -> None:
    engine = Engine()
    for i in range(2):
        engine.scheduler.add(message(i, prompt(16), max_tokens=1))
        output = engine.run()[0]
    assert output.num_cached_tokens == 12


@pytest.mark.parametrize("async_depth", [0, 1])
def test_latest_arrival_is_preempted_and_comes_back_with_its_tokens(async_depth: int) -> None:
    engine = Engine(num_blocks=8, async_depth=async_depth, enable_prefix_caching=False)
    adds = [message(i, prompt(8, seed=i), ignore_eos=True, max_tokens=20) for i in range(3)]
    for add in adds:
        engine.scheduler.add(add)
    outputs = engine.run()
    assert engine.scheduler.stats().preemptions >= 2
    assert collect(outputs) == {add.request_id: expected(add, 64)[0] for add in adds}
    finished = [output.request_id for output in outputs if output.finish_reason]
    assert finished == [0, 1, 2]
    again = [new for schedule in engine.schedules for new in schedule.new_rows if new.request_id == 1][-1]
    assert len(again.token_ids) > again.prompt_len == 8


def test_priority_decides_who_is_admitted_and_who_is_preempted() -> None:
    engine = Engine(num_blocks=6, max_num_seqs=2, policy="priority")
    for i, priority in enumerate([5, 5, 0]):
        engine.scheduler.add(message(i, prompt(8, seed=i), ignore_eos=True, max_tokens=12, priority=priority))
    finished = [output.request_id for output in engine.run() if output.finish_reason]
    assert finished == [2, 0, 1]
    fifo = Engine(num_blocks=6, max_num_seqs=2)
    for i, priority in enumerate([5, 5, 0]):
        fifo.scheduler.add(message(i, prompt(8, seed=i), ignore_eos=True, max_tokens=12, priority=priority))
    assert [output.request_id for output in fifo.run() if output.finish_reason] == [0, 1, 2]


@pytest.mark.parametrize("async_depth", [0, 1])
def test_urgent_prompt_takes_blocks_from_a_decode_already_in_the_step(async_depth: int) -> None:
    engine = Engine(num_blocks=5, max_num_batched_tokens=8, policy="priority", async_depth=async_depth)
    low = message(1, prompt(3), ignore_eos=True, max_tokens=10, priority=9)
    high = message(2, prompt(16, seed=3), ignore_eos=True, max_tokens=5, priority=0)
    engine.scheduler.add(low)
    outputs = engine.step()
    engine.scheduler.add(high)
    outputs += engine.run()
    third = engine.schedules[2]
    assert third.rows == [1] and third.starts == [7] and third.counts == [7]
    assert [row for row, _ in third.new_blocks] == [1]
    assert engine.scheduler.stats().preemptions == 1
    assert collect(outputs) == {1: expected(low, 64)[0], 2: expected(high, 64)[0]}


@pytest.mark.parametrize(
    ("length", "options"), [(64, {}), (200, {}), (33, {"num_blocks": 8}), (0, {}), (8, {"max_model_len": 8})]
)
def test_prompt_that_can_never_fit_is_refused(length: int, options: dict[str, int]) -> None:
    engine = Engine(**options)
    output = engine.scheduler.add(message(1, prompt(length)))
    assert output == TokenOutput(1, [], "error")
    assert not engine.scheduler.has_unfinished


def test_output_ends_where_the_cache_ends() -> None:
    engine = Engine(num_blocks=4, async_depth=1)
    add = message(1, prompt(10), ignore_eos=True, max_tokens=40)
    engine.scheduler.add(add)
    outputs = engine.run()
    assert collect(outputs)[1] == expected(add, 17)[0] and outputs[-1].finish_reason == "length"


def test_ends_by_length_are_known_in_advance() -> None:
    engine = Engine(async_depth=1)
    engine.scheduler.add(message(1, prompt(6), ignore_eos=True, max_tokens=3))
    engine.run()
    assert [schedule.starts for schedule in engine.schedules] == [[0], [6], [7]]


@pytest.mark.parametrize("async_depth", [0, 1])
def test_replay_continues_after_what_was_released(async_depth: int) -> None:
    whole = message(1, prompt(9), max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    tokens = expected(whole, 64)[0]
    engine = Engine(async_depth=async_depth)
    engine.scheduler.add(
        message(1, [*whole.token_ids, *tokens[:5]], 9, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    )
    outputs = engine.run()
    assert collect(outputs)[1] == tokens[5:]
    assert all(output.prompt_logprobs is None for output in outputs)


def test_replay_of_a_finished_sequence_ends_at_once() -> None:
    scheduler = Engine().scheduler
    assert scheduler.add(message(1, [5, 6, 7, EOS], 3)) == TokenOutput(1, [], "stop")
    assert scheduler.add(message(2, [5, 6, 7, 9], 3, stop_token_ids=(9,))) == TokenOutput(2, [], "stop", 9)
    assert scheduler.add(message(3, [5, 6, 7, 9], 3, max_tokens=1)) == TokenOutput(3, [], "length")
    assert scheduler.add(message(4, [5, 6, 7], max_tokens=0)) == TokenOutput(4, [], "length")
    assert not scheduler.has_unfinished


def test_several_tokens_of_one_sample_are_cut_at_the_end() -> None:
    scheduler = Engine().scheduler
    scheduler.add(message(1, prompt(4), max_tokens=10, stop_token_ids=(7,)))
    first = scheduler.update(scheduler.schedule(), [[3, 4]])
    assert first[0].new_token_ids == [3, 4] and first[0].finish_reason is None
    schedule = scheduler.schedule()
    assert schedule.starts == [4] and schedule.counts == [2]
    last = scheduler.update(schedule, [[5, 7, 9]])
    assert last[0].new_token_ids == [5, 7] and last[0].stop_reason == 7
    assert scheduler.kv.num_free_blocks == 64


def test_stop_tokens_count_only_after_min_tokens() -> None:
    scheduler = Engine().scheduler
    scheduler.add(message(1, prompt(4), max_tokens=10, min_tokens=2))
    assert scheduler.update(scheduler.schedule(), [[EOS]])[0].finish_reason is None
    assert scheduler.update(scheduler.schedule(), [[EOS]])[0].finish_reason == "stop"


def test_abort_while_in_flight_keeps_the_row_until_the_step_is_over() -> None:
    engine = Engine(async_depth=1, max_num_seqs=1)
    engine.scheduler.add(message(1, prompt(6), ignore_eos=True))
    engine.step()
    engine.scheduler.abort([1, 77])
    engine.scheduler.add(message(2, prompt(6, seed=2), ignore_eos=True, max_tokens=2))
    assert engine.scheduler.kv.num_free_blocks == 64
    assert not engine.scheduler.schedule().rows  # the only row still belongs to the step in flight
    assert engine.land() == []
    schedule = engine.scheduler.schedule()
    assert schedule.freed_rows == [0] and schedule.new_rows[0].request_id == 2


def test_prompt_logprobs_come_once_and_take_no_prefix_hits() -> None:
    engine = Engine(num_blocks=12, max_num_batched_tokens=8)
    tokens = prompt(20)
    engine.scheduler.add(message(1, tokens, max_tokens=1))
    engine.run()
    engine.scheduler.add(message(2, tokens, max_tokens=3, ignore_eos=True, prompt_logprobs=1))
    outputs = engine.run()
    assert outputs[0].num_cached_tokens == 0 and outputs[0].prompt_logprobs is not None
    assert [entry and entry.ids[0] for entry in outputs[0].prompt_logprobs] == [None, *tokens[1:]]
    assert [output.prompt_logprobs for output in outputs[1:]] == [None, None]


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="async_depth"):
        Engine(async_depth=2)
    with pytest.raises(ValueError, match="max_num_seqs"):
        Engine(max_num_seqs=0)
    with pytest.raises(ValueError, match="policy"):
        Engine(policy="lottery")
    engine = Engine()
    engine.scheduler.add(message(1, prompt(4)))
    with pytest.raises(ValueError, match="request_id 1 is already in use"):
        engine.scheduler.add(message(1, prompt(4)))


@pytest.mark.parametrize("num_run", [0, 1, 2])
def test_a_rollback_computes_again_what_was_in_flight(num_run: int) -> None:
    engine = Engine(async_depth=1, max_num_batched_tokens=8)
    adds = [message(i, prompt(6 + i, seed=i), ignore_eos=True, max_tokens=6) for i in range(2)]
    for add in adds:
        engine.scheduler.add(add)
    outputs = [output for _ in range(3) for output in engine.step()]
    assert len(engine.flying) == 1
    engine.flying.append(engine.scheduler.schedule())  # agreed on, and lost too
    before = [(request.row, list(request.blocks)) for request in engine.scheduler._running]
    engine.break_down(num_run)
    assert [(request.row, request.blocks) for request in engine.scheduler._running] == before
    outputs += engine.step()
    again = engine.schedules[-1]
    assert again.freed_rows == list(range(8)) and [new.request_id for new in again.new_rows] == [0, 1]
    assert again.new_blocks == before
    outputs += engine.run()
    assert collect(outputs) == {add.request_id: expected(add, 64)[0] for add in adds}
    assert not engine.schedules[-1].freed_rows


# ---- everything at once ----------------------------------------------------------------------------------------------


class SchedulerMachine(RuleBasedStateMachine):
    engine: Engine | None = None

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        chunked=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        async_depth=st.integers(0, 1),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        chunked: bool,
        policy: str,
        async_depth: int,
    ) -> None:
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else 40,
            max_model_len=40,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            policy=policy,
            async_depth=async_depth,
        )
        self.live: dict[int, AddRequest] = {}
        self.released: dict[int, list[int]] = {}
        self.next_id = 0

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 24),
        replayed=st.integers(0, 3),
        max_tokens=st.integers(1, 16),
        min_tokens=st.integers(0, 3),
        stops=st.sampled_from([(), (3,), (4, 5)]),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "a"]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(
        self,
        family: int,
        length: int,
        replayed: int,
        max_tokens: int,
        min_tokens: int,
        stops: tuple[int, ...],
        ignore_eos: bool,
        priority: int,
        salt: str,
        prompt_logprobs: int | None,
    ) -> None:
        options = {
            "max_tokens": max_tokens,
            "min_tokens": min(min_tokens, max_tokens),
            "stop_token_ids": stops,
            "ignore_eos": ignore_eos,
            "priority": priority,
            "cache_salt": salt,
            "prompt_logprobs": prompt_logprobs,
        }
        tokens = prompt(length, family)
        add = message(self.next_id, tokens, **options)
        scheduler = self.engine.scheduler
        if length < scheduler.max_length:
            output, _ = expected(add, scheduler.max_length)
            if replayed < len(output):
                add = message(self.next_id, tokens + output[:replayed], length, **options)
        refused = scheduler.add(add)
        assert (refused is not None) == (length >= scheduler.max_length)
        if refused is None:
            self.live[self.next_id] = add
            self.released[self.next_id] = []
        self.next_id += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.sampled_from(sorted(self.live)), max_size=2))
        self.engine.scheduler.abort(sorted(ids))
        for request_id in ids:
            del self.live[request_id]

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    @rule(num_run=st.integers(0, 2), unlaunched=st.booleans())
    def roll_back(self, num_run: int, unlaunched: bool) -> None:
        """unlaunched: a schedule was made, but the ranks did not come to agree on it."""
        if unlaunched and len(self.engine.flying) <= self.engine.scheduler.async_depth:
            schedule = self.engine.scheduler.schedule()
            check_schedule(schedule, self.engine.scheduler)
            num_run = min(num_run, len(self.engine.flying))
        self.engine.break_down(num_run)

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            add = self.live[output.request_id]  # nothing for the aborted and the finished
            released = self.released[output.request_id]
            if not released and add.params.prompt_logprobs is not None and len(add.token_ids) == add.prompt_len:
                assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == add.prompt_len
                ids = [entry.ids[0] for entry in output.prompt_logprobs if entry is not None]
                assert ids == add.token_ids[1 : add.prompt_len]
            else:
                assert output.prompt_logprobs is None
            assert output.logprobs is not None and [e.ids[0] for e in output.logprobs] == output.new_token_ids
            released += output.new_token_ids
            tokens, reason = expected(add, self.engine.scheduler.max_length)
            assert released == tokens[: len(released)]
            assert (output.finish_reason is not None) == (len(released) == len(tokens))
            if output.finish_reason is not None:
                assert output.finish_reason == reason
                del self.live[output.request_id]

    @invariant()
    def blocks_add_up(self) -> None:
        if self.engine is None:
            return
        scheduler = self.engine.scheduler
        kv = scheduler.kv
        held: dict[int, int] = {}
        for request in scheduler._running:
            for block in request.blocks:
                held[block] = held.get(block, 0) + 1
        assert [held.get(block, 0) for block in range(kv.num_blocks)] == kv._refs
        free = kv._empty + list(kv._cached)
        assert sorted([*free, *held]) == list(range(kv.num_blocks))
        assert all(kv._block_to_key[block] is None for block in kv._empty)
        assert {block: key for key, block in kv._key_to_block.items()} == {
            block: key for block, key in enumerate(kv._block_to_key) if key is not None
        }
        assert all(not request.blocks for request in scheduler._waiting)
        assert scheduler._running == sorted(scheduler._running)
        assert set(scheduler._requests) == set(self.live)
        assert len(self.live) == scheduler.num_running + scheduler.num_waiting

    def teardown(self) -> None:
        if self.engine is None:
            return
        scheduler = self.engine.scheduler
        bound = 10 + 300 * (1 + len(self.live))
        while scheduler.has_unfinished or self.engine.flying:
            self.take(self.engine.step())
            self.blocks_add_up()
            bound -= 1
            assert bound, "no end in sight"
        assert not self.live
        assert scheduler.kv.num_free_blocks == scheduler.kv.num_blocks and not any(scheduler.kv._refs)
        scheduler._release_rows()
        assert sorted(scheduler._free_rows) == list(range(scheduler.max_num_seqs))


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_everything_at_once = SchedulerMachine.TestCase
