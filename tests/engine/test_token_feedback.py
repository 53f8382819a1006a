"""Steps queued on a device before the host has seen the tokens of the one before: over the CPU's memory and fake events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hf_tiny
import numpy as np
import pytest
import torch
from amounts import examples
from fake_cuda_graph import FakeGraphLibrary
from fake_events import FakeEvents
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_parts import Got, Job, drive, make_plan
from survivors import Survivors

from cache.memory import CacheMemory
from cache.spec import CacheSizes
from dbo.steps import drain
from engine import build
from engine.device import LateReadback, in_one_copy
from engine.runner import Runner
from engine.sampling.sampling_table import SamplingTable
from engine.schedule import NewRow, Schedule
from engine.step_buffers import StepBuffers
from engine.step_memory import Limits
from ep.backends.dispatchers import StepState
from ep.protocol import PeerLost
from front.params import ReasoningBudget, SamplingParams
from models.base import CausalLM
from native import Isa, isa, limit_isa

pytestmark = pytest.mark.fakes

torch.set_num_threads(1)
CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 8, 9, 10, 11]
MAX_LEN = 40


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("feedback")).path


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return hf_tiny.load_ours(path)


# ---- the runner alone ----


def plain_runner(model: CausalLM) -> Runner:
    kv = CacheMemory.allocate(model.cache_spec(), CacheSizes(4, 16), CPU)
    return Runner(model, kv, StepBuffers(Limits(4, 64, 32, 4), CPU), SamplingTable(4, model.config.vocab_size))


class Late:
    """A runner whose device is told when a step is over."""

    def __init__(self, model: CausalLM, exchange: StepState | None = None, timeout: float = 10.0) -> None:
        self.events = FakeEvents()
        self.runner = Runner(
            model,
            CacheMemory.allocate(model.cache_spec(), CacheSizes(4, 16), CPU),
            StepBuffers(Limits(4, 64, 32, 4), CPU, on_device=True),
            SamplingTable(4, model.config.vocab_size),
            threaded=True,
            exchange=exchange,
            readback=LateReadback(self.events.new, timeout, pinned=False),
        )

    def queued(self, count: int) -> bool:
        """Whether so many steps have been queued on the device, in a while."""
        return _soon(lambda: len(self.events.made) >= count)


def _soon(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.001)
    return what()


def first_step(**params: Any) -> Schedule:
    new = NewRow(0, 0, PROMPT, len(PROMPT), SamplingParams(**{"temperature": 0.0, **params}), seed=1, eos_token_ids=())
    return Schedule(0, [], [new], [(0, [[3, 1, 2]])], [0], [0], [len(PROMPT)], [True])


def decode(step_id: int) -> Schedule:
    return Schedule(step_id, rows=[0], starts=[len(PROMPT) + step_id - 1], counts=[1], samples=[True])


def test_steps_are_queued_before_any_token_is_read(model: CausalLM) -> None:
    """All of them, while the device has not said that the first is over."""
    schedules = [first_step(temperature=1.0), *(decode(i) for i in range(1, 4))]
    plain = plain_runner(model)
    expected = [drain(plain.steps(schedule)).token_ids[0][0] for schedule in schedules]
    assert len(set(expected)) > 2
    late = Late(model)
    flights = [late.runner.launch(schedule) for schedule in schedules]
    assert late.queued(4)
    assert not any(event.over.is_set() for event in late.events.made)
    tokens = []
    for flight, event in zip(flights, late.events.made, strict=True):
        event.over.set()
        tokens.append(drain(flight.steps()).token_ids[0][0])
    late.runner.close()
    assert tokens == expected


def test_the_forward_pass_does_not_wait_for_a_history(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row has sampled is known on the host before its penalties are: the step waits there, but is computed by then."""
    params = {"frequency_penalty": 1.5, "repetition_penalty": 1.3}
    plain = plain_runner(model)
    expected = [drain(plain.steps(s)).token_ids for s in (first_step(**params), decode(1), decode(2))]
    computed = []
    logits = model.logits

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        computed.append("logits")
        return logits(hidden)

    late = Late(model)
    begun: list[str] = []
    steps = model.steps

    def forward(*args: Any) -> Any:
        begun.append("forward")
        return steps(*args)

    monkeypatch.setattr(model, "logits", noted)
    monkeypatch.setattr(model, "steps", forward)
    flights = [late.runner.launch(s) for s in (first_step(**params), decode(1), decode(2))]
    assert _soon(lambda: len(begun) == 2) and len(computed) == 1
    assert not _soon(lambda: len(late.events.made) > 1 or len(begun) > 2, 0.1)
    tokens = []
    for index, flight in enumerate(flights):
        late.events.made[index].over.set()
        tokens.append(drain(flight.steps()).token_ids)
        assert index == 2 or late.queued(index + 2)
    late.runner.close()
    assert tokens == expected


