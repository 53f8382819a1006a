"""A server inside the test: the real application on a fake of the rank side, spoken to through httpx."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from pydantic import TypeAdapter
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from configs.engine import Plan
from configs.server import ServerConfig
from front.async_llm import AsyncLLM
from front.messages import (
    STEP_TOKENS,
    Abort,
    AddRequest,
    FrontToRank,
    Logprobs,
    Membership,
    Outputs,
    RankFailed,
    RankReady,
    RankStats,
    RankToFront,
    ResetPrefixCache,
    TokenOutput,
)
from front.params import SamplingParams
from front.text.tokenizer import Tokenizer
from server.app import build_app
from server.process import HttpServer, http_config, listen
from server.service import Service
from server.tracing import Traces

SPECIAL = ["<|end|>", "<|bos|>"]
STORY = "Once upon a time a süße little fox 🎉 lived in a hollow tree, and the tree said nothing."
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking %} think{% endif %}{% endif %}"
)
MODEL = "fox-moe"
MAX_MODEL_LEN = 256
TEST_SECONDS = 60.0  # a test that hangs fails


def write_tokenizer(directory: Path) -> Path:
    """A byte-level BPE so small that many characters are several tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([STORY.replace("🎉", "").replace("ü", "u")] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@functools.cache
def small_tokenizer() -> Tokenizer:
    directory = tempfile.mkdtemp(prefix="moesaic-tokenizer-")  # the process that takes large bodies reads it again
    atexit.register(shutil.rmtree, directory)
    return Tokenizer(write_tokenizer(Path(directory)))


def story_tokens() -> list[int]:
    """What the fake ranks say: the story, then EOS."""
    return [*small_tokenizer().encode(STORY, add_special_tokens=False), 0]


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "model_path": "unused",
        "served_model_names": (MODEL, "fox/alias"),
        "architecture": "none",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_kv_blocks": 64,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "scheduling_policy": "fcfs",
        "async_scheduling": False,
        "data_parallel_size": 2,
        "all2all_backend": "local",
        "num_experts": 0,
        "slots_per_rank": 0,
        "threads_per_rank": 1,
        "mla_prefill": "auto",
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": 20,
        "exchange_timeout": 5.0,
    }
    return Plan(**{**values, **changes})


def rank_ready(rank: int, vocab_size: int) -> RankReady:
    return RankReady(
        rank=rank,
        num_blocks=64,
        block_size=16,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=vocab_size,
        load_seconds=0.1,
        bytes_read=1,
    )


def say(message: AddRequest, script: list[int], start: int, count: int) -> TokenOutput:
    """Tokens start : start + count of the script for one request, as a rank would send them."""
    params = message.params
    limit = min(len(script), params.max_tokens or 0)
    end = min(start + count, limit)
    token_ids = script[start:end]
    stop_reason = None
    reason: Any = None
    ends = (*(() if params.ignore_eos else message.eos_token_ids), *params.stop_token_ids)
    for place, token in enumerate(token_ids):
        if token in ends:
            token_ids = token_ids[: place + 1]
            reason, stop_reason = "stop", token if token in params.stop_token_ids else None
            break
    if reason is None and end == limit:
        reason = "length"
    logprobs = None
    if params.logprobs is not None:
        logprobs = [_logprobs(token, params.logprobs) for token in token_ids]
    prompt_logprobs = None
    if start == 0 and params.prompt_logprobs is not None:
        width = params.prompt_logprobs
        prompt_logprobs = [None, *(_logprobs(token, width) for token in message.token_ids[1:])]
    first = {"num_cached_tokens": 4, "queued": 0.125} if start == 0 else {}
    return TokenOutput(message.request_id, token_ids, reason, stop_reason, logprobs, prompt_logprobs, **first)


def _logprobs(token: int, width: int) -> Logprobs:
    """The chosen token is the likeliest; the last alternative is impossible."""
    others = [5 + place for place in range(width - 1)]
    top = [token, *others][:width]
    values = [-0.25, *(-1.0 - place for place in range(width - 1))][:width]
    if width > 1:
        values[-1] = float("-inf")
    return Logprobs([token, *top], [-0.25, *values], 1)


