"""A schedule in the making: lists that grow while the scheduler decides. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.manager import CacheManager
from engine.request import Request, Status
from engine.schedule import NewRow, Schedule


class Draft:
    """A schedule in the making. `ones`: requests that compute one token and sample; `chunks`: all others."""

    __slots__ = (
        "budget",
        "budget_of_drafts",
        "chunk_counts",
        "chunk_drafts",
        "chunk_samples",
        "chunk_starts",
        "chunks",
        "new_blocks",
        "new_rows",
        "one_rows",
        "one_starts",
        "ones",
        "partial",
        "preempted",
        "step_id",
    )

    def __init__(self, step_id: int, budget: int, budget_of_drafts: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.budget_of_drafts = budget_of_drafts
        self.ones: list[Request] = []
        self.one_rows: list[int] = []
        self.one_starts: list[int] = []
        self.chunks: list[Request] = []
        self.chunk_starts: list[int] = []
        self.chunk_counts: list[int] = []
        self.chunk_samples: list[bool] = []
        self.chunk_drafts: list[list[int]] = []
        self.partial: list[Request] = []  # running, with more than one token to compute
        self.new_rows: list[NewRow] = []
        self.new_blocks: list[tuple[int, list[list[int]]]] = []
        self.preempted = False

    @property
    def num_first(self) -> int:
        """Outputs that begin with this step: what it samples behind a prompt."""
        return sum(request.length == request.prompt_len + 1 for request in self.chunks)

    def add(self, request: Request, count: int) -> None:
        """Compute the next `count` tokens of a request whose blocks are there."""
        start = request.num_computed
        end = start + count
        samples = end == request.length
        if samples and count == 1:
            self.ones.append(request)
            self.one_rows.append(request.row)
            self.one_starts.append(start)
        else:
            self.chunks.append(request)
            self.chunk_starts.append(start)
            self.chunk_counts.append(count)
            self.chunk_samples.append(samples)
            self.chunk_drafts.append([])
        request.num_computed = end
        request.length += samples
        request.last_step = self.step_id
        self.budget -= count

    def add_drafts(self, request: Request, drafts: list[int]) -> None:
        """Compute the one known token of a request and the drafts behind it. Only the known one counts as computed:
        what else there is of it comes with the update."""
        self.chunks.append(request)
        self.chunk_starts.append(request.num_computed)
        self.chunk_counts.append(1 + len(drafts))
        self.chunk_samples.append(True)
        self.chunk_drafts.append(drafts)
        request.num_computed += 1
        request.length += 1
        request.last_step = self.step_id
        self.budget -= 1 + len(drafts)
        self.budget_of_drafts -= len(drafts)

    def remove(self, request: Request) -> None:
        """Take a request that was scheduled in this very step out again (it is about to be preempted)."""
        self.new_blocks = [(row, blocks) for row, blocks in self.new_blocks if row != request.row]
        if request in self.ones:
            index = self.ones.index(request)
            del self.ones[index], self.one_rows[index], self.one_starts[index]
            self.budget += 1
            request.length -= 1
            return
        index = self.chunks.index(request)
        self.budget += self.chunk_counts[index]
        self.budget_of_drafts += len(self.chunk_drafts[index])
        request.length -= self.chunk_samples[index]
        del self.chunks[index], self.chunk_starts[index], self.chunk_counts[index], self.chunk_samples[index]
        del self.chunk_drafts[index]

    def place(self, request: Request) -> None:
        """The request has taken a row: tell the batch all that is known of it."""
        message = request.message
        self.new_rows.append(
            NewRow(
                row=request.row,
                request_id=request.request_id,
                token_ids=request.tokens.copy(),
                prompt_len=request.prompt_len,
                params=message.params,
                seed=message.seed,
                eos_token_ids=message.eos_token_ids,
                guide=request.guide,
                processors=request.processors,
                stay=request.stay,
            )
        )

    def restate(self, running: list[Request]) -> None:
        """Tell the batch of every running request, whatever it has heard before."""
        self.new_rows = []
        for request in running:
            self.place(request)
        self.new_blocks = [(request.row, [table.copy() for table in request.held.tables]) for request in running]

    def finish(
        self, freed_rows: list[int], cache: CacheManager, warm: Callable[[Sequence[Request]], list[bool]]
    ) -> Schedule:
        num_ones, requests = len(self.ones), self.ones + self.chunks
        reads: list[int] = []
        writes: list[int] = []
        kept: list[int] = []
        if cache.has_state:
            for request in requests:
                kept.append(cache.kept_inputs(request))
                read, written = cache.schedule_state(request)
                reads.append(read)
                writes.append(written)
        return Schedule(
            warm=warm(requests),
            drafts=[[] for _ in self.ones] + self.chunk_drafts if any(self.chunk_drafts) else [],
            state_reads=reads,
            state_writes=writes,
            state_kept=kept,
            step_id=self.step_id,
            freed_rows=freed_rows,
            new_rows=self.new_rows,
            new_blocks=self.new_blocks,
            rows=self.one_rows + [request.row for request in self.chunks],
            starts=self.one_starts + self.chunk_starts,
            counts=[1] * num_ones + self.chunk_counts,
            samples=[True] * num_ones + self.chunk_samples,
        )


def undo(steps: Sequence[tuple[Schedule, list[Request]]]) -> None:
    """Take back what these steps, in the order they were made, were to compute for the requests that run."""
    for step, requests in reversed(steps):
        for request, start in zip(requests, step.starts, strict=True):
            if request.status is Status.RUNNING:
                request.num_computed = start


def check_limits(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, chunked: bool, policy: str, async_depth: int
) -> None:
    """Of a scheduler. ValueError names the one that cannot be. chunked: prompts may be cut."""
    if max_num_seqs < 1 or max_num_batched_tokens < 1:
        raise ValueError(
            f"max_num_seqs ({max_num_seqs}) and max_num_batched_tokens ({max_num_batched_tokens}) must be at least 1"
        )
    if not chunked and max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_model_len ({max_model_len}) "
            "when chunked prefill is off"
        )
    if policy not in ("fcfs", "priority"):
        raise ValueError(f"scheduling policy {policy!r} is not one of fcfs, priority")
    if async_depth not in (0, 1):
        raise ValueError(f"async_depth ({async_depth}) must be 0 or 1")
