"""Steps on the device: without tokens, on a thread, and when they fail."""

from __future__ import annotations

from pathlib import Path

import drive
import hf_tiny
import pytest
import torch
from rank_parts import Job

from cache.memory import CacheMemory
from cache.spec import CacheSizes
from dbo.steps import drain
from engine.runner import Runner, StepResult
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampling_table import SamplingTable
from engine.schedule import NewRow, Schedule
from engine.step_buffers import StepBuffers
from engine.step_memory import Limits
from ep.backends.local import LocalAllToAll
from ep.parallel import Parallel
from ep.protocol import PeerLost
from ep.transport.group import MailboxGroup, MailboxWorld
from eplb.repair import repair
from models.base import CausalLM

torch.set_num_threads(1)
CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("runner")).path


@pytest.fixture(scope="session")
def model(path: Path) -> CausalLM:
    return hf_tiny.load_ours(path)


def make_runner(model: CausalLM, threaded: bool = False) -> Runner:
    kv = CacheMemory.allocate(model.cache_spec(), CacheSizes(4, 16), CPU)
    return Runner(
        model, kv, StepBuffers(Limits(4, 64, 32, 4), CPU), SamplingTable(4, model.config.vocab_size), threaded=threaded
    )


def first_step(count: int = len(PROMPT), **params: object) -> Schedule:
    message = Job(PROMPT, 4, params=params).message(0)
    new = NewRow(0, 0, PROMPT, len(PROMPT), message.params, seed=1, eos_token_ids=())
    return Schedule(
        0,
        new_rows=[new],
        new_blocks=[(0, [[3, 1, 2]])],
        rows=[0],
        starts=[0],
        counts=[count],
        samples=[count == len(PROMPT)],
    )


def decode(step_id: int, position: int) -> Schedule:
    return Schedule(step_id, rows=[0], starts=[position], counts=[1], samples=[True])


@pytest.mark.parametrize("threaded", [False, True])
def test_a_step_finds_the_token_of_the_step_before(model: CausalLM, threaded: bool) -> None:
    """All four are launched before the first result is seen: the batch carries the tokens."""
    runner = make_runner(model, threaded)
    flights = [runner.launch(first_step())] + [runner.launch(decode(i, len(PROMPT) + i - 1)) for i in range(1, 4)]
    tokens = [drain(flight.steps()).token_ids[0][0] for flight in flights]
    assert tokens == hf_tiny.generate_greedy(model, [PROMPT], 4)[0]
    runner.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_a_step_without_tokens_takes_part(model: CausalLM, threaded: bool) -> None:
    """It yields as often as any other, so that woven ranks meet in every exchange."""
    runner = make_runner(model, threaded)
    assert drain(runner.launch(Schedule(0)).steps()) == StepResult([], None, None)
    runner.close()
    inline = make_runner(model)
    turns = [sum(1 for _ in inline.steps(schedule)) for schedule in (Schedule(0), first_step(), Schedule(2))]
    assert turns[0] == turns[1] == turns[2] > 0


def test_inference_mode_is_not_left_entered_between_turns(model: CausalLM) -> None:
    steps = make_runner(model).steps(first_step())
    next(steps)
    assert not torch.is_inference_mode_enabled()
    steps.close()
    assert not torch.is_inference_mode_enabled()


def give_lanes(model: CausalLM, num_lanes: int) -> None:
    """One rank alone keeps nothing between exchanges, so that all lanes may be the same."""
    for _, moe in model.moe_layers:
        moe.lanes = moe.lanes[:1] * num_lanes


@pytest.mark.parametrize("num_ubatches", [2, 3, 8])
@pytest.mark.parametrize("threaded", [False, True])
def test_a_prompt_in_parts_equals_the_whole(model: CausalLM, num_ubatches: int, threaded: bool) -> None:
    """The later part of the prompt attends to what the earlier one has written a moment ago, layer by layer: whatever else
    lies there would show."""
    give_lanes(model, num_ubatches)
    whole = drain(make_runner(model).steps(first_step(logprobs=2, prompt_logprobs=2)))
    runner = make_runner(model, threaded)
    for layer in runner._kv.layers:
        for tensor in layer:
            tensor.fill_(50.0)
    split = drain(runner.launch(first_step(logprobs=2, prompt_logprobs=2), num_ubatches=num_ubatches).steps())
    runner.close()
    assert split.token_ids == whole.token_ids
    for ours, theirs in ((split.logprobs, whole.logprobs), (split.prompt_logprobs, whole.prompt_logprobs)):
        assert ours is not None and theirs is not None and ours[0] is not None and theirs[0] is not None
        assert [entry.ids for entry in ours[0]] == [entry.ids for entry in theirs[0]]
        for one, other in zip(ours[0], theirs[0], strict=True):
            assert one.values == pytest.approx(other.values, abs=1e-4)