def test_a_step_that_was_not_whole_is_not_read(model: CausalLM) -> None:
    """Its exchanges are confirmed before its tokens; by then the next step is queued."""
    exchange = StepState()
    asked: list[int] = []

    def lost() -> None:
        raise PeerLost((1,), "masked")

    def after() -> Callable[[], None]:
        asked.append(len(asked))
        return lost if len(asked) == 2 else lambda: None

    exchange.watch(after=after)
    late = Late(model, exchange)
    flights = [late.runner.launch(first_step()), late.runner.launch(decode(1)), late.runner.launch(decode(2))]
    assert late.queued(3)
    for event in late.events.made:
        event.over.set()
    first = drain(flights[0].steps()).token_ids[0]
    with pytest.raises(PeerLost):
        drain(flights[1].steps())
    late.runner.reset()
    known = [*PROMPT, *first]
    again = Schedule(3, [0, 1, 2, 3], [], [(0, [[3, 1, 2]])], [0], [0], [len(known)], [True])
    again.new_rows.append(NewRow(0, 0, known, len(PROMPT), SamplingParams(temperature=0.0), 1, ()))
    flight = late.runner.launch(again)
    assert late.queued(4)
    late.events.made[3].over.set()
    tokens = first + drain(flight.steps()).token_ids[0]
    late.runner.close()
    assert tokens == hf_tiny.generate_greedy(model, [PROMPT], 2)[0]


def test_a_device_that_does_not_come_to_an_end_is_an_error(model: CausalLM) -> None:
    late = Late(model, timeout=0.05)
    flight = late.runner.launch(first_step())
    with pytest.raises(RuntimeError, match=r"has not finished a step within 0\.05 s"):
        drain(flight.steps())
    late.runner.close()


# ---- parts ----


def test_seals_wait_first_for_the_group() -> None:
    """Whoever watched first marks the device last, and waits for it first: then all that others have queued is there."""
    state, log = StepState(), list[str]()

    def watcher(name: str) -> Callable[[], Callable[[], None]]:
        def act() -> Callable[[], None]:
            log.append(f"{name} queues")
            return lambda: log.append(f"{name} waits")

        return act

    state.watch(after=watcher("group"))
    state.watch(after=watcher("masks"))
    confirm = state.seal()
    confirm()
    assert log == ["masks queues", "group queues", "group waits", "masks waits"]


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("iufdb?"), st.integers(0, 7)), min_size=1, max_size=6))
def test_arrays_of_any_dtype_go_in_one_copy(kinds: list[tuple[str, int]]) -> None:
    dtypes = {"i": np.int64, "u": np.uint64, "f": np.float32, "d": np.float64, "b": np.int8, "?": np.bool_}
    arrays: list[Any] = [(np.arange(3 * size).reshape(3, size) % 5).astype(dtypes[kind]) for kind, size in kinds]
    for array, tensor in zip(arrays, in_one_copy(arrays, CPU, pinned=False), strict=True):
        expected = torch.from_numpy(array)
        assert tensor.dtype is expected.dtype and tensor.shape == expected.shape
        assert tensor.tolist() == expected.tolist()


