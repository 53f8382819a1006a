"""Which tokens of which requests the next step computes. Plain integers, no torch.

One budget of tokens per step serves prompts and outputs alike. Running requests come first: every decode gets its one
token, prompts that were cut go on, then waiting requests are admitted while budget, rows and blocks last. When blocks
run out, the running request that comes last (by priority, then arrival) loses its blocks and waits again; what it had
computed is computed again later (or found in the prefix cache).

Asynchronous scheduling (async_depth 1): schedule() for step n+1 is called before update() for step n. A decode then
counts on a token that it has not seen (Request.length runs ahead of Request.tokens). Three things follow.

- A request that turns out to have ended at step n may also be in step n+1. What n+1 samples for it is thrown away.
  Ends by length are known in advance, and not scheduled past.
- A preempted or aborted request may be in step n. A token that n samples for a preempted one is released as usual.
- Steps run one after another on one device thread, so the blocks of a request may be handed out as soon as it is
  preempted or finished: writes of the steps in flight come before those of the next owner, and a findable block is
  never written to. A row, which the batch keeps state for, waits for the steps in flight (engine/batch_rows.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, Literal

from cache.manager import CacheManager
from cache.rows import CacheRows
from cache.takeover import Takeover
from engine.batch_rows import BatchRows
from engine.counts import Counts
from engine.request import Request, Status
from engine.schedule import Schedule
from engine.schedule_builder import Draft, check_limits, undo
from engine.speculation.speculation import Speculation
from engine.structured.grammars import Grammars, failure
from front.messages import AddRequest, Logprobs, RankStats, TokenOutput

if TYPE_CHECKING:
    from engine.sampling.processors import LogitsProcessors

_RUNNING, _FINISHED = Status.RUNNING, Status.FINISHED


class Scheduler:
    """The requests of one rank, from add() to their last TokenOutput. Not thread-safe.

    Per step the caller runs schedule(), the step, update(); with async_depth 1 it may call schedule() once more before
    update(). A schedule without rows needs no step and no update().
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        policy: Literal["fcfs", "priority"] = "fcfs",
        async_depth: int = 0,
        cache: CacheManager | None = None,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
        processors: LogitsProcessors | None = None,
        batch_rows: CacheRows | None = None,
    ) -> None:
        """cache: of a model that keeps more than rows per token in one paged group. speculation, grammars, processors:
        None: no request has any. batch_rows: what others read of them (cache/rows.py)."""
        check_limits(max_num_seqs, max_num_batched_tokens, max_model_len, enable_chunked_prefill, policy, async_depth)
        self.kv = cache or CacheManager(num_blocks, block_size, enable_prefix_caching)
        self.takeover = Takeover(self.kv)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_length = min(max_model_len, self.kv.capacity + 1)  # the last token sampled needs no place in the cache
        self.enable_chunked_prefill, self.policy, self.async_depth = enable_chunked_prefill, policy, async_depth
        self.speculation = speculation or Speculation()
        self.grammars, self._processors = grammars or Grammars("", "", 0), processors
        self.refused: list[TokenOutput] = []  # last outputs of requests that had no step
        self._requests: dict[int, Request] = {}  # all unfinished
        self.running: list[Request] = []  # sorted by order
        self.holds_prompts = False  # steps compute none until it is taken back (engine/overlap/cadence.py)
        self.waiting: list[Request] = []  # sorted by order; the preempted too
        self._in_flight: deque[tuple[Schedule, list[Request]]] = deque()
        self.rows = BatchRows(max_num_seqs, batch_rows)
        self._restates = False  # True after a rollback: the batch is told all anew
        self._next_step, self._updated_step, self._num_added = 0, -1, 0
        self.forget_counts()

    def forget_counts(self) -> None:
        """Count from here on."""
        self._counts = Counts()
        self.speculation.forget_counts()

    # ---- requests come and go ------------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> TokenOutput | None:
        """Queue a request. The output is its last one when there is nothing to run: "error" when the prompt can never
        fit, or the finish reason of a replayed sequence that had already ended; else None."""
        if message.request_id in self._requests:
            raise ValueError(f"request_id {message.request_id} is already in use")
        priority = (float(message.priority),) if self.policy == "priority" else ()
        order = (*priority, message.arrival, float(self._num_added))
        self._num_added += 1
        if not 0 < message.prompt_len < self.max_length:
            return TokenOutput(message.request_id, [], "error")
        request = Request(message, order, self.max_length, self.kv.new_holding())
        if self._processors is not None:
            request.processors = self._processors.of(message.params)
            if request.error:
                return failure(request)
        request.speculates = self.speculation.takes(request)
        if len(request.tokens) > request.prompt_len:
            _, reason, stop_reason = request.end_within(1)
            if reason is not None:
                return TokenOutput(message.request_id, [], reason, stop_reason)
        elif request.max_length <= request.prompt_len:  # max_tokens is 0
            return TokenOutput(message.request_id, [], "length")
        self._requests[request.request_id] = request
        if not self.grammars.put(request):
            insort(self.waiting, request)
        return None

    def abort(self, request_ids: list[int]) -> None:
        """Forget these requests at once; no output follows, also when a step in flight computes some. Unknown ones
        are ignored."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._finish(request)
        self._drop_finished()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def stats(self) -> RankStats:
        more = self.kv.counts | self._counts.fields | self.speculation.counts
        return RankStats(len(self.running), len(self.waiting), **more, taken_over=self.takeover.num_tokens)

    # ---- before a step -------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """The next step. Without rows when nothing can run now (no requests, or all wait for tokens in flight)."""
        assert len(self._in_flight) <= self.async_depth, "update() is missing"
        self.rows.release(self._updated_step)
        if self.grammars.awaited:
            self._take_guided()
        drafts = 0 if self.takeover.resumes else self.speculation.max_in_step
        draft = Draft(self._next_step, self.max_num_batched_tokens, drafts)
        self._next_step += 1
        self._schedule_decodes(draft)
        self._schedule_partial(draft)
        if self.waiting and not draft.preempted and not self.holds_prompts:
            self._admit(draft)
        if not draft.ones and not draft.chunks:
            return Schedule(draft.step_id)  # freed rows are kept for a schedule that is applied
        if self._restates:
            draft.restate(self.running)
        schedule = draft.finish(self.rows.take_freed(self._restates), self.kv, self.speculation.warm)
        self._restates = False
        self._counts.add_step(self.max_num_batched_tokens - draft.budget + draft.num_first)
        self._in_flight.append((schedule, draft.ones + draft.chunks))
        return schedule

    def _take_guided(self) -> None:
        """Requests whose grammars have been compiled wait with the others."""
        for request in self.grammars.take_ready(patient=not (self.running or self.waiting or self._in_flight)):
            insort(self.waiting, request)
            if request.guide is None:
                self.refused.append(failure(request))
                self._finish(request)

    def _schedule_decodes(self, draft: Draft) -> None:
        """One token for each running request that has its prompt behind it. The hot loop: it repeats Draft.add."""
        block_size = self.kv.block_size
        requests, rows, starts = draft.ones, draft.one_rows, draft.one_starts
        step_id = draft.step_id
        budget, quiet = draft.budget, self.speculation.quiet
        for request in self.running:  # preemption pops from its end, which the loop allows for
            start = request.num_computed
            length = request.length
            may = request.speculates and (request.guide is not None or not quiet)
            if length - start != 1 or (may and self.speculation.asks(request, len(self.running))):
                draft.partial.append(request)
                continue
            if length >= request.max_length:
                continue  # its last token is being sampled
            if not budget:
                break
            if not start % block_size and not self._reserve(request, length, draft):
                continue
            requests.append(request)
            rows.append(request.row)
            starts.append(start)
            request.num_computed = length
            request.length = length + 1
            request.last_step = step_id
            budget -= 1
        draft.budget = budget

    def _schedule_partial(self, draft: Draft) -> None:
        """Go on with prompts that an earlier step cut, and decode those that may have drafts."""
        for request in draft.partial:
            if not draft.budget:
                break
            if request.status is not _RUNNING:
                continue  # preempted a moment ago
            if request.length - request.num_computed == 1:
                self._schedule_drafts(request, draft)
                continue
            if self.holds_prompts:
                continue
            start, left = request.num_computed, request.length - request.num_computed
            count = self.kv.chunk(start, min(left, draft.budget), request.length)
            if self._reserve(request, request.num_computed + count, draft):
                draft.add(request, count)

    def _schedule_drafts(self, request: Request, draft: Draft) -> None:
        """A decode that waits until all its tokens are known, and then computes drafts behind the last one."""
        if request.num_pending or request.length >= request.max_length:
            return
        length = request.length
        room = min(request.max_length - 1, self.kv.room(request)) - length
        drafts = self.speculation.propose(request, min(draft.budget - 1, draft.budget_of_drafts, room))
        if not self._reserve(request, length + len(drafts), draft):
            return
        if drafts:
            draft.add_drafts(request, drafts)
        else:
            draft.add(request, 1)

    def _reserve(self, request: Request, num_tokens: int, draft: Draft) -> bool:
        """Get blocks for num_tokens tokens, from those that come last if need be. False: that was the request itself. A
        request alone always succeeds (max_length is bounded by the cache), so the first in order always advances."""
        while (new := self.speculation.allocate(request, num_tokens, self.kv)) is None:
            victim = self.running.pop()
            self._preempt(victim, draft)
            if victim is request:
                return False
        if new:
            draft.new_blocks.append((request.row, new))
        return True

    def _preempt(self, victim: Request, draft: Draft) -> None:
        if victim.last_step == draft.step_id:
            draft.remove(victim)
        self._release(victim)
        victim.num_computed = 0
        victim.num_preemptions += 1
        victim.status = Status.PREEMPTED
        insort(self.waiting, victim)
        self._counts.preemptions += 1
        draft.preempted = True

    def _admit(self, draft: Draft) -> None:
        """Let waiting requests in, strictly in order, while budget, rows and blocks last. A request is let in only when
        all its known tokens would fit now, though only this step's are given blocks: one that was just preempted would
        otherwise come back at once and be preempted again."""
        kv = self.kv
        num_admitted, held = 0, list[Request]()
        for request in self.waiting:
            if not draft.budget or not self.rows.any_free or request.num_pending:
                break
            prefix, num_cached = self.takeover.known(request)
            if self.takeover.holds:
                held.append(request)
                continue
            count = len(request.tokens) - num_cached
            if count > draft.budget and not self.enable_chunked_prefill:
                break
            count = kv.chunk(num_cached, min(count, draft.budget), len(request.tokens))
            if not kv.can_admit(request, prefix):
                break
            kv.admit(request, prefix)
            self.speculation.admit(request)
            new = self.speculation.allocate(request, num_cached + count, kv)
            if new is None or not self.takeover.bring(request, num_cached, num_cached + count):
                kv.free(request)  # in the next step it begins without
                break
            self._take_row(request, num_cached, draft)
            draft.new_blocks.append((request.row, [table.copy() for table in request.held.tables]))
            draft.add(request, count)
            insort(self.running, request)
            num_admitted += 1
        self.waiting[: num_admitted + len(held)] = held

    def _take_row(self, request: Request, num_cached: int, draft: Draft) -> None:
        request.row = self.rows.take(request.stay)
        request.status = _RUNNING
        request.num_computed = num_cached
        if request.num_cached < 0:  # else it was preempted, and its hits are its own work
            request.first_admitted(num_cached)
            if self.kv.enable_prefix_caching and request.prompt_logprobs is None:
                self.kv.num_queries += len(request.tokens)
                self.kv.num_hits += num_cached
        draft.place(request)

    # ---- after a step --------------------------------------------------------------------------------------------

    def update(
        self,
        schedule: Schedule,
        token_ids: list[list[int]],
        logprobs: list[list[Logprobs] | None] | None = None,
        prompt_logprobs: list[list[Logprobs] | None] | None = None,
        next_drafts: list[list[int]] | None = None,
    ) -> list[TokenOutput]:
        """What step `schedule` sampled; schedules are updated in the order they were made. All lists have one entry per
        entry of schedule.rows.

        token_ids: the new tokens, [] where samples is False. logprobs: one per new token, None where not asked for.
        prompt_logprobs: for entry i those of the prompt tokens starts[i] + 1 .. min(starts[i] + counts[i],
        prompt_len - 1), each from the logits of the token before it. next_drafts: the model's, behind the new tokens.
        """
        step, requests = self._in_flight.popleft()
        assert step is schedule and len(token_ids) == len(requests)
        self._updated_step = step.step_id
        if prompt_logprobs is not None:
            for request, start, chunk in zip(requests, step.starts, prompt_logprobs, strict=True):
                request.keep_prompt_logprobs(start, chunk)
        self.speculation.offer(step, requests, token_ids, next_drafts)
        outputs: list[TokenOutput] = []
        block_size, stateful, num_finished, num_tokens = self.kv.block_size, self.kv.has_state, 0, 0
        entries = zip(requests, step.starts, step.counts, token_ids, strict=True)
        for index, (request, start, count, new) in enumerate(entries):
            if (status := request.status) is _FINISHED:
                continue  # aborted, or ended at the step before this one
            drafts = step.drafts and step.drafts[index]
            if status is _RUNNING and (stateful or (start + count) // block_size > request.held.num_committed):
                self.kv.commit(request, start + 1 if drafts else start + count)
            if not new:
                continue
            if (request.guide or request.processors) is not None and request.error:
                outputs.append(failure(request))
                self._finish(request)
                num_finished += 1
                continue
            tokens = request.tokens
            tokens += new
            request.length += len(new) - 1
            if drafts:
                self._accept(request, start, len(drafts), len(new))
            if logprobs is None and not drafts and request.goes_on_with(new):
                outputs.append(TokenOutput(request.request_id, new))
                num_tokens += 1
                continue
            if not request.first_output_sent:
                self._counts.add_prompt(request.prompt_len, request.num_cached)
            outputs.append(output := request.output(len(new), None if logprobs is None else logprobs[index]))
            num_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                self._finish(request)
                num_finished += 1
        if num_finished:
            self._drop_finished()
        self._counts.generation_tokens += num_tokens
        return outputs

    def _accept(self, request: Request, start: int, num_drafts: int, num_new: int) -> None:
        """The tokens that came are known; of the drafts behind them nothing stays."""
        self.speculation.observe(request, num_drafts, num_new - 1)
        if request.status is _RUNNING:
            request.num_computed = start + num_new
            self.kv.commit(request, start + num_new)
            self.kv.keep_inputs(request, num_new - 1)

    def rollback(self) -> None:
        """Forget every step in flight; none of them may still run. Requests keep rows, blocks and known tokens, and
        what those steps were to compute is computed again.

        It is not known which of the steps the batch has seen, so the next schedule frees all rows and states them anew.
        """
        undo(self._in_flight)
        for request in self.running:
            self.kv.drop_steps(request)
        self._in_flight.clear()
        for request in self._requests.values():
            request.length = len(request.tokens)
        self._updated_step = self._next_step - 1
        self._restates = True

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _finish(self, request: Request) -> None:
        """The caller calls _drop_finished afterwards, once for many."""
        if request.status is _RUNNING:
            self._release(request)
        elif not self.grammars.remove(request):
            del self.waiting[bisect_left(self.waiting, request)]
        request.status = _FINISHED
        self.speculation.forget(request)
        del self._requests[request.request_id]

    def _drop_finished(self) -> None:
        self.running = [request for request in self.running if request.status is _RUNNING]

    def _release(self, request: Request) -> None:
        """Give blocks and row back (see the top of this file for when the row can be used again)."""
        self.rows.give_back(request.row, request.last_step)
        self.kv.free(request)
        request.row = -1
