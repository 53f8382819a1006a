"""Native sampling equals the torch sampler token by token, on every instruction set that this CPU has.

Where two tokens are within rounding of each other at the end of a race the two may differ; the seeds here are fixed, so that does
not happen from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import EVERY_ISA, ISAS

from engine.sampling.noise import exponentials, race_bits, seed_keys, words
from engine.sampling.sampler import sample
from engine.sampling.sampling_table import GRAMMAR, SamplingBatch, SamplingTable
from engine.schedule import NewRow
from front.params import SamplingParams
from native import Isa, best_isa, limit_isa, sampling

pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not there")
STRETCH = 128  # native/src/sampling.h

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.4},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 700},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.8},
    {"top_k": 900, "top_p": 0.95, "min_p": 0.001},
    {"temperature": 2.0, "top_p": 0.7, "min_p": 0.01},
    {"top_p": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    {"temperature": 0.0, "repetition_penalty": 0.7, "logit_bias": {3: 4.0, 5: -100.0}},
    {"allowed_token_ids": tuple(range(0, 4000, 7)), "top_k": 9},
    {"bad_words_token_ids": ((7, 2), (9,)), "min_tokens": 9, "logit_bias": {11: 30.0}},
    {"logprobs": 3, "top_k": 12},
]


@pytest.fixture(autouse=True)
def natively() -> Iterator[None]:
    limit_isa(best_isa())
    yield
    torch.set_num_threads(1)


def batch_of(
    params: list[dict[str, Any]], vocab_size: int, num_valid: int | None = None, seed: int = 0
) -> SamplingBatch:
    table = SamplingTable(len(params), vocab_size, "cpu", num_valid)
    history = [token % (num_valid or vocab_size) for token in (1, 5, 9, 5, 7)]
    for row, some in enumerate(params):
        table.set(row, NewRow(row, row, history, 2, SamplingParams(**some), seed * 1000 + row, (0,)))
    return table.gather(list(range(len(params))), [5] * len(params))


def both(logits: torch.Tensor, batch: SamplingBatch, level: Isa) -> tuple[list[int], list[int]]:
    before = logits.clone()
    limit_isa(level)
    ours = sample(logits, batch).token_ids_P.tolist()
    assert torch.equal(logits, before) or logits.isnan().any()  # the kernel changes nothing
    limit_isa(Isa.NONE)
    return ours, sample(logits.clone(), batch).token_ids_P.tolist()


@pytest.mark.parametrize("level", EVERY_ISA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 20, STRETCH, 3 * STRETCH + 5, 4001, 32000])
def test_equals_the_torch_sampler(vocab_size: int, dtype: torch.dtype, level: Isa) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    for scale in (0.2, 3.0):
        batch = batch_of(PARAMS * 2, vocab_size)
        logits = (torch.randn(len(PARAMS) * 2, vocab_size, generator=generator) * scale).to(dtype)
        ours, wanted = both(logits, batch, level)
        assert ours == wanted


def masked(batch: SamplingBatch, num: int) -> SamplingBatch:
    """Every row but each sixth has one of five kinds of masks."""
    draw = np.random.default_rng(num)
    masks = draw.integers(0, 1 << 32, (5, -(-num // 32)), np.uint32)
    masks[1] = 0xFFFFFFFF
    masks[2] *= draw.random(masks.shape[1]) < 0.1  # of most words nothing
    masks[3] &= 1 << 13
    masks[4] = 0
    masks[4, (num - 1) // 32] = 1 << (num - 1) % 32  # the last one alone
    masks[:, -1] &= (2 << (num - 1) % 32) - 1  # there is none behind the last token
    mask_P = np.arange(batch.num_rows) % 6
    batch.masks = np.where(mask_P == 5, -1, mask_P), masks.view(np.int32)
    batch.needs |= GRAMMAR
    batch.needs_P = np.where(mask_P == 5, batch.needs_P, batch.needs_P | GRAMMAR)
    return batch


@pytest.mark.parametrize("level", EVERY_ISA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [20, 33, 3 * STRETCH + 5, 4001])
def test_masks_of_grammars(vocab_size: int, dtype: torch.dtype, level: Isa) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    rows = [params for params in PARAMS for _ in range(6)]
    logits = (torch.randn(len(rows), vocab_size, generator=generator) * 2).to(dtype)
    batch = masked(batch_of(rows, vocab_size), vocab_size)
    ours, wanted = both(logits, batch, level)
    assert ours == wanted
    assert batch.masks is not None
    of, masks = batch.masks
    for p, token in enumerate(ours):
        if of[p] >= 0 and masks[of[p]].any():
            assert masks[of[p]].view(np.uint32)[token // 32] >> (token % 32) & 1


@pytest.mark.slow
@pytest.mark.parametrize("level", EVERY_ISA)
def test_thousands_of_rows_of_a_large_vocabulary(level: Isa) -> None:
    torch.set_num_threads(2)
    logits = torch.randn(60, 151936, generator=torch.Generator().manual_seed(0)) * 2.5
    for seed in range(3):
        ours, wanted = both(logits, batch_of((PARAMS * 4)[:60], 151936, 151643, seed), level)
        assert ours == wanted
    small = logits[:, :50].repeat(60, 1)
    batch = batch_of([{"top_p": 0.9, "temperature": 0.1 + i / 1000} for i in range(len(small))], 50)
    ours, wanted = both(small.contiguous(), batch, level)
    assert ours == wanted


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.sampled_from([-torch.inf, -3.0, -0.0, 0.0, 0.5, 0.5, 1.0, 2.0]), min_size=1, max_size=400),
    params=st.lists(st.sampled_from(PARAMS), min_size=1, max_size=5),
    level=st.sampled_from(ISAS or [Isa.NONE]),
    seed=st.integers(0, 50),
)
def test_ties_and_forbidden_tokens(values: list[float], params: list[dict[str, Any]], level: Isa, seed: int) -> None:
    """Equal logits are kept or dropped together; minus infinity is never drawn while there is anything else."""
    logits = torch.tensor([values]).repeat(len(params), 1)
    batch = batch_of(params, len(values), seed=seed)
    ours, wanted = both(logits, batch, level)
    allowed = dict(batch.allowed)
    for p, (own, other) in enumerate(zip(ours, wanted, strict=True)):
        left = {token for token, value in enumerate(values) if value > -torch.inf}
        if p in allowed:
            left &= set(allowed[p].tolist())
        if batch.forbidden is not None:
            left -= set(batch.forbidden.ids_N[batch.forbidden.p_N == p].tolist())
        assert 0 <= own < len(values)
        if left:  # else any token will do
            assert own == other and own in left


@pytest.mark.parametrize("level", EVERY_ISA)
def test_nothing_but_the_valid_tokens_is_read_and_nan_is_no_token(level: Isa) -> None:
    num = STRETCH + 3
    logits = torch.full((len(PARAMS), num + 9), torch.nan)
    logits[:, :num] = torch.randn(len(PARAMS), num, generator=torch.Generator().manual_seed(4))
    clean = logits[:, :num].clone()
    limit_isa(level)
    tokens = sample(logits, batch_of(PARAMS, num + 9, num)).token_ids_P.tolist()
    assert tokens == sample(clean, batch_of(PARAMS, num)).token_ids_P.tolist()
    logits[:, ::2] = torch.nan
    assert all(
        token % 2 for token in sample(logits, batch_of([{}, {"top_k": 3}] * 9, num + 9, num)).token_ids_P.tolist()
    )
    for hopeless in (torch.nan, -torch.inf, torch.inf):
        logits.fill_(hopeless)
        assert all(0 <= t < num for t in sample(logits, batch_of(PARAMS, num + 9, num)).token_ids_P.tolist())


@pytest.mark.parametrize("level", EVERY_ISA)
def test_the_noise_is_that_of_engine_noise(level: Isa) -> None:
    """Of equally likely tokens the one with the smallest number wins, also where a register is not filled."""
    limit_isa(level)
    for position in (0, 1, 77, 2**40):
        for seed in (0, 1, -1, 2**63):
            for num in (1, 5, 100, 1000):
                table = SamplingTable(1, num)
                table.set(0, NewRow(0, 0, [0], 1, SamplingParams(), seed, (0,)))
                token = sample(torch.zeros(1, num), table.gather([0], [position])).token_ids_P.item()
                assert token == int(
                    exponentials(race_bits(words(seed_keys([seed]), np.array([position])), num)).argmin()
                )


@pytest.mark.parametrize("level", ISAS, ids=lambda level: level.name)
def test_every_draw_of_a_large_vocabulary(level: Isa) -> None:
    """Of 40,000 tokens nearly all are never looked at closely; the winner is never among those."""
    logits = torch.randn(40, 40_000, generator=torch.Generator().manual_seed(4)) * 0.5
    batch = batch_of([{}] * 40, 40_000)
    limit_isa(level)
    ours = sample(logits.clone(), batch).token_ids_P
    scores = logits.double().softmax(-1) / exponentials(race_bits(words(batch.seed_keys_P, batch.positions_P), 40_000))
    assert torch.equal(ours, scores.argmax(-1))


def test_a_row_does_not_depend_on_company_threads_or_instruction_set() -> None:
    logits = torch.randn(len(PARAMS), 5000, generator=torch.Generator().manual_seed(9)) * 2
    found = []
    for threads in (1, 3):
        for level in ISAS:
            torch.set_num_threads(threads)
            limit_isa(level)
            found.append(sample(logits, batch_of(PARAMS, 5000)).token_ids_P.tolist())
    assert all(one == found[0] for one in found)


def test_no_rows() -> None:
    empty = torch.empty(0, 10)
    batch = batch_of([{"top_k": 3}], 10)
    none = batch.positions_P[:0]
    draws = sampling.Draws(
        none, batch.temperature_P[:0], batch.top_p_P[:0], batch.min_p_P[:0], none, batch.seed_keys_P[:0], none
    )
    assert sampling.draw_tokens(empty, draws, sampling.Edits()).tolist() == []