# ---- whole ranks ----

CHOICES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "logprobs": 2},
    {"logprobs": 3, "prompt_logprobs": 1},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"repetition_penalty": 1.4, "temperature": 0.7, "min_p": 0.02},
    {"bad_words_token_ids": ((7,), (11, 12)), "min_tokens": 3},
    {"stop_token_ids": tuple(range(20, 60)), "min_tokens": 2},
    {"allowed_token_ids": tuple(range(3, 40)), "logit_bias": {5: 4.0}},
    {"reasoning": ReasoningBudget(2, (), ((7, 11),)), "temperature": 0.8},
]


@pytest.fixture
def late_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEvents]:
    """Ranks are built as on a GPU, as far as tokens on their way are concerned."""
    events = FakeEvents(looks=2)
    _use(monkeypatch, events)
    yield events


def _use(patch: pytest.MonkeyPatch, events: FakeEvents) -> None:
    patch.setattr(build, "make_readback", lambda device, timeout: LateReadback(events.new, timeout, pinned=False))


def outcome(got: Got) -> tuple[Any, ...]:
    """What a request has brought, in however many outputs."""
    logprobs = [entry for output in got.outputs for entry in output.logprobs or ()]
    prompts = [entry for output in got.outputs for entry in output.prompt_logprobs or ()]
    ids = [entry and (entry.ids, entry.rank) for entry in (*logprobs, *prompts)]
    return got.tokens, got.finish_reason, got.outputs[-1].stop_reason if got.outputs else None, ids


@st.composite
def jobs_strategy(draw: st.DrawFn) -> list[Job]:
    jobs = []
    for _ in range(draw(st.integers(1, 7))):
        prompt = draw(st.lists(st.integers(2, 90), min_size=1, max_size=20))
        params = draw(st.sampled_from(CHOICES))
        jobs.append(Job(prompt, draw(st.integers(3, 12)), draw(st.integers(0, 8)), params=params))
    return jobs


