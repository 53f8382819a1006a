"""The front process: `python -m server.process --plan PLAN.json --server SERVER.json --runtime-dir DIR --memory FILE`.

In DIR or FILE (engine/process/places.py): front.ipc, where the ranks connect; `ready`, written when all of them have
loaded, its text is the address; `resizes`, for the supervisor to read. Exit codes: 0 after a drain, 1 a second signal
or an error, 2 bad input, 3 a rank failed at the start or all are lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from configs.engine import Plan
from configs.server import ServerConfig
from engine.process.console import guard_console, say_text
from engine.process.heartbeat import BEAT_SECONDS, LoopBeat
from engine.process.malloc import return_freed_memory
from engine.process.orphan import die_with_parent
from engine.process.places import Places, write_small
from front.async_llm import AsyncLLM
from front.messages import Shutdown
from front.model_defaults import model_defaults
from front.params import SamplingParams
from front.structured.xgrammar_backend import library as xgrammar_library
from front.text.tokenizer import Tokenizer
from front.wire import Numbers, ZmqRanks
from server import logs
from server.api.tools import OutputFormats
from server.app import build_app
from server.http import bounded_protocol
from server.service import Service
from server.tracing import Traces

EXIT_BAD_INPUT = 2
EXIT_RANK_FAILED = 3
LAST_WORDS_SECONDS = 2.0  # for answers and errors to reach their clients once nothing runs any more
LOOK_SECONDS = 0.02
START_SECONDS = 0.005  # the same until requests are served
ONE_SIGNAL_SECONDS = 0.5  # a terminal's SIGINT and the parent's SIGTERM for the same Ctrl-C come within this

Config = TypeVar("Config")


def main() -> None:
    parser = argparse.ArgumentParser(prog="server.process", description="the front process of a Moesaic server")
    parser.add_argument("--plan", type=Path, required=True, help="the resolved plan, as JSON")
    parser.add_argument("--server", type=Path, required=True, help="the server's configuration, as JSON")
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--memory", type=Path, help="what the server's processes share in memory, as JSON")
    parser.add_argument("--endpoint", help="where ranks of other machines connect, as tcp://HOST:PORT")
    parser.add_argument("--parent", type=int, help="process id of the parent; the front does not outlive it")
    options = parser.parse_args()
    guard_console()
    die_with_parent(options.parent)
    return_freed_memory()
    try:
        plan = _load(options.plan, Plan)
        config = _load(options.server, ServerConfig)
        logs.configure(config.log_format, config.log_requests, sys.stderr)
        listener = listen(config.host, config.port) if config.uds is None else listen_at(Path(config.uds))
        tokenizer = Tokenizer(plan.model_path, plan.tokenizer_path)
        tokenizer.compile_templates()
        OutputFormats(tokenizer, config)  # said at once, where parsers do not go together
        if config.structured_outputs_backend == "xgrammar":
            xgrammar_library()  # the same, where it is missing; importing it takes seconds
        defaults = model_defaults(plan.model_path) if config.use_generation_config else SamplingParams()
        defaults = msgspec.structs.replace(defaults, **config.generation)
        places = Places(options.runtime_dir, options.memory)
        resizes, fences = (Numbers(places.file(name)) for name in ("resizes", "fences"))
        local = places.socket("front.ipc")
        traces = Traces(config.otlp_traces_endpoint, "moesaic") if config.otlp_traces_endpoint else None
        ranks = ZmqRanks(local, plan.data_parallel_size, resizes, options.endpoint, fences)
    except ValueError as error:
        say_text(str(error))
        sys.exit(EXIT_BAD_INPUT)
    front = FrontProcess(plan, config, tokenizer, defaults, ranks, listener, places.file("ready"), traces)
    beat = LoopBeat(places.file("beat-front"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_beating(front, beat))
    sys.exit(code)


async def _beating(front: FrontProcess, beat: LoopBeat) -> int:
    """Serve to the end; a sign of life beside it as long as the loop gets on."""

    async def turn() -> None:
        while True:
            beat.mark()
            await asyncio.sleep(BEAT_SECONDS)

    beating = asyncio.create_task(turn())
    try:
        return await front.run()
    finally:
        beating.cancel()


def listen(host: str, port: int) -> socket.socket:
    """Listening at once, so that a taken port shows before a model is loaded. ValueError on one line."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def listen_at(path: Path) -> socket.socket:
    """The same at a path. A socket that nobody listens on any more is replaced. ValueError on one line."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() or path.is_symlink():
            _clear(path)
        listener.bind(str(path))
        listener.listen(2048)
    except (OSError, ValueError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"--uds {path}: {reason}") from None
    listener.setblocking(False)
    return listener


def _clear(path: Path) -> None:
    """ValueError unless it is a socket that nobody listens on."""
    if not path.is_socket():
        raise ValueError("it exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except TimeoutError:
            pass
    raise ValueError("a server listens there already")


def _load(path: Path, kind: type[Config]) -> Config:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: a signal drains first (FrontProcess)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=bounded_protocol(config.max_header_bytes),
        ws="websockets-sansio",
        ws_max_size=config.max_body_bytes,
        ws_per_message_deflate=False,  # it would cost more than a token does
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(LAST_WORDS_SECONDS),
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )


class FrontProcess:
    def __init__(
        self,
        plan: Plan,
        config: ServerConfig,
        tokenizer: Tokenizer,
        defaults: SamplingParams,
        ranks: ZmqRanks,
        listener: socket.socket,
        ready_file: Path,
        traces: Traces | None,
    ) -> None:
        self._plan = plan
        self._config = config
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._ranks = ranks
        self._listener = listener
        self._ready_file = ready_file
        self._traces = traces
        self._signals: dict[int, float] = {}  # signal -> when it first came
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Serve to the end; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        plan = self._plan
        engine = AsyncLLM(
            self._ranks,
            self._tokenizer,
            block_size=plan.block_size,
            num_experts=plan.num_experts,
            slots_per_rank=plan.slots_per_rank,
            log_balancedness=plan.eplb is not None and plan.eplb.log_balancedness,
        )
        service = Service(
            engine, self._tokenizer, self._plan, self._config, self._defaults, int(time.time()), self._traces
        )
        service.announced = False
        http = HttpServer(http_config(build_app(service), self._config))
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        clock = asyncio.create_task(service.in_flight.clock())
        gc.collect()  # the ranks are still loading
        try:
            code = await self._watch(service, serving, clock)
            await self._end(service, http, serving)
        finally:
            clock.cancel()
            write_small(self._ready_file, "")
            if self._config.uds is not None:
                Path(self._config.uds).unlink(missing_ok=True)
            service.close()
            await engine.close()
        return code

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        first = min(self._signals.values(), default=now)
        if number in self._signals or now - first > ONE_SIGNAL_SECONDS:
            os._exit(1)
        self._signals[number] = now
        self._stopping.set()

    async def _watch(self, service: Service, serving: asyncio.Task[None], clock: asyncio.Task[None]) -> int:
        """Until something ends it; the exit code that it earns. Running requests have ended then."""
        engine = service.engine
        while engine.failed is None:
            if self._stopping.is_set():
                write_small(self._ready_file, "")
                aborted = await engine.drain(self._config.shutdown_timeout)
                if aborted:
                    say_text(f"{aborted} requests aborted at the end")
                break
            if serving.done() or clock.done():
                raise RuntimeError("a task of the front ended") from _failure_of(serving, clock)
            if engine.is_ready and not service.announced:
                self._announce()
                service.announced = True  # only now: a signal that comes behind an answer of /health is to find it so
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 5 * LOOK_SECONDS if service.announced else START_SECONDS)
        if engine.failed is not None and not self._stopping.is_set():
            say_text(engine.failed)
            return EXIT_RANK_FAILED
        return 0

    def _announce(self) -> None:
        gc.freeze()  # what was made at the start lives to the end: no collection need look at it again
        if self._config.uds is not None:
            write_small(self._ready_file, f"unix:{self._config.uds}")
            return
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if self._config.ssl_certfile is None else "https"
        address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        write_small(self._ready_file, address)

    async def _end(self, service: Service, http: HttpServer, serving: asyncio.Task[None]) -> None:
        """Let the last answers out, then let the ranks and the connections go."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while len(service.in_flight) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
        for rank in range(self._ranks.size):
            with contextlib.suppress(ConnectionError):
                self._ranks.send(rank, Shutdown())
        http.should_exit = True
        await asyncio.wait([serving], timeout=LAST_WORDS_SECONDS + 2.0)


def _failure_of(*tasks: asyncio.Task[None]) -> BaseException | None:
    return next((task.exception() for task in tasks if task.done() and not task.cancelled()), None)


if __name__ == "__main__":
    main()
