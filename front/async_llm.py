"""The engine as a server uses it: many requests at once on one event loop, no thread.

    llm = AsyncLLM(ranks, tokenizer, block_size=plan.block_size)
    await llm.wait_ready(60.0)
    async with aclosing(llm.stream(prompt)) as stream:
        async for deltas in stream: ...

One wake-up of the ranks' socket takes everything that has come; each request that got something is woken once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from front.balancing import Balancing
from front.collector import Collector
from front.driver import Driver, log
from front.front import EngineBusy, EngineDraining, EngineFailed, FrontOutput
from front.members import GATHER_SECONDS, Members, Recovery, State
from front.messages import (
    EpochLost,
    RankLost,
    RankReady,
    RankStats,
    RankToFront,
    Waiting,
)
from front.outputs import Prompt, RequestOutput
from front.profiling import ANSWER_SECONDS
from front.request_stream import RequestStream
from front.sequences import FinishedRequest
from front.text.tokenizer import Tokenizer
from front.trace_file import Summary, write_trace
from front.wire import ElasticRanks

__all__ = ["AsyncLLM", "AsyncRanks", "EngineBusy", "EngineDraining", "EngineFailed", "RequestStream"]

# The socket's descriptor is edge-triggered; should a wake-up ever be lost, this is how late its messages can be. A rank
# that is ready but cannot be reached yet makes no wake-up at all (front/wire.py). Where this process looks after the
# ranks, a look is also how a hang is seen when no rank has anything to say: well within the STALL_SECONDS of
# launch/monitor.py.
_LOOK_AGAIN_SECONDS = 0.25
_LOOK_AGAIN_UNREADY_SECONDS = 0.05


_NO_MEMBERS = (State.STARTING, State.LEFT)  # the end of their processes is no loss


class AsyncRanks(ElasticRanks, Protocol):
    """Ranks with a descriptor that becomes readable when messages may have come."""

    def fileno(self) -> int: ...


class AsyncLLM(Driver[AsyncRanks]):
    """Make it inside a running event loop, close it there."""

    def __init__(
        self,
        ranks: AsyncRanks,
        tokenizer: Tokenizer,
        *,
        block_size: int = 16,
        num_experts: int = 0,
        slots_per_rank: int = 0,
        log_balancedness: bool = False,
    ) -> None:
        super().__init__(
            ranks, tokenizer, block_size=block_size, num_experts=num_experts, slots_per_rank=slots_per_rank
        )
        self.balancing = Balancing(self.front, self._send, log_balancedness)
        self._streams: dict[str, RequestStream] = {}
        self._recoveries: deque[Recovery] = deque(maxlen=1024)
        self._failed: str | None = None
        self._draining = False
        self._series: list[tuple[frozenset[str], set[str]]] = []  # names, and those of them that were aborted
        self._changed = asyncio.Event()  # a rank became ready, a request ended, or the engine failed
        self._loop = asyncio.get_running_loop()
        self._fd = ranks.fileno()
        self._loop.add_reader(self._fd, self._read)
        self._timer = self._loop.call_later(_LOOK_AGAIN_UNREADY_SECONDS, self._look_again)
        self._loop.call_soon(self._read)

    # ---- requests ----

    @contextlib.contextmanager
    def series(self, names: Iterable[str]) -> Iterator[set[str]]:
        """Several requests one after another, which are one to their caller: the first may be refused, the others
        (`goes_on`) are taken while the engine drains too, and wait while too few ranks are left. names: of all that may
        come. Yields those of them that were aborted, also between two requests, when none is live."""
        self._require_open()
        if self.shortage is not None:
            raise EngineBusy(self.shortage)
        one = frozenset(names), set[str]()
        self._series.append(one)
        try:
            yield one[1]
        finally:
            self._series.remove(one)
            self._changed.set()

    def stream(self, prompt: Prompt, goes_on: bool = False) -> RequestStream:
        """Not a coroutine: the request is sent at once, so what is wrong with it is raised here. goes_on: it is part of
        a series.

        ValueError (request id in use), EngineFailed, EngineDraining, EngineBusy (too few ranks are left).
        """
        self._require_open(goes_on)
        shortage = None if goes_on else self.shortage
        if shortage is not None:
            raise EngineBusy(shortage)
        messages = self.front.add(prompt)
        stream = RequestStream(partial(self._drop, prompt.request_id), prompt.params.n)
        self._streams[prompt.request_id] = stream
        try:
            for rank, message in messages:
                self._send(rank, message)
        except BaseException:  # no rank has it: it must not stay among the live ones
            self._drop(prompt.request_id, stream)
            raise
        return stream

    async def generate(self, prompt: Prompt, goes_on: bool = False) -> RequestOutput:
        """The whole result. Cancelling aborts the request."""
        collector = Collector(prompt)
        stream = self.stream(prompt, goes_on)
        try:
            async for deltas in stream:
                for delta in deltas:
                    collector.add(delta)
        finally:
            await stream.aclose()
        return collector.output()

    def abort(self, request_id: str) -> bool:
        """End a live request: its stream gets final deltas with finish_reason "abort". False: there is none."""
        work = self.front.abort(request_id)
        self._do(work)
        series = [aborted for names, aborted in self._series if request_id in names]
        for aborted in series:
            aborted.add(request_id)
        return bool(work.deltas or series)

    def resize(self, count: int) -> None:
        """Serve with ranks 0 to count - 1. Those beyond leave at once, and their requests go on elsewhere; more ranks
        are started and serve when they have loaded. `members` shows how far it is.

        ValueError: so few can never hold all experts, or more than 62; EngineBusy: not just now; EngineFailed,
        EngineDraining.
        """
        self._require_open()
        if not self.front.members.started:
            raise EngineBusy("the ranks are still loading")
        before = self.front.members.count
        work = self.front.resize(count)
        self._ranks.resize(count)
        log.info("event=resized before=%d count=%d epoch=%d", before, count, self.front.members.epoch)
        self._do(work)
        self._changed.set()

    async def stop_profile(self) -> Summary:
        """Write it as a trace (front/trace_file.py). A rank that was lost meanwhile is missing from it.

        ProfileRefused: none is being taken; OSError.
        """
        profiling = self.front.profiling
        messages = profiling.stop()
        try:
            for rank, message in messages:
                self._send(rank, message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    while not profiling.complete and self._failed is None and not self._closed:
                        await self._change()
        finally:  # when no client waits for it any more, another one may begin
            profile = profiling.finish()
        return await asyncio.to_thread(write_trace, profile)

    # ---- state ----

    @property
    def is_ready(self) -> bool:
        """All ranks have come up, the engine has not failed, and takes new requests (unless there is a `shortage`)."""
        return self.front.members.started and self._failed is None and not self._draining and not self._closed

    @property
    def shortage(self) -> str | None:
        """Why nothing can be computed until a lost rank is back; None: it can."""
        members = self.front.members
        return members.shortage if members.started else None

    @property
    def members(self) -> Members:
        """Which ranks serve, and what losses there were."""
        return self.front.members

    @property
    def failed(self) -> str | None:
        """Why no request can go on."""
        return self._failed

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_requests(self) -> int:
        return self.front.num_requests

    @property
    def stats(self) -> list[RankStats]:
        """The latest of every rank, in rank order."""
        return self.front.stats

    @property
    def ready(self) -> dict[int, RankReady]:
        return self.front.ready

    @property
    def num_replayed(self) -> int:
        """Requests moved from a lost rank to another one."""
        return self.front.num_replayed

    def take_recoveries(self) -> list[Recovery]:
        """Recoveries that ended since the last call (at most the newest 1024)."""
        recoveries = list(self._recoveries)
        self._recoveries.clear()
        return recoveries

    def take_finished(self) -> list[FinishedRequest]:
        """Requests that finished since the last call (at most the newest 65536)."""
        return self.front.take_finished()

    async def wait_ready(self, timeout: float) -> None:
        """Until every rank has said that it is ready. TimeoutError naming the missing ones; EngineFailed."""
        try:
            async with asyncio.timeout(timeout):
                while not self.front.members.started and self._failed is None:
                    await self._change()
        except TimeoutError:
            raise self._not_ready(timeout) from None
        if self._failed is not None:
            raise EngineFailed(self._failed)

    # ---- the end ----

    async def drain(self, timeout: float) -> int:
        """Refuse new requests, wait for the live ones, then abort the rest. Returns how many were aborted."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                while (self.front.num_requests or self._series) and self._failed is None:
                    await self._change()
        except TimeoutError:
            pass
        left = self.front.request_ids
        for request_id in left:
            self.abort(request_id)
        return len(left)

    def fail(self, error: str) -> None:
        """The engine is gone: every stream raises EngineFailed(error), and so do new requests."""
        if self._failed is not None:
            return
        self._failed = error
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        self._changed.set()

    async def close(self) -> None:
        """Abort everything, stop reading, close the ranks. May be called again."""
        if self._closed:
            return
        for request_id in self.front.request_ids:
            self.abort(request_id)
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._timer.cancel()
        self._ranks.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- inside ----

    def _require_open(self, goes_on: bool = False) -> None:
        if self._failed is not None:
            raise EngineFailed(self._failed)
        if (self._draining and not goes_on) or self._closed:
            raise EngineDraining("the engine is shutting down and takes no new requests")

    def _read(self) -> None:
        if self._closed:
            return
        self._take(0)
        self._look()
        while self.front.members.done:
            self._on_recovery(self.front.members.done.popleft())
        if self.front.failed is not None:
            self.fail(self.front.failed)

    def _on_recovery(self, recovery: Recovery) -> None:
        self._recoveries.append(recovery)
        first = "none" if recovery.first_token is None else f"{recovery.first_token:.3f}"
        log.info(
            "event=recovered rank=%d epoch=%d replayed=%d detect=%.3f agree=%.3f repair=%.3f first_token=%s total=%.3f",
            recovery.rank,
            recovery.epoch,
            recovery.replayed,
            recovery.detect,
            recovery.agree,
            recovery.repair,
            first,
            recovery.total,
        )

    def _on_event(self, message: RankToFront) -> None:
        """Something about the ranks themselves: those that wait for a state look again, and the log says so."""
        self._changed.set()
        self.balancing.on_event(message)
        members = self.front.members
        if members.gathering:
            self._loop.call_later(GATHER_SECONDS, self._read)
        if isinstance(message, RankLost) and members.states[message.rank] not in _NO_MEMBERS:
            log.info("event=rank_lost rank=%d epoch=%d reason=%r", message.rank, members.epoch, message.reason)
        elif isinstance(message, EpochLost):
            log.info("event=epoch_lost rank=%d epoch=%d reason=%r", message.rank, message.epoch, message.reason)
        elif isinstance(message, Waiting):
            log.info("event=rank_waits rank=%d reason=%r", message.rank, message.reason or "it goes on")
        elif members.epoch and isinstance(message, RankReady):
            log.info("event=rank_returns rank=%d epoch=%d", message.rank, members.epoch)

    def _look_again(self) -> None:
        delay = _LOOK_AGAIN_SECONDS if self.is_ready else _LOOK_AGAIN_UNREADY_SECONDS
        self._timer = self._loop.call_later(delay, self._look_again)
        self._read()

    def _do(self, work: FrontOutput) -> None:
        woken = set()
        for request_id, delta in work.deltas:
            stream = self._streams.get(request_id)
            if stream is not None:
                woken.add(stream)
                if stream.push(delta):
                    del self._streams[request_id]
        for stream in woken:
            stream.wake()
        for rank, message in work.messages:
            self._send(rank, message)
        if work.deltas and self._draining:
            self._changed.set()

    def _cut_off(self, error: str) -> None:
        self.fail(error)

    def _drop(self, request_id: str, stream: RequestStream) -> None:
        """The consumer of this stream has gone."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            if not self._closed and self._failed is None:
                self._do(self.front.abort(request_id))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
