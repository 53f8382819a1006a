"""The scheduler under any order of events: no block leaked, no request lost, every token as without them."""

from __future__ import annotations

from honest_device import Engine, check_schedule, expected, message, prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from front.messages import AddRequest, TokenOutput


class SchedulerMachine(RuleBasedStateMachine):
    engine: Engine | None = None

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        chunked=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        async_depth=st.integers(0, 1),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        chunked: bool,
        policy: str,
        async_depth: int,
    ) -> None:
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else 40,
            max_model_len=40,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            policy=policy,
            async_depth=async_depth,
        )
        self.live: dict[int, AddRequest] = {}
        self.released: dict[int, list[int]] = {}
        self.next_id = 0

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 24),
        replayed=st.integers(0, 3),
        max_tokens=st.integers(1, 16),
        min_tokens=st.integers(0, 3),
        stops=st.sampled_from([(), (3,), (4, 5)]),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "a"]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(
        self,
        family: int,
        length: int,
        replayed: int,
        max_tokens: int,
        min_tokens: int,
        stops: tuple[int, ...],
        ignore_eos: bool,
        priority: int,
        salt: str,
        prompt_logprobs: int | None,
    ) -> None:
        options = {
            "max_tokens": max_tokens,
            "min_tokens": min(min_tokens, max_tokens),
            "stop_token_ids": stops,
            "ignore_eos": ignore_eos,
            "priority": priority,
            "cache_salt": salt,
            "prompt_logprobs": prompt_logprobs,
        }
        tokens = prompt(length, family)
        add = message(self.next_id, tokens, **options)
        scheduler = self.engine.scheduler
        if length < scheduler.max_length:
            output, _ = expected(add, scheduler.max_length)
            if replayed < len(output):
                add = message(self.next_id, tokens + output[:replayed], length, **options)
        refused = scheduler.add(add)
        assert (refused is not None) == (length >= scheduler.max_length)
        if refused is None:
            self.live[self.next_id] = add
            self.released[self.next_id] = []
        self.next_id += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.sampled_from(sorted(self.live)), max_size=2))
        self.engine.scheduler.abort(sorted(ids))
        for request_id in ids:
            del self.live[request_id]

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.scheduler.kv.reset_prefix_cache()

    @rule(num_run=st.integers(0, 2), unlaunched=st.booleans())
    def roll_back(self, num_run: int, unlaunched: bool) -> None:
        """unlaunched: a schedule was made, but the ranks did not come to agree on it."""
        if unlaunched and len(self.engine.flying) <= self.engine.scheduler.async_depth:
            schedule = self.engine.scheduler.schedule()
            check_schedule(schedule, self.engine.scheduler)
            num_run = min(num_run, len(self.engine.flying))
        self.engine.break_down(num_run)

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            add = self.live[output.request_id]  # nothing for the aborted and the finished
            released = self.released[output.request_id]
            if not released and add.params.prompt_logprobs is not None and len(add.token_ids) == add.prompt_len:
                assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == add.prompt_len
                ids = [entry.ids[0] for entry in output.prompt_logprobs if entry is not None]
                assert ids == add.token_ids[1 : add.prompt_len]
            else:
                assert output.prompt_logprobs is None
            assert output.logprobs is not None and [e.ids[0] for e in output.logprobs] == output.new_token_ids
            released += output.new_token_ids
            tokens, reason = expected(add, self.engine.scheduler.max_length)
            assert released == tokens[: len(released)]
            assert (output.finish_reason is not None) == (len(released) == len(tokens))
            if output.finish_reason is not None:
                assert output.finish_reason == reason
                del self.live[output.request_id]

    @invariant()
    def blocks_add_up(self) -> None:
        if self.engine is None:
            return
        scheduler = self.engine.scheduler
        scheduler.kv.check([request.held for request in scheduler.running])
        assert not any(any(request.held.tables) for request in scheduler.waiting)
        assert scheduler.running == sorted(scheduler.running)
        assert set(scheduler._requests) == set(self.live)
        assert len(self.live) == scheduler.stats().running + scheduler.stats().waiting

    def teardown(self) -> None:
        if self.engine is None:
            return
        scheduler = self.engine.scheduler
        bound = 10 + 300 * (1 + len(self.live))
        while scheduler.has_unfinished or self.engine.flying:
            self.take(self.engine.step())
            self.blocks_add_up()
            bound -= 1
            assert bound, "no end in sight"
        assert not self.live
        scheduler.kv.check([])
        scheduler.rows.check(0)


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_everything_at_once = SchedulerMachine.TestCase
