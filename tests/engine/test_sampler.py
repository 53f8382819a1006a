"""The sampler against a plain numpy reading of its definition, and against statistics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.noise import exponentials, race_bits, seed_keys, words
from engine.sampling.sampler import Sampled, sample
from engine.sampling.sampling_table import SamplingTable
from engine.schedule import NewRow
from front.messages import Logprobs, LogprobsMode
from front.params import SamplingParams

torch.set_num_threads(1)

Row = tuple[dict[str, Any], list[int], int]  # parameters, tokens, prompt length


def row(tokens: list[int] | None = None, prompt_len: int | None = None, **params: Any) -> Row:
    tokens = [1, 2, 3] if tokens is None else tokens
    return params, tokens, len(tokens) if prompt_len is None else prompt_len


def new_row(number: int, request: Row, seed: int = 0, eos: tuple[int, ...] = (0,)) -> NewRow:
    params, tokens, prompt_len = request
    return NewRow(number, number, tokens, prompt_len, SamplingParams(**params), seed, eos)


def draw(
    logits: torch.Tensor,
    requests: list[Row],
    seeds: list[int] | None = None,
    mode: LogprobsMode = "raw_logprobs",
    num_valid_tokens: int | None = None,
) -> Sampled:
    table = SamplingTable(len(requests) + 2, logits.shape[1], "cpu", num_valid_tokens)
    rows = list(range(len(requests), 0, -1))  # rows are not in the order of the logits
    for number, request, seed in zip(rows, requests, seeds or range(len(requests)), strict=True):
        table.set(number, new_row(number, request, seed))
    batch = table.gather(rows, [len(tokens) for _, tokens, _ in requests])
    return sample(logits.clone(), batch, mode)


def tokens_of(sampled: Sampled) -> list[int]:
    assert sampled.token_ids_P.dtype == torch.int64
    result: list[int] = sampled.token_ids_P.tolist()
    return result


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# ---- noise -----------------------------------------------------------------------------------------------------------


def test_noise_is_splitmix64() -> None:
    # SplitMix64 started at 0: the first outputs of the reference implementation.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert words(np.zeros(3, np.uint64), np.arange(3)).tolist() == expected


def test_noise_depends_on_seed_position_and_token_only() -> None:
    seeds = [0, 1, 2**63, -1, 2**64 - 1, 2**70]
    keys = seed_keys(seeds)
    assert keys[3] == keys[4] and keys[0] == keys[5] and len(set(keys.tolist())) == 4
    some = words(keys, np.arange(6))
    together = exponentials(race_bits(some, 300))
    assert torch.equal(exponentials(race_bits(some[2:3], 200)), together[2:3, :200])
    assert (together > 0).all() and together.isfinite().all()


def test_tokens_have_the_numbers_that_the_definition_says() -> None:
    """In plain integers; native and Triton draws are compared with these numbers elsewhere."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    [word] = words(seed_keys([5]), np.array([7])).tolist()
    found = exponentials(race_bits(np.array([word], np.uint64), 2000))[0].tolist()
    for token, number in enumerate(found):
        bits = mix(mix((token + word) & 0xFFFFFFFF) ^ word >> 32)
        assert number == pytest.approx(-math.log1p(-(bits + 0.5) / 2**32), rel=1e-14)


def test_numbers_are_exponential_and_independent() -> None:
    """Of neighbouring tokens, positions and seeds."""
    values = torch.stack(
        [exponentials(race_bits(words(seed_keys([seed] * 200), np.arange(200)), 64)) for seed in range(8)]
    ).numpy()
    counts = np.histogram(np.exp(-values), 50, (0, 1))[0]
    mean = values.size / 50
    assert ((counts - mean) ** 2 / mean).sum() < 85.4  # chi-square, 49 degrees of freedom, 0.1 %
    for one, other in (
        (values[1:], values[:-1]),
        (values[:, 1:], values[:, :-1]),
        (values[:, :, 1:], values[:, :, :-1]),
    ):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / math.sqrt(one.size)


# ---- greedy and edits ------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.zeros(2, 700)
    logits[0, [40, 600]] = 5
    assert tokens_of(draw(logits, [row(temperature=0), row(temperature=0)])) == [40, 0]


def test_padding_of_the_vocabulary_is_never_sampled() -> None:
    logits = torch.zeros(3, 16)
    logits[:, 12:] = 100
    requests = [row(temperature=0), row(), row(logprobs=-1, top_p=0.9)]
    for seed in range(20):
        sampled = draw(logits, requests, [seed] * 3, num_valid_tokens=12)
        assert max(tokens_of(sampled)) < 12
    assert sampled.logprobs is not None and sampled.logprobs[2] is not None
    assert len(sampled.logprobs[2].ids) == 13 and sampled.logprobs[2].values[0] == pytest.approx(-math.log(12))
    with pytest.raises(ValueError, match="num_valid_tokens"):
        SamplingTable(1, 8, "cpu", 9)


