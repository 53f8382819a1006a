"""Sampling in Triton draws what engine/sampling/sampler.py draws, and compiles for Hopper and Blackwell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_support import as_on_gpu, compiling, report, running

from engine.sampling.noise import exponentials, race_bits, seed_keys, words
from engine.sampling.sampler import sample
from engine.sampling.sampling_table import LOGPROBS, MIN_P, RANDOM, TOP_K, TOP_P, SamplingBatch
from layers.triton import sampling as triton_sampling

pytestmark = pytest.mark.triton

ROWS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.5, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.9, 20, 0.9, 0.02),
    (1e-5, 0, 1.0, 0.0),
    (1.0, 1, 0.5, 0.0),
    (2.0, 250, 0.99, 0.0),
]


def make_batch(rows: list[tuple[float, int, float, float]], vocab: int) -> SamplingBatch:
    needs = [RANDOM | TOP_K * (k > 0) | TOP_P * (p < 1) | MIN_P * (m > 0) for _, k, p, m in rows]
    columns = list(zip(*rows, strict=True))
    return SamplingBatch(
        len(rows), vocab, int(np.bitwise_or.reduce(needs)), np.array(needs, np.int64),
        np.arange(7, 7 + len(rows)), seed_keys(range(len(rows))), np.array(columns[0], np.float32),
        np.array(columns[1], np.int64), np.array(columns[2], np.float32), np.array(columns[3], np.float32),
    )  # fmt: skip


def draw(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    columns = batch.temperature_P, batch.top_k_P, batch.top_p_P, batch.min_p_P, batch.seed_keys_P.view(np.int64)
    with running(triton_sampling):
        return triton_sampling.sample(logits, *map(torch.from_numpy, columns), torch.from_numpy(batch.positions_P))


@pytest.mark.parametrize("chunk", [64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_draws_what_the_sampler_draws(chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampling, "_CHUNK", chunk)
    rows = ROWS * (3 if chunk == 4096 else 1)
    vocab = 300
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(1)).mul(2).to(dtype)
    logits[:, 17] = -torch.inf
    ours = draw(logits, make_batch(rows, vocab))
    assert torch.equal(ours, sample(logits.clone(), make_batch(rows, vocab)).token_ids_P)


def test_the_sampler_asks_for_it_on_a_gpu() -> None:
    """Rows without a temperature beside others; with processed log-probabilities torch's form runs."""
    rows = ROWS[:3]
    batch = make_batch(rows, 50)
    batch.needs_P[1] = 0
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    expected = sample(logits.clone(), batch).token_ids_P
    batch.needs_P[0] |= LOGPROBS
    batch.needs |= LOGPROBS
    batch.num_logprobs_P = np.array([2, 0, 0])
    processed = sample(logits.clone(), batch, "processed_logprobs")
    with as_on_gpu():
        assert torch.equal(sample(logits.clone(), batch, "processed_logprobs").token_ids_P, processed.token_ids_P)
        ours = sample(logits.clone(), batch)
    assert torch.equal(ours.token_ids_P, expected)
    assert ours.logprobs is not None and ours.logprobs[0] is not None and ours.logprobs[1] is None


def test_equals_at_the_end_are_all_kept() -> None:
    """Logits of a few values: whole classes stay or go, and every token of a class can be drawn."""
    vocab, num = 48, 24
    logits = (torch.arange(vocab) % 4).float().repeat(num, 1)
    rows = [(1.0, 3, 1.0, 0.0), (1.0, 14, 0.9, 0.0), (1.0, 0, 0.3, 0.0)] * (num // 3)
    ours = draw(logits, make_batch(rows, vocab))
    assert torch.equal(ours, sample(logits.clone(), make_batch(rows, vocab)).token_ids_P)
    assert (ours[0::3] % 4 == 3).all() and (ours[1::3] % 4 >= 2).all() and (ours[2::3] % 4 == 3).all()


def test_a_row_with_every_token_forbidden_gets_a_valid_one() -> None:
    token = draw(torch.full((1, 40), -torch.inf), make_batch([(1.0, 3, 0.9, 0.1)], 40))
    assert 0 <= int(token) < 40


def test_the_noise_is_the_engines() -> None:
    """Two tokens: who wins changes where their chances are as their numbers, for chances around that."""
    one, other = exponentials(race_bits(words(seed_keys([3]), np.array([11])), 2))[0].tolist()
    for share, token in ((one - 1e-5, 1), (one + 1e-5, 0)):
        logits = torch.tensor([[np.log(share), np.log(other)]], dtype=torch.float32)
        batch = make_batch([(1.0, 0, 1.0, 0.0)], 2)
        batch.seed_keys_P, batch.positions_P = seed_keys([3]), np.array([11])
        assert draw(logits, batch).tolist() == [token]


@pytest.mark.parametrize("capability", [90, 100])
def test_compiles(capability: int) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with compiling(capability, triton_sampling) as found:
        for dtype in (torch.float32, torch.bfloat16):
            integers = meta(64, dtype=torch.int64)
            triton_sampling.sample(
                meta(64, 129280, dtype=dtype), meta(64), integers, meta(64), meta(64), integers, integers
            )
    report(found)
    assert len(found) == 2 and all(item.spills == 0 for item in found)
