"""Streams of the embedded model while something drafts: what is tried, and what must come."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from overlapped import OFTEN
from rank_parts import Job, drive, engine_choices, mailbox_ranks, make_plan
from survivors import Survivors, tight

from configs.env import read_env
from configs.speculation import SpeculativeConfig
from engine.build import build_rank
from engine.rank import Rank
from models.eagle3.directory import model_directory
from models.tiny import CHECKPOINT

DRAFTER = Path(__file__).parents[1] / "speculation" / "drafter"  # of the embedded model: benchmarks/train_eagle3.py
METHODS = st.builds(
    SpeculativeConfig,
    method=st.sampled_from(["prediction", "ngram", "suffix", "mtp", "eagle3"]),
    num_speculative_tokens=st.integers(1, 5),
    prompt_lookup_min=st.just(1),
    prompt_lookup_max=st.just(3),
    adaptive=st.booleans(),
)


RANDOM = {"temperature": 0.8, "top_k": 20}
EDITS = {
    "temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 4, "stop_token_ids": (5, 9),
    "bad_words_token_ids": ((7,), (3, 8), (11, 12)), "logprobs": 1,
}  # fmt: skip
STEM = [1, 300, 412, 250, 611, 300, 412, 250, 611, 300, 412]
SIZES: dict[str, Any] = {"max_model_len": 36}


def served(speculation: SpeculativeConfig | None) -> Path:
    """The embedded model, with its drafter where that drafts."""
    if speculation is None or speculation.method != "eagle3":
        return CHECKPOINT
    return model_directory(CHECKPOINT, DRAFTER, read_env().cache_root / "drafters")


def undrafted(jobs: Sequence[Job], **plan: Any) -> dict[int, list[int]]:
    """The tokens of each job where nothing drafts, and none has company."""
    rank = build_rank(make_plan(CHECKPOINT, enable_prefix_caching=False, max_num_seqs=1, **plan))
    found = {index: got.tokens for index, got in enumerate(drive([rank], jobs))}
    rank.close()
    return found


def close(rank: Rank) -> None:
    """Nothing of a request is left."""
    scheduler = rank._scheduler
    scheduler.kv.check([])
    assert not scheduler.grammars.awaited
    speculation = scheduler.speculation
    assert not speculation._sources and not speculation._cold and not speculation._predictions._readings
    rank.close()


class Streams:
    """A job for each of these parameters, and what it must get whatever drafts and whatever else the engine does: the
    tokens of a rank where nothing drafts, and none has company."""

    def __init__(self, asked: Sequence[dict[str, Any]], **plan: Any) -> None:
        """asked: parameters of requests. plan: of every engine."""
        self.plan = {**SIZES, **plan}
        self.jobs = [
            Job([*STEM[: 11 - 2 * (i % 4)], 7 + i], 14 + i % 3, params=params) for i, params in enumerate(asked)
        ]

    @cached_property
    def expected(self) -> dict[int, list[int]]:
        return undrafted(self.jobs, **self.plan)

    def foretold(self) -> list[Job]:
        """Every second request brings a prediction, with a mistake in it."""
        found = []
        for index, job in enumerate(self.jobs):
            text = self.expected[index]
            more = {"prediction_token_ids": (*text[:5], 3, *text[6:])} if index % 2 else {}
            found.append(Job(job.prompt, job.max_tokens, params={**job.params, **more}))
        return found

    def check(self, data: st.DataObject, methods: st.SearchStrategy[SpeculativeConfig | None]) -> None:
        """Jobs that come at any time to one rank or two get these tokens, or the first of them if they are aborted."""
        count, jobs = len(self.jobs), self.foretold()
        plan = self.plan | data.draw(engine_choices(9)) | {"speculation": data.draw(methods)}
        plan["max_num_batched_tokens"] = data.draw(st.sampled_from([2, 7, 16, 64]))
        aborted = data.draw(st.sets(st.integers(0, count - 1), max_size=2), "aborted")
        arrivals = data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count), "arrivals")
        for index, (job, at) in enumerate(zip(jobs, arrivals, strict=True)):
            job.arrive, job.abort = at, at + 5 if index in aborted else None
        path = served(plan["speculation"])
        if data.draw(st.booleans(), "alone"):
            ranks = [build_rank(make_plan(path, **plan))]
        else:
            ranks = mailbox_ranks(path, 2, **plan, dbo=data.draw(st.sampled_from(OFTEN)))
        for index, got in enumerate(drive(ranks, jobs)):
            whole = self.expected[index]
            assert got.tokens == whole if index not in aborted else got.tokens == whole[: len(got.tokens)]
        for rank in ranks:
            close(rank)

    def endure(self, data: st.DataObject, **plan: Any) -> None:
        """They get these tokens though ranks die and come back."""
        cluster = Survivors(
            served(plan.get("speculation")), 3, slots_per_rank=16, **{**self.plan, **tight(data, 9), **plan}
        )
        cluster.endure(self.foretold(), data)
        assert cluster.released == self.expected
        for rank in cluster.ranks.values():
            close(rank)