@pytest.mark.parametrize(
    ("params", "tokens", "prompt_len", "expected"),
    [
        ({"allowed_token_ids": (4, 7, 99)}, [1], 1, 7),
        ({"logit_bias": {3: 100.0, 99: 100.0}}, [1], 1, 3),
        ({"allowed_token_ids": (4, 7), "logit_bias": {3: 100.0}}, [1], 1, 7),
        ({"bad_words_token_ids": ((9,),)}, [1], 1, 8),
        ({"bad_words_token_ids": ((5, 9),)}, [1, 5], 1, 8),
        ({"bad_words_token_ids": ((5, 9),)}, [1, 5, 6], 1, 9),
        ({"bad_words_token_ids": ((5, 9),)}, [1, 5], 2, 9),  # the word began in the prompt
        ({"bad_words_token_ids": ((6, 5, 9),)}, [5], 0, 9),
        ({"min_tokens": 1, "stop_token_ids": (9,)}, [1], 1, 8),
        ({"min_tokens": 1, "stop_token_ids": (9,)}, [1, 2], 1, 9),
        ({"min_tokens": 2, "stop_token_ids": (9, 99)}, [1, 2], 1, 8),
        ({"presence_penalty": 1.5}, [1, 9], 1, 8),
        ({"presence_penalty": 1.5}, [1, 9], 2, 9),  # the prompt does not count
        ({"frequency_penalty": 0.6}, [1, 9], 1, 9),
        ({"frequency_penalty": 0.6}, [1, 9, 9], 1, 8),
        ({"repetition_penalty": 1.5}, [9], 1, 8),
        ({"repetition_penalty": 0.5}, [8], 1, 8),
    ],
)
def test_edits_change_the_best_token(params: dict[str, Any], tokens: list[int], prompt_len: int, expected: int) -> None:
    logits = torch.arange(10.0)[None]
    assert tokens_of(draw(logits, [row(tokens, prompt_len, temperature=0, **params)])) == [expected]


def test_min_tokens_forbids_eos() -> None:
    logits = torch.arange(10.0).flip(0)[None]
    assert tokens_of(draw(logits, [row([1], temperature=0, min_tokens=1)])) == [1]
    assert tokens_of(draw(logits, [row([1], temperature=0)])) == [0]


def test_penalties_equal_their_definition() -> None:
    tokens, prompt_len = [3, 4, 4, 5, 5, 6, 6, 6], 3
    logits = random_logits(1, 8)
    request = row(
        tokens,
        prompt_len,
        temperature=0,
        repetition_penalty=1.7,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logprobs=-1,
    )
    found = draw(logits, [request], mode="processed_logits").logprobs
    assert found is not None and found[0] is not None
    expected = logits[0].tolist()
    for token in set(tokens):
        count = tokens[prompt_len:].count(token)
        expected[token] *= 1 / 1.7 if expected[token] > 0 else 1.7
        expected[token] -= 0.3 * count + 0.4 * (count > 0)
    values = dict(zip(found[0].ids[1:], found[0].values[1:], strict=True))
    assert [values[token] for token in range(8)] == pytest.approx(expected, abs=1e-5)


def test_history_grows_with_the_tokens_drawn() -> None:
    table = SamplingTable(4, 100)
    table.set(2, new_row(2, row([5], temperature=0, frequency_penalty=2.0, bad_words_token_ids=((1, 2, 3),))))
    table.set(0, new_row(0, row([5], temperature=0)))
    logits = torch.arange(100.0).expand(2, -1)
    drawn = []
    for position in range(1, 60):
        sampled = sample(logits.clone(), table.gather([0, 2], [position] * 2))
        table.note([0, 2], [[token] for token in sampled.token_ids_P.tolist()])
        drawn.append(tokens_of(sampled))
    assert all(first == 99 for first, _ in drawn)
    counts = np.bincount([second for _, second in drawn], minlength=100)
    expected = np.zeros(100, int)
    for _ in range(59):  # the same by the definition
        expected[(np.arange(100) - 2.0 * expected).argmax()] += 1
    assert counts.tolist() == expected.tolist()
    table.set(2, new_row(2, row([5, *[b for _, b in drawn]], 1, temperature=0, frequency_penalty=2.0)))
    again = table.gather([2], [60]).penalties
    assert again is not None and again.values_MN[0].sum() == 59


def test_cleared_rows_leave_nothing_behind() -> None:
    table = SamplingTable(4, 10)
    table.set(1, new_row(1, row(frequency_penalty=1.0, logit_bias={3: 1.0}, logprobs=2, min_tokens=1)))
    assert table.gather([1], [3]).needs
    table.clear(1)
    table.clear(1)
    table.set(1, new_row(1, row(temperature=0)))
    assert table.gather([1, 0], [3, 3]).needs == 0
    assert not (table._new_row or table._history or table._bias or table._stops or table._allowed)


