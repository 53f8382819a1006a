"""Linear attention equals the recurrence of layers/reference.py, however a sequence is cut, and touches no record but those that it
writes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import EVERY_ISA, ISAS, TORCH_AND_ISAS
from msgspec import structs
from torch import Tensor

from layers import reference
from layers.gated_delta import L2_EPS, DeltaInputs, DeltaShape, GatedDelta, GatedDeltaStep, chunk_rule
from layers.step import StateInput, StateRuns, StepInput
from native import Isa, best_isa, limit_isa

CPU = torch.device("cpu")
SHAPES = [
    DeltaShape(2, 4, 16, 16, 4, False),
    DeltaShape(1, 3, 7, 5, 2, False),
    DeltaShape(2, 2, 16, 16, 4, True),
    DeltaShape(1, 1, 40, 70, 3, True),
    DeltaShape(1, 2, 128, 128, 4, False),
]


@pytest.fixture(autouse=True)
def natively() -> Iterator[None]:
    yield
    limit_isa(best_isa())


def make_delta(
    shape: DeltaShape, generator: torch.Generator, sigmoid_gate: bool = False, lower_bound: float = 0.0
) -> GatedDelta:
    delta = GatedDelta(shape, 1e-6, CPU, sigmoid_gate, lower_bound)
    for parameter in delta.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    delta.rate.exp_()
    return delta


def make_inputs(shape: DeltaShape, count: int, dtype: torch.dtype, generator: torch.Generator) -> DeltaInputs:
    """Side by side, as one projection gives them."""
    sizes = [shape.channels, shape.value_size, shape.num_heads, shape.decay_size]
    return DeltaInputs(*torch.randn(count, sum(sizes), generator=generator).to(dtype).split(sizes, 1))


def step_of(counts: list[int], reads: list[int], writes: list[int]) -> StepInput:
    """Of so many tokens of each sequence; those with one come first."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    none = torch.zeros(starts[-1], dtype=torch.int64)
    state = StateInput(*(torch.tensor(records, dtype=torch.int64) for records in (reads, writes)))
    table = torch.zeros((len(counts), 1), dtype=torch.int64)
    return StepInput(none, none, none, tuple(starts), tuple(counts), none, table, counts.count(1), 4, none, state=state)