class FakeRanks:
    """A fake of the rank side (front.wire.Ranks): every sequence is told the story, one token per step.

    A step happens whenever the front reads. `paused` holds all of them still. Its descriptor is a pipe.
    """

    def __init__(self, size: int = 2, *, ready: bool = True) -> None:
        self.size = size
        self.script = story_tokens()
        self.sent: list[FrontToRank] = []
        self.resizes: list[int] = []
        self.paused = False
        self.pause_at = 0  # after so many steps; 0: never
        self.running: dict[int, tuple[int, AddRequest, int]] = {}  # id -> rank, message, tokens said
        self.steps = 0
        self._queue: list[RankToFront] = []
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        if ready:
            self.load()

    def script_of(self, message: AddRequest) -> list[int]:
        """What this sequence is told."""
        return self.script

    def load(self) -> None:
        self._queue += [rank_ready(rank, small_tokenizer().vocab_size) for rank in range(self.size)]
        self.knock()

    def fail(self, rank: int, error: str) -> None:
        self.drop(rank)
        self.say(RankFailed(rank, error))

    def drop(self, rank: int) -> None:
        """It does not go on with what it has."""
        for number in [number for number, (own, _, _) in self.running.items() if own == rank]:
            del self.running[number]

    def say(self, message: RankToFront) -> None:
        self._queue.append(message)
        self.knock()

    def resize(self, count: int) -> None:
        self.size = max(self.size, count)
        self.resizes.append(count)

    def resume(self) -> None:
        self.paused = False
        self.knock()

    def knock(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"x")

    def aborted(self) -> list[int]:
        return [number for message in self.sent if isinstance(message, Abort) for number in message.request_ids]

    # ---- front.wire.Ranks ----

    def fileno(self) -> int:
        return self._reader

    def send(self, rank: int, message: FrontToRank) -> None:
        self.sent.append(message)
        if isinstance(message, AddRequest):
            self.running[message.request_id] = (rank, message, len(message.token_ids) - message.prompt_len)
        elif isinstance(message, Abort):
            for number in message.request_ids:
                self.running.pop(number, None)
        else:
            assert isinstance(message, ResetPrefixCache | Membership)
        self.knock()

    def receive(self, timeout: float) -> list[RankToFront]:
        assert timeout == 0
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 65536)
        queue, self._queue = self._queue, []
        if not self.paused and self.running:
            self.steps += 1
            self.paused = self.steps == self.pause_at
            for rank in range(self.size):
                queue.append(self._step(rank))
            self.knock()
        return queue

    def _step(self, rank: int) -> Outputs:
        outputs = []
        for number, (own, message, said) in list(self.running.items()):
            if own == rank:
                output = say(message, self.script_of(message), said, 1)
                outputs.append(output)
                if output.finish_reason is None:
                    self.running[number] = (own, message, said + 1)
                else:
                    del self.running[number]
        stats = RankStats(
            running=len(self.running),
            kv_blocks_used=16,
            kv_blocks_total=64,
            steps=self.steps,
            dbo_overlap=0.75,
            num_step_tokens=2 * self.steps,
            step_tokens=[0, self.steps] + [0] * (len(STEP_TOKENS) - 1),
        )
        return Outputs(rank, outputs, stats, time.monotonic())

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


@dataclass
class Server:
    service: Service
    ranks: FakeRanks
    app: Any
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **more)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        answer = await self.post("/v1/completions", {"model": MODEL, "prompt": "Once", "max_tokens": 400, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def chat(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Hello"}]
        answer = await self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def events(self, path: str, **fields: Any) -> list[Any]:
        """The payloads of a stream, [DONE] checked and taken off."""
        start = {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in path else {"prompt": "Once"}
        answer = await self.post(path, {"model": MODEL, "stream": True, "max_tokens": 400, **start, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return parse_events(answer.text)


def parse_events(text: str) -> list[Any]:
    blocks = [block for block in text.split("\n\n") if block]
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert data[-1] == "[DONE]", data[-1]
    return [json.loads(item) for item in data[:-1]]


@contextlib.asynccontextmanager
async def server(
    config: ServerConfig | None = None,
    *,
    ready: bool = True,
    ranks: FakeRanks | None = None,
    seconds: float = TEST_SECONDS,
    **plan_changes: Any,
) -> AsyncIterator[Server]:
    config = config or ServerConfig()
    decided = plan(**plan_changes)
    ranks = ranks or FakeRanks(decided.data_parallel_size, ready=ready)
    engine = AsyncLLM(
        ranks,
        small_tokenizer(),
        block_size=16,
        num_experts=decided.num_experts,
        slots_per_rank=decided.slots_per_rank,
        log_balancedness=decided.eplb is not None and decided.eplb.log_balancedness,
    )
    endpoint = config.otlp_traces_endpoint
    traces = Traces(endpoint, "moesaic") if endpoint else None
    service = Service(engine, small_tokenizer(), decided, config, SamplingParams(), 1_700_000_000, traces)
    app = build_app(service)
    clock = asyncio.create_task(service.in_flight.clock())
    transport = httpx.ASGITransport(app=app)
    async with (
        asyncio.timeout(seconds),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=TEST_SECONDS) as http,
    ):
        if ready:
            await engine.wait_ready(5.0)
        yield Server(service, ranks, app, http)
    assert not clock.done(), clock
    clock.cancel()
    service.close()
    await engine.close()


@contextlib.asynccontextmanager
async def listening(s: Server) -> AsyncIterator[str]:
    """A real connection's way to it: the address of its WebSocket."""
    listener = listen("127.0.0.1", 0)
    http = HttpServer(http_config(s.app, s.service.config))
    task = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/responses"
    finally:
        http.should_exit = True
        await task


async def until(condition: Any, what: str, timeout: float = 5.0) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        await asyncio.sleep(0.005)
    raise AssertionError(f"not within {timeout} s: {what}")


def last_prompt(s: Server) -> str:
    """The text of the last request that went to a rank."""
    sent = [message for message in s.ranks.sent if isinstance(message, AddRequest)]
    return small_tokenizer().decode(sent[-1].token_ids)


def named_events(answer: httpx.Response, schema: TypeAdapter[Any]) -> list[dict[str, Any]]:
    """Of a stream in which each event says its name twice, as the client's own types have them."""
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        schema.validate_python(event, strict=True)
        events.append(event)
    return events