def test_parts_without_tokens_take_their_turns(model: CausalLM) -> None:
    """All ranks take as many turns in a split step, whatever they have; and no more than in a whole one."""
    give_lanes(model, 3)
    runner = make_runner(model)
    turns = [sum(1 for _ in runner.steps(s, num_ubatches=3)) for s in (Schedule(0), first_step(), Schedule(2))]
    assert turns[0] == turns[1] == turns[2] == sum(1 for _ in runner.steps(Schedule(3)))


def test_a_chunk_that_does_not_sample_brings_nothing(model: CausalLM) -> None:
    result = drain(make_runner(model).steps(first_step(count=4)))
    assert result == StepResult([[]], None, None)


def test_logprobs_come_per_entry_and_match_the_logits(model: CausalLM) -> None:
    runner = make_runner(model)
    result = drain(runner.steps(first_step(logprobs=2, prompt_logprobs=3)))
    logits = hf_tiny.chunked_logits(model, PROMPT, [len(PROMPT)])
    expected = prompt_logprobs(logits[:-1], PROMPT[1:], 3, "raw_logprobs")
    assert result.prompt_logprobs is not None and result.logprobs is not None
    (prompt,) = result.prompt_logprobs
    assert prompt is not None and len(prompt) == len(PROMPT) - 1
    for ours, reference in zip(prompt, expected, strict=True):
        assert ours.ids == reference.ids and ours.rank == reference.rank
        assert ours.values == pytest.approx(reference.values, abs=1e-4)
    (chosen,) = result.logprobs
    assert chosen is not None
    assert chosen[0].ids[0] == result.token_ids[0][0] == chosen[0].ids[1]
    assert chosen[0].values[0] == pytest.approx(float(logits[-1].log_softmax(-1).max()), abs=1e-4)
    assert drain(runner.steps(decode(1, len(PROMPT)))).prompt_logprobs is None


def test_a_chunked_prompt_has_the_same_logprobs(model: CausalLM) -> None:
    whole = drain(make_runner(model).steps(first_step(prompt_logprobs=0))).prompt_logprobs
    runner = make_runner(model)
    parts = []
    for step_id, (start, count) in enumerate([(0, 3), (3, 1), (4, 3)]):
        schedule = first_step(count=3, prompt_logprobs=0) if start == 0 else Schedule(step_id)
        schedule.rows, schedule.starts, schedule.counts = [0], [start], [count]
        schedule.samples = [start + count == len(PROMPT)]
        found = drain(runner.steps(schedule)).prompt_logprobs
        assert found is not None and found[0] is not None
        parts += found[0]
    assert whole is not None and whole[0] is not None
    assert [entry.ids for entry in parts] == [entry.ids for entry in whole[0]]


@pytest.mark.parametrize("threaded", [False, True])
def test_a_failure_is_raised_where_the_result_is_asked_for(model: CausalLM, threaded: bool) -> None:
    runner = make_runner(model, threaded)
    bad = runner.launch(decode(0, 0))  # the row holds nothing
    with pytest.raises(AssertionError, match="not known yet"):
        drain(bad.steps())
    if threaded:
        with pytest.raises(RuntimeError, match="an earlier step failed"):
            drain(runner.launch(Schedule(1)).steps())
    runner.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_after_a_lost_peer_steps_are_taken_again(model: CausalLM, path: Path, threaded: bool) -> None:
    """Whatever the broken step and those behind it left in batch, cache and table."""
    world = MailboxWorld(2)
    world.leave(1)
    parallel = drive.parallel_of(path, MailboxGroup(world, 0), "mailbox", slots_per_rank=8)
    broken = hf_tiny.load_ours(path, parallel)
    runner = make_runner(broken, threaded)
    flights = [runner.launch(first_step()), runner.launch(decode(1, len(PROMPT)))]
    with pytest.raises(PeerLost):
        drain(flights[0].steps())
    runner.reset()
    assert parallel.placement is not None
    alone = repair(parallel.placement, (True, False), 1)
    broken.update_group(Parallel(0, 2, alone, lambda slots, _: [LocalAllToAll(slots)]))
    again = first_step()
    again.freed_rows = [0, 1, 2, 3]
    flights = [runner.launch(again), runner.launch(decode(1, len(PROMPT)))]
    tokens = [drain(flight.steps()).token_ids[0][0] for flight in flights]
    assert tokens == hf_tiny.generate_greedy(model, [PROMPT], 2)[0]
    runner.reset()  # nothing has failed: nothing happens
    runner.close()


def test_a_reset_hides_no_other_failure(model: CausalLM) -> None:
    runner = make_runner(model, threaded=True)
    runner.launch(decode(0, 0))
    with pytest.raises(AssertionError, match="not known yet"):
        runner.reset()
    runner.close()


def test_rows_of_a_freed_request_leave_nothing_behind(model: CausalLM, tmp_path: Path) -> None:
    """A row that asked for logprobs is taken by one that does not."""
    runner = make_runner(model)
    drain(runner.steps(first_step(logprobs=1, prompt_logprobs=1)))
    again = first_step()
    again.freed_rows = [0]
    result = drain(runner.steps(again))
    assert result.logprobs is None and result.prompt_logprobs is None