@st.composite
def sizes_strategy(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "max_model_len": MAX_LEN,
        "num_kv_blocks": draw(st.integers(MAX_LEN // 4, 20)),
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.sampled_from([3, 7, 16, 64])),
        "enable_prefix_caching": draw(st.booleans()),
    }


@settings(max_examples=examples(40), deadline=None)
@given(jobs=jobs_strategy(), sizes=sizes_strategy(), asynchronous=st.booleans(), looks=st.integers(0, 3))
def test_late_tokens_equal_tokens_at_once(
    path: Path, jobs: list[Job], sizes: dict[str, Any], asynchronous: bool, looks: int
) -> None:
    """Prompts in chunks, decodes, preemption, stops, every kind of sampling: the same requests by the plain way."""
    plain = build.build_rank(make_plan(path, **sizes))
    expected = [outcome(got) for got in drive([plain], jobs)]
    plain.close()
    with pytest.MonkeyPatch.context() as patch:
        _use(patch, FakeEvents(looks))
        rank = build.build_rank(make_plan(path, **sizes, async_scheduling=asynchronous))
    try:
        assert [outcome(got) for got in drive([rank], jobs)] == expected
        assert rank.stats.kv_blocks_used == 0
    finally:
        rank.close()


def test_preemption_and_stops_happen(path: Path, late_parts: FakeEvents) -> None:
    """What the property test draws must not always be easy; a row that has ended runs one step too many and disturbs nobody."""
    jobs = [Job([5 + i, 6, 7, 8, 9 + i], 12, params=CHOICES[7] if i % 2 else {}) for i in range(5)]
    sizes = {"max_model_len": MAX_LEN, "num_kv_blocks": 10, "max_num_seqs": 5}
    rank = build.build_rank(make_plan(path, **sizes, async_scheduling=True))
    got = drive([rank], jobs)
    assert rank.stats.preemptions > 0 and {one.finish_reason for one in got} == {"stop", "length"}
    assert len(late_parts.made) >= rank.stats.steps
    rank.close()


@pytest.mark.parametrize("turns", [0, 2, 3, 99])
def test_a_rank_is_lost(path: Path, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step, with tokens on the way: what comes after is computed from what was released."""
    jobs = [Job([5 + 3 * i, 7, 11 * i + 2, *range(2, 2 + i)], 9 + i % 4, params=CHOICES[i]) for i in range(5)]
    plain = build.build_rank(make_plan(path))
    expected = {i: got.tokens for i, got in enumerate(drive([plain], jobs))}
    _use(monkeypatch, FakeEvents(looks=2))
    cluster = Survivors(path, 3, slots_per_rank=4, async_scheduling=True)
    for index, job in enumerate(jobs):
        cluster.add(index, job)
    for _ in range(4):
        cluster.round()
    cluster.round(victim=1, turns=turns)
    cluster.tell_all()
    cluster.replay()
    cluster.finish()
    assert cluster.released == expected


@pytest.mark.parametrize("mode", ["full_decode_only", "full_and_piecewise"])
def test_replayed_steps_are_fed_from_the_device(mode: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs read the tokens from their own memory, which is filled on the device too."""
    before = isa()
    limit_isa(Isa.NONE)  # native kernels are no operations of torch: the fake does not see them
    monkeypatch.setattr(build, "limit_isa", lambda level: None)
    library = FakeGraphLibrary()
    monkeypatch.setattr(build, "graph_library", lambda device: library)
    dense = hf_tiny.make_qwen3(path.parent / f"dense-{mode}").path
    jobs = [Job([1 + i, 2, 3, 4, 5 + i, 6, 7], 9 + i, params=CHOICES[i]) for i in range(5)]
    sizes = {"num_kv_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32}
    graphs = {"cudagraph_mode": mode, "cudagraph_capture_sizes": (1, 2, 4)}
    try:
        plain = build.build_rank(make_plan(dense, **sizes))
        expected = [outcome(got) for got in drive([plain], jobs)]
        _use(monkeypatch, FakeEvents(looks=2))
        rank = build.build_rank(make_plan(dense, **sizes, **graphs, async_scheduling=True))
        assert [outcome(got) for got in drive([rank], jobs)] == expected
        assert library.num_replays > 10
        rank.close()
    finally:
        limit_isa(before)


def test_parts_of_a_step_are_fed_too(model: CausalLM) -> None:
    """Decodes beside a prompt, in two parts: each part takes its own rows' tokens from the device."""

    def tokens(on_device: bool) -> list[list[int]]:
        buffers, found = StepBuffers(Limits(4, 64, 32, 4), CPU, on_device=on_device), []
        params = SamplingParams(temperature=0.0)
        rows = [NewRow(r, r, [20 + r] * (3 + r), 3 + r, params, 1, ()) for r in range(3)]
        blocks = [(r, [[2 * r, 2 * r + 1]]) for r in range(4)]
        first = buffers.fill(Schedule(0, [], rows, blocks, [0, 1, 2], [0, 0, 0], [3, 4, 5], [True] * 3))
        buffers.write_tokens(first, torch.tensor([91, 92, 93]))
        last = NewRow(3, 3, [1, 2, 3, 4], 4, params, 1, ())
        alone = NewRow(0, 0, [50], 1, params, 1, ())
        second = Schedule(1, [0], [last, alone], [(0, [[6]])], [1, 0, 2, 3], [4, 0, 5, 0], [1, 1, 1, 4], [True] * 4)
        for part in buffers.fill(second, 2).inputs:
            found.append(part.token_ids_T.tolist())
        return found

    plain = tokens(False)
    assert tokens(True) == plain
    assert [token for part in plain for token in part][:3] == [92, 50, 93]
