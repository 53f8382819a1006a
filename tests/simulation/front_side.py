"""The front's process in fake time: the real AsyncLLM on a loop of fake time, its sockets, and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from front.async_llm import AsyncLLM, EngineBusy, EngineFailed, RequestStream
from front.front import Front
from front.messages import FrontToRank, RankReady, RankToFront
from front.outputs import Delta
from front.text.tokenizer import Tokenizer
from front.wire import NotConnected
from tests.simulation.fakes import FakeNumbers
from tests.simulation.house import House
from tests.simulation.processes import RankProcess
from tests.simulation.schedules import Request
from tests.simulation.standin import EOS, VOCABULARY, Characters, Expected, letter
from tests.simulation.transport import Channel
from tests.simulation.world import World

RETRY_SECONDS = 0.25  # of a client that was refused because too few ranks serve


class FakeTokenizer:
    """front.text.tokenizer.Tokenizer, as far as the front uses it."""

    eos_token_ids = (EOS,)
    vocab_size = VOCABULARY

    def detokenizer(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> Characters:
        return Characters()

    def token_bytes(self, token_id: int) -> bytes:
        return letter(token_id).encode()


class FakeLoop:
    """The part of an asyncio loop that AsyncLLM uses outside of coroutines."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.read: Callable[[], None] = lambda: None

    def add_reader(self, descriptor: int, callback: Callable[[], None]) -> None:
        self.read = callback

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._world.at(self._world.now, callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        self._world.at(self._world.now + delay, callback)


class FakeRanks:
    """front.wire.ZmqRanks over channels of fake time."""

    def __init__(self, house: House, knock: Callable[[], None]) -> None:
        self.house = house
        self.size = len(house)
        self.resizes, self.fences = FakeNumbers(), FakeNumbers()
        self._knock = knock
        self._came: list[RankToFront] = []
        self._held: list[RankReady] = []
        self._down: dict[int, tuple[RankProcess, Channel]] = {}

    def fileno(self) -> int:
        return 0

    def hear(self, message: RankToFront) -> None:
        if self.house.world.tells:
            self.house.world.tell(f"  the front gets {message!r}"[:150])
        self._came.append(message)
        self._knock()

    def send(self, rank: int, message: FrontToRank) -> None:
        process: RankProcess | None = self.house[rank]
        if process is None or not process.connected:
            raise NotConnected(f"rank {rank} is not connected")
        known = self._down.get(rank)
        if known is None or known[0] is not process:
            known = self._down[rank] = (process, Channel(self.house.world, self.house.delays, process.hear))
        known[1].send(message)

    def receive(self, timeout: float) -> list[RankToFront]:
        came, self._came, self._held = [*self._held, *self._came], [], []
        messages: list[RankToFront] = []
        for message in came:
            process: RankProcess | None = self.house[message.rank] if isinstance(message, RankReady) else None
            if isinstance(message, RankReady) and (process is None or not process.connected):
                self._held.append(message)
            else:
                messages.append(message)
        return messages

    def resize(self, count: int) -> None:
        self.size = max(self.size, count)
        self.house.grow(count)
        self.resizes.write(count)

    def fence(self, rank: int, process: int) -> None:
        self.fences.write(process)

    def close(self) -> None:
        """Nothing is held."""


class Client:
    """One request and what came of it, by choice."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.stream: RequestStream | None = None
        self.aborted = False
        self.failed = ""
        self.num_refused = 0
        self.expected: list[Expected] = []  # by choice; made when it is first looked at
        self.tokens: list[list[int]] = [[] for _ in range(request.prompt.params.n)]
        self.texts = [""] * request.prompt.params.n
        self.reasons: list[str | None] = [None] * request.prompt.params.n

    @property
    def ended(self) -> bool:
        return bool(self.failed) or None not in self.reasons

    def take(self) -> list[Delta]:
        """What has come since the last look."""
        stream = self.stream
        if stream is None or self.ended or not (stream._deltas or stream._error):
            return []
        try:
            stream.__anext__().send(None)
        except StopIteration as came:
            deltas: list[Delta] = came.value
        except EngineFailed as error:
            self.failed = str(error)
            return []
        for delta in deltas:
            assert self.reasons[delta.index] is None, "a delta after the last one"
            self.tokens[delta.index] += delta.token_ids
            self.texts[delta.index] += delta.text
            self.reasons[delta.index] = delta.finish_reason
        return deltas


class FrontSide:
    """What server/process.py does around AsyncLLM, and the clients.

    on_read: called after the front has read; on_progress: a client got something.
    """

    def __init__(self, house: House, on_progress: Callable[[], None], on_failed: Callable[[str], None]) -> None:
        self.world = house.world
        self.clients: list[Client] = []
        self.ready_since = -1.0
        self.deaf_until = 0.0  # it does not read
        self._on_progress = on_progress
        self._on_failed = on_failed
        self._said_failed = False
        self._knocked = False
        self.ranks = FakeRanks(house, self.knock)
        plan = house.plan
        self.loop = FakeLoop(self.world)
        asyncio._set_running_loop(cast(Any, self.loop))
        try:
            tokenizer = cast(Tokenizer, FakeTokenizer())
            sizes = {"num_experts": plan.num_experts, "slots_per_rank": plan.slots_per_rank}
            self.llm = AsyncLLM(cast(Any, self.ranks), tokenizer, block_size=plan.block_size, **sizes)
        finally:
            asyncio._set_running_loop(None)
        self.llm.front = Front(
            plan.data_parallel_size, tokenizer, block_size=plan.block_size, clock=self.world.clock, **sizes
        )

    def knock(self) -> None:
        if not self._knocked:
            self._knocked = True
            self.world.at(max(self.world.now, self.deaf_until), self._read)

    def _read(self) -> None:
        if self.deaf_until > self.world.now:
            self.world.at(self.deaf_until, self._read)
            return
        self._knocked = False
        self.loop.read()
        self.look()

    def look(self) -> None:
        """What server.process and the clients see after a read."""
        llm = self.llm
        deltas = [delta for client in self.clients for delta in client.take()]
        if llm.failed is not None:
            deltas += [delta for client in self.clients for delta in client.take()]  # the error comes after them
        if deltas:
            self._on_progress()
        if llm.failed is not None and not self._said_failed:
            self._said_failed = True
            self._on_failed(llm.failed)
        if self.ready_since < 0 and llm.is_ready:
            self.ready_since = self.world.now

    def submit(self, client: Client) -> None:
        """As a client does that tries again when too few ranks serve."""
        if self.llm.failed is not None:
            client.failed = self.llm.failed
            return
        request = client.request
        try:
            client.stream = self.llm.stream(request.prompt)
        except EngineBusy:
            client.num_refused += 1
            self.world.at(self.world.now + RETRY_SECONDS, self.submit, client)
            return
        if request.abort is not None:
            self.world.at(self.world.now + request.abort, self._abort, client)

    def resize(self, count: int) -> bool:
        """As POST /admin/ranks; False: it was refused."""
        try:
            self.llm.resize(count)
        except (EngineBusy, EngineFailed, ValueError):
            return False
        self.look()
        return True

    def _abort(self, client: Client) -> None:
        if not client.ended:
            client.aborted = True
            self.llm.abort(client.request.prompt.request_id)
            self.look()
