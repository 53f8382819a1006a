"""The scheduler with a device that is honest about memory: it samples from what its cache slots really hold."""

from __future__ import annotations

import pytest
from honest_device import EOS, Engine, collect, expected, message, prompt

from front.messages import TokenOutput


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
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens, stats.cached_tokens) == (51, 16, 51, 16)
    engine.scheduler.kv.reset_prefix_cache()
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
    stats = engine.scheduler.stats()
    assert stats.preemptions >= 2
    assert sum(output.num_preemptions for output in outputs) == stats.preemptions
    assert [output.request_id for output in outputs if output.queued is not None] == [0, 1, 2]  # with the first ones
    assert sum(stats.step_tokens) == stats.steps
    first = len(adds)  # what is sampled behind a prompt counts with it
    assert stats.num_step_tokens == sum(schedule.num_tokens for schedule in engine.schedules) + first
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
    before = [(request.row, [list(table) for table in request.held.tables]) for request in engine.scheduler.running]
    engine.break_down(num_run)
    assert [(request.row, request.held.tables) for request in engine.scheduler.running] == before
    outputs += engine.step()
    again = engine.schedules[-1]
    assert again.freed_rows == list(range(8)) and [new.request_id for new in again.new_rows] == [0, 1]
    assert again.new_blocks == before
    outputs += engine.run()
    assert collect(outputs) == {add.request_id: expected(add, 64)[0] for add in adds}
    assert not engine.schedules[-1].freed_rows
