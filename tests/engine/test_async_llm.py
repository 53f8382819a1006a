"""AsyncLLM over a fake set of ranks: streams, cancelling, failing, draining. The real ranks are in test_llm.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from front_parts import FakeRanks, ready, small_tokenizer

from front.async_llm import AsyncLLM, EngineBusy, EngineDraining, EngineFailed
from front.messages import Abort, AddRequest, FrontToRank, ResetPrefixCache
from front.outputs import Delta, Prompt
from front.params import SamplingParams
from front.sampling_params import resolve
from front.wire import NotConnected

TOKENIZER = small_tokenizer()
TEXT = " lived in a tree. The end 🦊"
SCRIPT = [*TOKENIZER.encode(TEXT, add_special_tokens=False), 3]


def make_prompt(request_id: str = "r", **params) -> Prompt:
    token_ids = TOKENIZER.encode("The fox")
    resolved = resolve(SamplingParams(**{"max_tokens": None, **params}), TOKENIZER, len(token_ids), 256)
    return Prompt(request_id=request_id, token_ids=token_ids, params=resolved)


def run(test: Callable[[AsyncLLM, FakeRanks], Awaitable[None]], size: int = 2) -> None:
    async def body() -> None:
        ranks = FakeRanks(size, SCRIPT)
        async with asyncio.timeout(90), AsyncLLM(ranks, TOKENIZER) as llm:
            await llm.wait_ready(30)
            await test(llm, ranks)
        assert ranks.closed

    asyncio.run(body())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def test_stream() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        deltas = [delta async for batch in llm.stream(make_prompt()) for delta in batch]
        assert "".join(delta.text for delta in deltas) == TEXT
        assert [token for delta in deltas for token in delta.token_ids] == SCRIPT
        assert [delta.finish_reason for delta in deltas][-2:] == [None, "stop"]
        assert llm.num_requests == 0 and not llm._streams and len(llm.take_finished()) == 1
        assert not any(isinstance(message, Abort) for _, message in ranks.sent)

    run(body)


def test_a_request_that_cannot_be_sent_does_not_stay() -> None:
    """Otherwise it would count as running for ever, and a drain would wait for it."""

    class Refusing(FakeRanks):
        refuses = True

        def send(self, rank: int, message: FrontToRank) -> None:
            if isinstance(message, AddRequest) and self.refuses:
                raise OverflowError("can't serialize")
            super().send(rank, message)

    async def body() -> None:
        ranks = Refusing(2, SCRIPT)
        async with asyncio.timeout(90), AsyncLLM(ranks, TOKENIZER) as llm:
            await llm.wait_ready(30)
            with pytest.raises(OverflowError):
                llm.stream(make_prompt())
            assert llm.num_requests == 0 and not llm._streams and llm.front.router.loads == [0, 0]
            ranks.refuses = False
            assert (await llm.generate(make_prompt())).outputs[0].text == TEXT, "the id is free again"

    asyncio.run(body())


def test_many_at_once() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        prompts = [make_prompt(str(number), n=1 + number % 2) for number in range(200)]
        results = await asyncio.gather(*(llm.generate(prompt) for prompt in prompts))
        assert [result.request_id for result in results] == [prompt.request_id for prompt in prompts]
        assert all(choice.text == TEXT for result in results for choice in result.outputs)
        ranks_used = [rank for rank, message in ranks.sent if isinstance(message, AddRequest)]
        assert abs(ranks_used.count(0) - ranks_used.count(1)) <= 4
        assert not llm._streams and llm.front.router.loads == [0, 0]

    run(body)


def test_choices_arrive_together() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        batches = [batch async for batch in llm.stream(make_prompt(n=3))]
        assert all(sorted(delta.index for delta in batch) == [0, 1, 2] for batch in batches)

    run(body)


def aborted(ranks: FakeRanks) -> list[int]:
    return [i for _, message in ranks.sent if isinstance(message, Abort) for i in message.request_ids]


def test_closing_early_aborts() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        async with aclosing(llm.stream(make_prompt())) as stream:
            async for _ in stream:
                break
        assert aborted(ranks) == [0] and llm.num_requests == 0 and not llm._streams
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(body)


def test_cancelling_aborts() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        ranks.paused = True
        task = asyncio.create_task(llm.generate(make_prompt(n=2)))
        await until(lambda: llm.num_requests == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(aborted(ranks)) == [0, 1] and llm.num_requests == 0

    run(body)


def test_a_series_is_aborted_between_its_requests() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        with llm.series(["x.0", "x.1"]) as aborted:
            await llm.generate(make_prompt("x.0"), goes_on=True)
            assert not aborted and llm.num_requests == 0
            assert llm.abort("x.0") and aborted == {"x.0"}
        assert not llm.abort("x.0") and not llm.abort("x.1")

    run(body)


def test_abort_ends_the_stream() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        ranks.paused = True
        task = asyncio.create_task(llm.generate(make_prompt("x")))
        await until(lambda: llm.num_requests == 1)
        assert llm.abort("x") and not llm.abort("x")
        result = await task
        assert result.outputs[0].finish_reason == "abort"

    run(body)


def test_a_slow_reader_loses_nothing() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        text = ""
        async for deltas in llm.stream(make_prompt()):
            text += "".join(delta.text for delta in deltas)
            await asyncio.sleep(0.005)
        assert text == TEXT

    run(body)


def test_same_id_twice() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        ranks.paused = True
        stream = llm.stream(make_prompt("x"))
        with pytest.raises(ValueError, match="in use"):
            llm.stream(make_prompt("x"))
        await stream.aclose()
        again = llm.stream(make_prompt("x"))
        await stream.aclose()  # the old one's end does not touch the new one
        ranks.paused = False
        ranks.knock()
        assert sum([len(batch) async for batch in again]) > 0

    run(body)


def test_failed_rank() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        ranks.paused = True
        tasks = [asyncio.create_task(llm.generate(make_prompt(str(number)))) for number in range(3)]
        await until(lambda: llm.num_requests == 3)
        ranks.fail(1, "no memory")
        await until(lambda: llm.members.num_losses == 1)
        assert llm.is_ready
        ranks.lose(0)
        await until(lambda: llm.members.num_losses == 2)
        assert llm.failed is None and llm.num_requests == 3
        with pytest.raises(EngineBusy, match="0 of 2 ranks serve; waiting for rank 0, 1"):
            llm.stream(make_prompt())
        ranks.none_left("no more tries")
        for task in tasks:
            with pytest.raises(EngineFailed, match="all ranks are lost: no more tries"):
                await task
        assert llm.failed and not llm.is_ready
        with pytest.raises(EngineFailed):
            llm.stream(make_prompt())

    run(body)


def test_a_lost_rank_shows_as_a_pause() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        tasks = [asyncio.create_task(llm.generate(make_prompt(str(number)))) for number in range(6)]
        await anext(stream := llm.stream(make_prompt("first")))
        ranks.lose(1)
        for task in tasks:
            [choice] = (await task).outputs
            assert choice.token_ids == SCRIPT and choice.text == TEXT
        await stream.aclose()
        assert 3 <= llm.num_replayed <= 4 and llm.shortage is None and llm.members.up == [0]
        ranks.sent.clear()
        llm.reset_prefix_cache()
        assert ranks.sent == [(0, ResetPrefixCache())]
        [recovery] = llm.take_recoveries()
        assert recovery.rank == 1 and recovery.first_token is not None and recovery.replayed == llm.num_replayed

    run(body)


def test_too_few_ranks_refuse_new_work_and_hold_the_old() -> None:
    async def body() -> None:
        ranks = FakeRanks(2, SCRIPT)
        async with asyncio.timeout(30), AsyncLLM(ranks, TOKENIZER, num_experts=4, slots_per_rank=2) as llm:
            await llm.wait_ready(30)
            ranks.paused = True
            tasks = [asyncio.create_task(llm.generate(make_prompt(str(number)))) for number in range(4)]
            await until(lambda: llm.num_requests == 4)
            ranks.lose(1)
            await until(lambda: llm.shortage is not None)
            with pytest.raises(EngineBusy, match="1 of 2 ranks serve, with room for 2 of 4 experts"):
                llm.stream(make_prompt("new"))
            ranks.queue.append(ready(1, 2))
            ranks.knock()
            await until(lambda: llm.shortage is None)
            ranks.paused = False
            ranks.knock()
            for task in tasks:
                assert (await task).outputs[0].token_ids == SCRIPT

    asyncio.run(body())


def test_a_rank_that_is_not_there_any_more_is_waited_for() -> None:
    class Gone(FakeRanks):
        gone = False

        def send(self, rank: int, message: FrontToRank) -> None:
            if self.gone and rank == 1:
                raise NotConnected("rank 1 is not connected")
            super().send(rank, message)

    async def body() -> None:
        ranks = Gone(2, SCRIPT)
        async with asyncio.timeout(30), AsyncLLM(ranks, TOKENIZER) as llm:
            await llm.wait_ready(30)
            ranks.gone = True
            tasks = [asyncio.create_task(llm.generate(make_prompt(str(number)))) for number in range(2)]
            await until(lambda: llm.num_requests == 1)
            ranks.lose(1)
            for task in tasks:
                assert (await task).outputs[0].token_ids == SCRIPT

    asyncio.run(body())


def test_supervisor_s_word() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        ranks.paused = True
        stream = llm.stream(make_prompt())
        llm.fail("rank 0 exited with code -9")
        with pytest.raises(EngineFailed, match="code -9"):
            await anext(stream)

    run(body)


def test_drain_waits_then_aborts() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        ranks.paused = True
        finishing = asyncio.create_task(llm.generate(make_prompt("a")))
        await until(lambda: llm.num_requests == 1)
        drained = asyncio.create_task(llm.drain(30))
        await until(lambda: llm.draining)
        ranks.paused = False
        ranks.knock()
        assert await drained == 0
        assert (await finishing).outputs[0].finish_reason == "stop" and not llm.is_ready
        with pytest.raises(EngineDraining):
            llm.stream(make_prompt("b"))

    async def late(llm: AsyncLLM, ranks: FakeRanks) -> None:
        ranks.paused = True
        stuck = asyncio.create_task(llm.generate(make_prompt("a")))
        await until(lambda: llm.num_requests == 1)
        assert await llm.drain(0.02) == 1
        assert (await stuck).outputs[0].finish_reason == "abort"

    run(body)
    run(late)


def test_reset_prefix_cache_reaches_every_rank() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        llm.reset_prefix_cache()
        assert ranks.sent == [(0, ResetPrefixCache()), (1, ResetPrefixCache())]

    run(body)


def test_ready_names_the_missing() -> None:
    async def body() -> None:
        ranks = FakeRanks(3, SCRIPT)
        ranks.queue = ranks.queue[:1]
        async with AsyncLLM(ranks, TOKENIZER) as llm:
            with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] were not ready within 0.05 s"):
                await llm.wait_ready(0.05)
            assert not llm.is_ready

    asyncio.run(body())


def test_lost_connection_fails_the_engine() -> None:
    class Gone(FakeRanks):
        def send(self, rank: int, message: object) -> None:
            raise ConnectionError(f"rank {rank} does not read")

    async def body() -> None:
        ranks = Gone(1, SCRIPT)
        async with AsyncLLM(ranks, TOKENIZER) as llm:
            await llm.wait_ready(30)
            with pytest.raises(EngineFailed, match="rank 0 does not read"):
                await llm.generate(make_prompt())

    asyncio.run(body())


def test_a_sink_takes_what_comes_while_its_consumer_waits() -> None:
    """All but the first step, which finds nobody waiting yet, and the end; what it refuses is iterated over, in order."""

    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        taken: list[Delta] = []
        everything: list[Delta] = []

        def sink(deltas: list[Delta]) -> bool:
            assert deltas and all(delta.finish_reason is None for delta in deltas)
            if len(everything) % 3 == 2:
                return False
            taken.extend(deltas)
            everything.extend(deltas)
            return True

        stream = llm.stream(make_prompt(n=2))
        stream.set_sink(sink)
        read = 0
        async for deltas in stream:
            everything += deltas
            read += len(deltas)
        for index in range(2):
            assert [token for delta in everything if delta.index == index for token in delta.token_ids] == SCRIPT
        assert taken and read >= 2 and len(taken) + read == len(everything)
        assert [delta.finish_reason for delta in everything].count("stop") == 2

    run(body)


def test_a_sink_that_fails_does_no_harm() -> None:
    async def body(llm: AsyncLLM, ranks: FakeRanks) -> None:
        def sink(deltas: list[Delta]) -> bool:
            raise RuntimeError("broken")

        async def text(request_id: str, broken: bool) -> str:
            stream = llm.stream(make_prompt(request_id))
            if broken:
                stream.set_sink(sink)
            return "".join([delta.text async for deltas in stream for delta in deltas])

        assert await asyncio.gather(text("a", True), text("b", False)) == [TEXT, TEXT]

    run(body)
