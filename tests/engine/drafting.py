"""Streams of the embedded model while something drafts: what is tried, and what must come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from overlapped import OFTEN
from rank_parts import Job, drive, engine_choices, mailbox_ranks, make_plan

from configs.speculation import SpeculativeConfig
from engine.build import build_rank
from engine.rank import Rank
from models.tiny import CHECKPOINT

METHODS = st.builds(
    SpeculativeConfig,
    method=st.sampled_from(["prediction", "ngram", "suffix", "mtp"]),
    num_speculative_tokens=st.integers(1, 5),
    prompt_lookup_min=st.just(1),
    prompt_lookup_max=st.just(3),
    adaptive=st.booleans(),
)


def undrafted(jobs: Sequence[Job], **plan: Any) -> dict[int, list[int]]:
    """The tokens of each job where nothing drafts, and none has company."""
    rank = build_rank(make_plan(CHECKPOINT, enable_prefix_caching=False, max_num_seqs=1, **plan))
    found = {index: got.tokens for index, got in enumerate(drive([rank], jobs))}
    rank.close()
    return found


def foretold(jobs: Sequence[Job], expected: dict[int, list[int]]) -> list[Job]:
    """Every second request brings a prediction, with a mistake in it."""
    found = []
    for index, job in enumerate(jobs):
        text = expected[index]
        more = {"prediction_token_ids": (*text[:5], 3, *text[6:])} if index % 2 else {}
        found.append(Job(job.prompt, job.max_tokens, params={**job.params, **more}))
    return found


def drafting_choices(methods: st.SearchStrategy[SpeculativeConfig | None]) -> st.SearchStrategy[dict[str, Any]]:
    """Of a plan."""
    more = st.fixed_dictionaries(
        {
            "speculation": methods,
            "dbo": st.sampled_from(OFTEN),
            "max_num_batched_tokens": st.sampled_from([2, 7, 16, 64]),
        }
    )
    return st.builds(lambda one, other: {**one, **other}, engine_choices(9), more)


def check_streams(
    jobs: Sequence[Job],
    expected: dict[int, list[int]],
    arrivals: Sequence[int],
    aborted: set[int],
    size: int,
    close: Callable[[Rank], None],
    **plan: Any,
) -> None:
    """Jobs that come at any time to so many ranks get these tokens, or the first of them if they are aborted."""
    jobs = foretold(jobs, expected)
    for index, (job, at) in enumerate(zip(jobs, arrivals, strict=True)):
        job.arrive, job.abort = at, at + 5 if index in aborted else None
    if size == 1:
        ranks = [build_rank(make_plan(CHECKPOINT, **{**plan, "dbo": None}))]
    else:
        ranks = mailbox_ranks(CHECKPOINT, size, **plan)
    for index, got in enumerate(drive(ranks, jobs)):
        whole = expected[index]
        assert got.tokens == whole if index not in aborted else got.tokens == whole[: len(got.tokens)]
    for rank in ranks:
        close(rank)
