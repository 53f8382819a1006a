"""Drafts from the text itself: what is proposed, what options say, and that no stream changes (float32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_tiny
import pytest
import torch
from rank_parts import Job, drive, make_plan

from cache.manager import Holding
from configs.speculation import SpeculativeConfig, parse_speculative_config
from engine.build import build_rank
from engine.request import Request
from engine.speculation.drafter import num_new
from engine.speculation.ngram import NgramDrafter
from engine.speculation.prediction import PredictionDrafter
from engine.speculation.suffix import SuffixDrafter
from front.messages import AddRequest
from front.params import SamplingParams

pytestmark = pytest.mark.speculation
torch.set_num_threads(1)

STEM = [3 + 5 * i % 80 for i in range(13)]


def request(prompt: list[int], output: list[int], prediction: tuple[int, ...] = ()) -> Request:
    params = SamplingParams(max_tokens=50, prediction_token_ids=prediction)
    message = AddRequest(request_id=1, token_ids=prompt + output, prompt_len=len(prompt), params=params, seed=0)
    return Request(message, (0.0,), 1000, Holding())


@pytest.mark.parametrize(
    ("sampled", "drafts", "count"), [([5], [], 1), ([5, 6, 7], [5, 6], 3), ([5, 6, 7], [5, 9], 2), ([5, 6], [4], 1)]
)
def test_what_counts(sampled: list[int], drafts: list[int], count: int) -> None:
    assert num_new(sampled, drafts) == count


@pytest.mark.parametrize(
    ("text", "limit", "drafts"),
    [
        ([1, 2, 3, 4, 9, 2, 3], 3, [4, 9, 2]),
        ([1, 2, 3, 4, 5, 2, 3, 7, 1, 2, 3], 2, [4, 5]),  # the longer run wins over the later one
        ([1, 2, 3, 4, 5, 2, 3, 7, 8, 2, 3], 2, [7, 8]),  # the later one of equals
        ([1, 2, 3], 3, []),
        ([8, 7, 8, 7, 8], 5, [7, 8, 7, 8, 7]),
    ],
)
def test_what_followed_the_same_tokens(text: list[int], limit: int, drafts: list[int]) -> None:
    one = request(text[:2], text[2:])
    assert NgramDrafter(2, 3).propose(one, limit) == drafts
    grown, drafter = request(text[:2], []), NgramDrafter(2, 3)
    for token in text[2:]:
        drafter.propose(grown, limit)
        grown.tokens.append(token)
    assert drafter.propose(grown, limit) == drafts
    drafter.forget(grown)
    assert not drafter._indices


def test_what_others_were_told() -> None:
    drafter = SuffixDrafter(8, 2, 4.0, 0.3)
    for output in ([4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 1, 2], [4, 5, 6, 7, 8, 3]):
        one = request([1, 2], output)
        drafter.propose(one, 4)
        drafter.forget(one)
    now = request([1, 2, 3], [4, 5, 6])
    assert drafter.propose(now, 4) == [7, 1, 2]  # the first text is gone; of the others the newer one is no likelier
    now.tokens.append(7)
    now.tokens.append(8)
    assert drafter.propose(now, 4) == [3]
    drafter.forget(now)
    assert len(drafter._ended) == 2 and drafter._num_kept == sum(len(text.tokens) for text in drafter._ended.values())
    while drafter._ended:
        drafter._drop()
    assert not drafter._where and not drafter._num_kept and not drafter._own


def test_a_text_that_repeats_itself() -> None:
    drafter = SuffixDrafter(24, 0, 1.0, 0.1)
    assert drafter.propose(request([1, 2, 3, 4, 5, 6, 2, 3], []), 5) == [4, 5, 6]  # of a run of two, and one more
    assert SuffixDrafter(24, 0, 1.0, 0.1).propose(request([1, 2, 3], []), 5) == []


@pytest.mark.parametrize(
    ("output", "drafts"),
    [
        ([], [10, 11]),
        ([10, 11], [12, 13]),
        ([10, 50], [12, 13]),  # another token in the place of one
        ([10, 50, 51, 13, 14], [15, 16]),  # found again
        ([10, 12, 13], [14, 15]),  # one left out
        ([10, 11, 12, 13, 14, 15, 16], []),
        ([10, 11, 12, 13, 14, 15, 16, 17, 18], []),
    ],
)
def test_what_the_client_expects(output: list[int], drafts: list[int]) -> None:
    one = request([1, 2], output, tuple(range(10, 17)))
    drafter = PredictionDrafter()
    assert drafter.propose(one, 2) == drafts
    drafter.forget(one)
    assert not drafter._readings


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "method must be one of prediction, ngram, suffix, mtp, eagle3, none"),
        ({"method": "eagle"}, "method must be one of"),
        ({"method": "ngram", "k": 3}, "unknown field 'k'"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "num_speculative_tokens must be an integer from 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max must be an integer from 1"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "must be at most prompt_lookup_max"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "a number from 0 to 1"),
        ({"method": "ngram", "adaptive": 1}, "adaptive must be true or false"),
        (
            {"model": "here", "draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size must be an integer from 1 to 1",
        ),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="speculative_config: ") as caught:
        parse_speculative_config(values)
    assert words in str(caught.value)


def test_names_and_defaults() -> None:
    assert parse_speculative_config({"method": "none"}) is None
    config = parse_speculative_config({"method": "ngram", "prompt_lookup_max": 3})
    assert config is not None and (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3)
    config = parse_speculative_config({"method": "deepseek_mtp"})
    assert config is not None and config.method == "mtp"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("drafters")).path


EDITS = {"presence_penalty": 0.3, "repetition_penalty": 1.2, "min_tokens": 6, "bad_words_token_ids": ((7,), (3, 8))}
JOBS = [
    Job(STEM * 2, 20),
    Job([*STEM, 5, *STEM[:4]], 17, params={"temperature": 0.8, "top_k": 20, "logprobs": 2}),
    Job(STEM[3:] * 2, 15, params={"temperature": 1.0, **EDITS}),
    Job(STEM[5:], 18, params={"temperature": 0.5, "stop_token_ids": (5, 9, 11)}),
]


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("method", ["ngram", "prediction", "suffix"])
def test_streams_stay_what_they_were(checkpoint: Path, method: Any, num_drafts: int) -> None:
    """Tokens, the numbers of their log-probabilities, and ends, of requests that repeat themselves or were foretold."""
    plain = build_rank(make_plan(checkpoint))
    expected = drive([plain], JOBS)
    jobs = [
        Job(
            job.prompt,
            job.max_tokens,
            params={**job.params, "prediction_token_ids": (*got.tokens[:6], 1, *got.tokens[7:])},
        )
        for job, got in zip(JOBS, expected, strict=True)
    ]
    config = SpeculativeConfig(
        method=method, num_speculative_tokens=num_drafts, prompt_lookup_min=1, prompt_lookup_max=3
    )
    rank = build_rank(make_plan(checkpoint, speculation=config))
    got = drive([rank], jobs if method == "prediction" else JOBS)
    stats = rank.stats
    assert [(one.tokens, one.finish_reason) for one in got] == [(one.tokens, one.finish_reason) for one in expected]
    for one, plain_one in zip(got, expected, strict=True):
        logprobs, wanted = ([x for out in g.outputs for x in out.logprobs or ()] for g in (one, plain_one))
        assert [x.ids for x in logprobs] == [x.ids for x in wanted]
    assert stats.steps < plain.stats.steps and stats.spec_drafts > 0
    assert sum(stats.spec_accepted_per_pos) == stats.spec_accepted_tokens
    outputs = [out for one in got for out in one.outputs]
    assert sum(out.num_accepted for out in outputs) == stats.spec_accepted_tokens
    assert sum(out.num_rejected for out in outputs) == stats.spec_draft_tokens - stats.spec_accepted_tokens
    rank._scheduler.kv.check([])
    plain.close()
    rank.close()