# ---- draws -----------------------------------------------------------------------------------------------------------


def kept_by_definition(logits: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """Probabilities after temperature, min_p, top_k, top_p; no two logits are equal."""
    logits = logits.astype(np.float64) / params.get("temperature", 1.0)
    best = np.exp(logits - logits.max())
    best[best < params.get("min_p", 0.0)] = 0
    order = np.argsort(-best)
    best[order[params.get("top_k", len(order)) :]] = 0
    share = best / best.sum()
    before = np.cumsum(share[order]) - share[order]
    share[order[before >= params.get("top_p", 1.0)]] = 0
    return share / share.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
        {"top_p": 1e-6},
        {"top_k": 1},
    ],
)
@pytest.mark.parametrize("vocab_size", [50, 1000])
def test_draw_is_a_race_of_the_kept_tokens(params: dict[str, Any], vocab_size: int) -> None:
    logits = random_logits(40, vocab_size, seed=3)
    requests = [row([1] * (1 + i), **params) for i in range(40)]
    found = tokens_of(draw(logits, requests))
    for i, token in enumerate(found):
        share = kept_by_definition(logits[i].numpy(), params)
        number = exponentials(race_bits(words(seed_keys([i]), np.array([1 + i])), vocab_size))[0].numpy()
        assert share[token] > 0
        assert share[token] / number[token] >= (share / number).max() * (1 - 1e-5)


@pytest.mark.parametrize("noise", [5e-6, 1e-2])
def test_rounding_seldom_changes_a_draw(noise: float) -> None:
    """Less than half as often as it would change the place where one number falls in the cumulative distribution."""
    logits = random_logits(2000, 512, seed=8)
    requests = [row()] * 2000
    noisy = logits + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    flips = int((draw(logits.clone(), requests).token_ids_P != draw(noisy.clone(), requests).token_ids_P).sum())
    number = torch.rand(2000, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    places = [(x.double().softmax(-1).cumsum(-1) < number).sum(-1) for x in (logits, noisy)]
    looked_up = int((places[0] != places[1]).sum())
    assert flips <= looked_up / 2 and flips <= 4 * noise * 2000


def test_top_p_falls_back_to_a_sort_when_the_first_candidates_hold_too_little() -> None:
    logits = random_logits(3, 5000, seed=5, scale=0.3)
    requests = [row(top_p=0.9), row(top_p=0.01), row(top_p=0.999)]
    found = draw(logits, [(p | {"logprobs": -1}, t, n) for p, t, n in requests], mode="processed_logits").logprobs
    for i, ((params, _, _), entry) in enumerate(zip(requests, found or [], strict=True)):
        assert entry is not None
        num_kept = sum(value > -math.inf for value in entry.values[1:])
        assert abs(num_kept - np.count_nonzero(kept_by_definition(logits[i].numpy(), params))) <= 1


def test_ties_at_the_edge_are_all_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]]).expand(300, -1)
    assert set(tokens_of(draw(logits, [row(top_k=2)] * 300))) == {0, 1, 2}
    assert set(tokens_of(draw(logits, [row(top_p=0.6)] * 300))) == {0, 1, 2}


