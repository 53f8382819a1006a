"""Steps in parts that take turns: whatever the engine does on the way, tokens are those of plain generation (float32)."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import hf_tiny
import pytest
import torch
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped import EACH
from rank_parts import Job, drive, mailbox_ranks
from test_equality import Plain, check, jobs_strategy, run, settings_strategy

from configs.dbo import DboPlan
from dbo.steps import drain, weave
from models.tiny import CHECKPOINT

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("overlap")).path)


@pytest.fixture(scope="session")
def embedded() -> Plain:
    return Plain(CHECKPOINT)


def test_models_know_nothing_of_it() -> None:
    """They pass `lane` on; no other line of theirs speaks of lanes, overlap or streams (the residual stream is no such)."""
    allowed = re.compile(
        r", lane: int( = 0)?[,)]|, (context\.)?lane[,)]|residual stream|^ +lane: int( = 0,)?$|lane: of the exchanges"
    )
    checked = 0
    models = Path(__file__).parent.parent.parent / "models"
    for path in (models / "decoder.py", *sorted(models.glob("*/*.py"))):
        if path.parent.name == "tiny":  # data and training of the embedded model
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"\blanes?\b|overlap|stream|weave|dbo\.(?!steps import Steps$|alive import mark$)", line):
                assert allowed.search(line), f"{path.name}:{number}: {line.strip()}"
                checked += 1
    assert checked >= 4


def test_all_ranks_split_the_same_steps(plain: Plain) -> None:
    """One rank has a long prompt, one a short request, two have nothing; the long prompt decides while it lasts."""
    dbo = DboPlan(decode_tokens=1000, prefill_tokens=6)
    jobs = [Job(list(range(2, 26)), 5), Job([5, 6, 7], 9)]
    ranks = mailbox_ranks(plain.path, 4, dbo=dbo, max_num_batched_tokens=8)
    check(plain, jobs, drive(ranks, jobs))
    assert [rank.stats.dbo_steps for rank in ranks] == [3] * 4, "24 tokens in steps of 8"


@settings(max_examples=examples(25), deadline=None)
@given(jobs=jobs_strategy(), choices=settings_strategy(), size=st.sampled_from([1, 2, 4]), dbo=st.sampled_from(EACH))
def test_ranks_in_one_thread(
    plain: Plain, jobs: list[Job], choices: dict[str, object], size: int, dbo: DboPlan
) -> None:
    run(plain, jobs, {**choices, "all2all_backend": "mailbox", "dbo": dbo}, size)


@settings(max_examples=examples(8), deadline=None)
@given(jobs=jobs_strategy(), choices=settings_strategy(), size=st.sampled_from([1, 2]), dbo=st.sampled_from(EACH))
def test_latent_attention(
    embedded: Plain, jobs: list[Job], choices: dict[str, object], size: int, dbo: DboPlan
) -> None:
    run(embedded, jobs, {**choices, "dbo": dbo}, size)


def test_nothing_is_measured_while_a_rank_practises(plain: Plain, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks come to the end of what they practise one after another: one that has would else wait for the others in a
    measurement of which they know nothing."""
    caplog.set_level(logging.INFO, "moesaic.overlap")
    ranks = mailbox_ranks(plain.path, 2, dbo=DboPlan())
    job = Job([5, 6, 7], 4)
    drain(weave(*(rank.steps() for rank in ranks)))  # they meet, and begin to measure
    with ranks[1].practising(alone=False):
        assert drive(ranks, [job])[0].finish_reason == "length"
    assert "dbo_measured" not in caplog.text
    assert drive(ranks, [job])[0].finish_reason == "length"
    assert caplog.text.count("event=dbo_measured") == len(ranks)