def wanted(inputs: DeltaInputs, delta: GatedDelta, tail: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one sequence: what it gives, its tail and its state, token by token."""
    shape, count = delta.shape, inputs.qkv_TC.shape[0]
    mixed, tail = reference.causal_convolution(inputs.qkv_TC, tail, delta.conv)
    q, k, v = mixed.split([shape.key_size, shape.key_size, shape.value_size], 1)
    q, k = (x.reshape(count, shape.num_key_heads, -1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + L2_EPS).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(shape.num_heads // shape.num_key_heads, 1) for x in (q * shape.key_dim**-0.5, k))
    decay = delta.log_decay(inputs.decay_T).exp()
    v = v.reshape(count, shape.num_heads, -1)
    out, state = reference.gated_delta_rule(q, k, v, decay, inputs.beta_TH.float().sigmoid(), state)
    out = out / (out.square().mean(-1, keepdim=True) + delta.eps).sqrt() * delta.norm
    gate = inputs.gate_T.float()
    gate = torch.sigmoid(gate) if delta.sigmoid_gate else F.silu(gate)
    return out.flatten(1) * gate, tail, state


def check(
    shape: DeltaShape,
    counts: list[int],
    dtype: torch.dtype,
    sigmoid_gate: bool = False,
    lower_bound: float = 0.0,
    in_place: bool = False,
) -> None:
    generator = torch.Generator().manual_seed(0)
    delta = make_delta(shape, generator, sigmoid_gate, lower_bound)
    inputs = make_inputs(shape, sum(counts), dtype, generator)
    num = len(counts)
    reads = [1 + 2 * i for i in range(num)]
    writes = reads if in_place else [2 + 2 * i for i in range(num)]
    tails = torch.randn(2 * num + 2, shape.taps - 1, shape.channels, generator=generator).to(dtype)
    states = torch.randn(2 * num + 2, shape.num_heads, shape.key_dim, shape.value_dim, generator=generator) * 0.3
    cache = (tails.clone(), states.clone())
    out = GatedDeltaStep(step_of(counts, reads, writes))(*inputs, delta, cache)
    written = torch.zeros(len(tails), dtype=torch.bool)
    written[writes] = True
    assert torch.equal(cache[0][~written], tails[~written]) and torch.equal(cache[1][~written], states[~written])
    start = 0
    tolerance = {"rtol": 3e-4, "atol": 3e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for sequence, count in enumerate(counts):
        rows = slice(start, start + count)
        start += count
        expected, tail, state = wanted(
            DeltaInputs(*(x[rows] for x in inputs)), delta, tails[reads[sequence]], states[reads[sequence]]
        )
        torch.testing.assert_close(out[rows].float(), expected, **tolerance)
        assert torch.equal(cache[0][writes[sequence]], tail)
        torch.testing.assert_close(cache[1][writes[sequence]], state, rtol=3e-4, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", TORCH_AND_ISAS)
def test_equals_the_recurrence(level: Isa, dtype: torch.dtype) -> None:
    limit_isa(level)
    for shape in SHAPES:
        for counts in ([1], [1, 1, 1], [2], [3, 17], [1, 1, 65, 130], []):
            check(shape, counts, dtype)


@pytest.mark.parametrize("level", EVERY_ISA)
def test_a_result_does_not_depend_on_company_or_threads(level: Isa) -> None:
    limit_isa(level)
    shape, generator = DeltaShape(2, 4, 64, 64, 4, False), torch.Generator().manual_seed(0)
    delta = make_delta(shape, generator)
    inputs, states = make_inputs(shape, 80, torch.float32, generator), torch.randn(9, 4, 64, 64, generator=generator)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        cache = (torch.zeros(9, 3, shape.channels), states.clone())
        results.append(
            (GatedDeltaStep(step_of([1, 1, 70, 8], [1, 2, 3, 4], [5, 6, 7, 8]))(*inputs, delta, cache), cache[1])
        )
    torch.set_num_threads(1)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))
    cache = (torch.zeros(9, 3, shape.channels), states.clone())
    alone = GatedDeltaStep(step_of([70], [3], [7]))(*(x[2:72] for x in inputs), delta, cache)
    assert torch.equal(alone, results[0][0][2:72]) and torch.equal(cache[1][7], results[0][1][7])


@pytest.mark.parametrize("level", TORCH_AND_ISAS)
def test_gates_of_either_kind_and_a_decay_with_a_bound(level: Isa) -> None:
    limit_isa(level)
    check(SHAPES[2], [1, 40], torch.float32, sigmoid_gate=True)
    check(SHAPES[2], [1, 40], torch.float32, sigmoid_gate=True, lower_bound=-5.0)


@pytest.mark.parametrize("level", TORCH_AND_ISAS)
def test_a_record_may_be_read_and_written(level: Isa) -> None:
    """The second part of a sequence that is cut goes on from what the first has left."""
    limit_isa(level)
    for shape in SHAPES:
        check(shape, [1, 1, 9, 70], torch.float32, in_place=True)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.builds(
        lambda heads, group, key, value, taps, channel: DeltaShape(heads, heads * group, key, value, taps, channel),
        st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 70), st.integers(2, 5), st.booleans(),
    ),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4).map(lambda counts: sorted(counts, key=lambda count: count > 1)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    level=st.sampled_from([Isa.NONE, *ISAS]),
)  # fmt: skip
def test_any_sizes(shape: DeltaShape, counts: list[int], dtype: torch.dtype, level: Isa) -> None:
    limit_isa(level)
    check(shape, counts, dtype)


@pytest.mark.parametrize("channels", [1, 12])
def test_strong_decays_overflow_nowhere(channels: int) -> None:
    """A chunk over which a state vanishes: decays between pairs of tokens are never divided by each other."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 50, width, generator=generator) * 0.3 for width in (12, 12, 5))
    log_decay = -torch.rand(2, 50, channels, generator=generator) * 40
    beta, state = torch.rand(2, 50, 1, generator=generator), torch.randn(2, 12, 5, generator=generator)
    out, moved = chunk_rule(q, k, v, log_decay, beta, state)
    turned = [x.transpose(0, 1) for x in (q, k, v, log_decay.exp(), beta[..., 0])]
    expected, left = reference.gated_delta_rule(*turned, state)
    torch.testing.assert_close(out.transpose(0, 1), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moved, left, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", TORCH_AND_ISAS)
def test_drafts_that_come_and_go(level: Isa, dtype: torch.dtype) -> None:
    """Two sequences, of which a step computes a known token and drafts: what was accepted is what the recurrence gives
    for the tokens without drafts, and the record at its end too."""
    limit_isa(level)
    for shape in SHAPES:
        for seed in range(3):
            check_drafts(shape, dtype, seed)


def check_drafts(shape: DeltaShape, dtype: torch.dtype, seed: int, most: int = 3, count: int = 12) -> None:
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    delta = make_delta(shape, generator)
    truth = [make_inputs(shape, count, dtype, generator) for _ in range(2)]
    sizes = [(shape.taps - 1, shape.channels), (shape.num_heads, shape.key_dim, shape.value_dim)]
    sizes += [(most, shape.channels), (most, shape.num_heads), (most, shape.decay_size)]
    dtypes = [dtype, torch.float32, dtype, dtype, dtype]
    cache = tuple(torch.randn(5, *size, generator=generator).to(kind) for size, kind in zip(sizes, dtypes, strict=True))
    before = tuple(field.clone() for field in cache)
    record, done, kept = [1, 3], [0, 0], [0, 0]
    outs: list[list[Tensor]] = [[], []]
    while min(done) < count:
        rows, starts, members, accepted = [], [0], [], []
        for sequence in (index for index in range(2) if done[index] < count):
            first, guesses = done[sequence], chance.randint(0, min(most, count - done[sequence] - 1))
            right = chance.randint(0, guesses)
            lies = make_inputs(shape, guesses - right, dtype, generator)
            rows.append(
                [torch.cat([x[first : first + 1 + right], y]) for x, y in zip(truth[sequence], lies, strict=True)]
            )
            starts.append(starts[-1] + 1 + guesses)
            read = record[sequence]
            record[sequence] = written = read + 1 if read % 2 else read - 1
            members.append((read, written, kept[sequence], guesses))
            accepted.append((sequence, right))
        pieces = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        total = starts[-1]
        runs = StateRuns(torch.tensor(starts), *torch.tensor(members).T.contiguous().unbind())
        step = step_of([1] * total, [0] * total, [0] * total)
        assert step.state is not None
        step = structs.replace(step, state=step.state._replace(runs=runs))
        out = GatedDeltaStep(step)(*pieces, delta, cache)
        for index, (sequence, right) in enumerate(accepted):
            outs[sequence].append(out[starts[index] : starts[index] + 1 + right])
            done[sequence] += 1 + right
            kept[sequence] = right
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for sequence in range(2):
        first = 1 + 2 * sequence
        expected, _, _ = wanted(truth[sequence], delta, before[0][first], before[1][first])
        torch.testing.assert_close(torch.cat(outs[sequence]).float(), expected, **tolerance)
    assert all(torch.equal(field[0], old[0]) for field, old in zip(cache, before, strict=True))