def test_tiny_temperature_is_greedy_and_forbidding_everything_gives_some_token() -> None:
    logits = random_logits(4, 300, scale=30)
    assert tokens_of(draw(logits, [row(temperature=1e-9)] * 4)) == logits.argmax(-1).tolist()
    for params in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0}):
        found = tokens_of(draw(logits[:1], [row(allowed_token_ids=(), **params)]))
        assert 0 <= found[0] < 300


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.7}, {"temperature": 1.5, "min_p": 0.2}]
)
def test_frequencies_match_probabilities(params: dict[str, Any]) -> None:
    num_draws = 6000
    logits = random_logits(1, 12, seed=2, scale=1.5)
    found = tokens_of(draw(logits.expand(num_draws, -1), [row(**params)] * num_draws))
    share = kept_by_definition(logits[0].numpy(), params)
    counts = np.bincount(found, minlength=12)
    assert not counts[share == 0].any()
    kept = share > 0
    statistic = ((counts[kept] - num_draws * share[kept]) ** 2 / (num_draws * share[kept])).sum()
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 5, 200]),
        "top_p": st.sampled_from([1.0, 0.3, 0.95, 0.9999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "min_tokens": st.sampled_from([0, 2]),
        "logit_bias": st.sampled_from([None, {4: 3.0}]),
        "allowed_token_ids": st.sampled_from([None, tuple(range(0, 1500, 3))]),
        "bad_words_token_ids": st.sampled_from([(), ((7, 8), (9,))]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(ROWS, min_size=2, max_size=6),
    st.sampled_from([30, 1500]),
    st.sampled_from(["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]),
)
def test_no_row_influences_another(rows: list[dict[str, Any]], vocab_size: int, mode: LogprobsMode) -> None:
    requests = [row([1, 2, 7], 1 + i % 2, **params) for i, params in enumerate(rows)]
    logits = random_logits(len(rows), vocab_size, seed=len(rows))
    seeds = list(range(len(rows)))
    together = draw(logits, requests, seeds, mode)
    for i, request in enumerate(requests):
        alone = draw(logits[i : i + 1], [request], [seeds[i]], mode)
        assert tokens_of(alone) == [tokens_of(together)[i]]
        in_batch = None if together.logprobs is None else together.logprobs[i]
        assert (alone.logprobs[0] if alone.logprobs else None) == in_batch
    shuffled = draw(logits.flip(0), requests[::-1], seeds[::-1], mode)
    assert tokens_of(shuffled)[::-1] == tokens_of(together)


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def expected_logprobs(values: torch.Tensor, token: int, k: int) -> Logprobs:
    order = values.argsort(descending=True).tolist()
    ids = [token, *order[: len(order) if k < 0 else k]]
    return Logprobs(ids, values[ids].tolist(), order.index(token) + 1)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_in_all_modes(mode: LogprobsMode) -> None:
    logits = random_logits(4, 40, seed=9)
    biased = {"logit_bias": {3: 2.5, 5: -4.0}}
    requests = [
        row(temperature=0, logprobs=2, **biased),
        row(temperature=0.5, logprobs=-1, **biased),
        row(),
        row(temperature=0.5, logprobs=0),
    ]
    sampled = draw(logits, requests, mode=mode)
    tokens = tokens_of(sampled)
    values = logits.clone()
    if mode.startswith("processed"):
        values[:2, 3] += 2.5
        values[:2, 5] -= 4
        values[[1, 3]] /= 0.5
    if mode.endswith("logprobs"):
        values = values.log_softmax(-1)
    assert sampled.logprobs is not None and sampled.logprobs[2] is None
    for i, k in ((0, 2), (1, -1), (3, 0)):
        found, expected = sampled.logprobs[i], expected_logprobs(values[i], tokens[i], k)
        assert found is not None and found.ids == expected.ids and found.rank == expected.rank
        assert found.values == pytest.approx(expected.values, abs=1e-5)


def test_alternatives_by_name() -> None:
    """In the place of the best, beside rows that have these."""
    logits = random_logits(3, 40, seed=4)
    named = row(temperature=0, logprobs=0, logprob_token_ids=(7, 39, 0))
    sampled = draw(logits, [row(), named, row(temperature=0, logprobs=2)])
    values = logits.log_softmax(-1)
    assert sampled.logprobs is not None and sampled.logprobs[0] is None
    found, best = sampled.logprobs[1], sampled.logprobs[2]
    assert found is not None and best is not None
    assert found.ids == [int(logits[1].argmax()), 7, 39, 0] and found.rank == 1
    assert found.values == pytest.approx(values[1, found.ids].tolist(), abs=1e-5)
    assert best.ids == expected_logprobs(values[2], tokens_of(sampled)[2], 2).ids


def test_prompt_logprobs() -> None:
    logits = random_logits(5, 33)
    tokens = [4, 0, 31, 7, 7]
    padded = torch.nn.functional.pad(logits, (0, 3), value=50.0)
    for mode, values in (("raw_logprobs", logits.log_softmax(-1)), ("processed_logits", logits)):
        for k in (0, 3, -1):
            found = prompt_logprobs(padded, tokens, k, mode, 33)
            for entry, row_values, token in zip(found, values, tokens, strict=True):
                expected = expected_logprobs(row_values, token, k)
                assert entry.ids == expected.ids and entry.rank == expected.rank
                assert entry.values == pytest.approx(expected.values, abs=1e-5)
    assert prompt_logprobs(logits[:0], [], 1, "raw_logprobs") == []


@pytest.mark.parametrize("shift", [0.0, -100.0, 100.0])
def test_greedy_in_bfloat16_is_greedy_in_float32(shift: float) -> None:
    """Also where every logit of a row is negative, and where the best ones are equal."""
    torch.manual_seed(0)
    logits_PV = (torch.randn(33, 1000) * 3 + shift).bfloat16()
    logits_PV[3] = -0.0
    logits_PV[4, 7:] = logits_PV[4].max()
    expected = logits_PV.float().numpy().argmax(-1).tolist()
    assert draw(logits_PV, [row(temperature=0.0)] * 33).token_ids_P.tolist() == expected
