"""A process beside the front that takes large bodies: `python -m server.intake_process --fd N --parent PID`.

What a large body costs, seconds of parsing, templates and tokenizing and hundreds of megabytes, it costs there: streams
go on, and the memory is given back. It ends a while after the last of them. It runs at a lower priority than the ranks,
one body at a time, small ones first. Over a pair of sockets go frames: eight bytes of length, then msgpack.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import heapq
import itertools
import logging
import os
import signal
import socket
import subprocess
from io import BufferedRWPair

import msgspec

from configs.engine import Plan
from configs.env import child_environment
from configs.server import ServerConfig
from engine.process.child import child_command
from engine.process.malloc import return_freed_memory
from engine.process.orphan import die_with_parent
from front.text.tokenizer import Tokenizer
from server.errors import ApiError, unavailable
from server.intake import Intake
from server.taken import Kind, Taken

NICE = 5  # a third of the processor time that a rank gets, where both want the same core
IDLE_SECONDS = 300.0
WAIT_SECONDS = 60.0  # for its turn, and then once more for its work
TRIES = 2  # the process may be lost
_LENGTH = 8

log = logging.getLogger("moesaic.front")


class Setup(msgspec.Struct):
    """The first frame."""

    model_dir: str
    tokenizer_dir: str
    plan: Plan
    config: ServerConfig


class Order(msgspec.Struct):
    kind: Kind
    body: bytes
    vocab_size: int
    serving: bool
    earlier: bytes


_encode = msgspec.msgpack.Encoder().encode
_setups = msgspec.msgpack.Decoder(Setup)
_orders = msgspec.msgpack.Decoder(Order)
_answers: msgspec.msgpack.Decoder[Taken] = msgspec.msgpack.Decoder(Taken)


def main() -> None:
    parser = argparse.ArgumentParser(prog="server.intake_process")
    parser.add_argument("--fd", type=int, required=True, help="its end of the pair of sockets")
    parser.add_argument("--parent", type=int, help="process id of the parent; this one does not outlive it")
    options = parser.parse_args()
    die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front's to act on: this one ends when its socket closes
    return_freed_memory()
    with socket.socket(fileno=options.fd) as end, end.makefile("rwb") as file:
        serve(file)


def serve(file: BufferedRWPair) -> None:
    """Until the other end closes."""
    first = _read(file)
    if first is None:
        return
    setup = _setups.decode(first)
    tokenizer = Tokenizer(setup.model_dir, setup.tokenizer_dir)
    tokenizer.compile_templates()
    intake = Intake(tokenizer, setup.plan, setup.config)
    gc.collect()
    gc.freeze()
    # nothing here makes cycles by the million, and a body of many small lists would be walked again and again
    gc.disable()
    while (frame := _read(file)) is not None:
        order = _orders.decode(frame)
        del frame
        answer = _encode(intake.take(order.kind, order.body, order.vocab_size, order.serving, order.earlier))
        file.write(len(answer).to_bytes(_LENGTH, "little"))
        file.write(answer)
        file.flush()
        del order, answer
        gc.collect()


def _read(file: BufferedRWPair) -> bytes | None:
    """None: the other end has closed."""
    head = file.read(_LENGTH)
    return file.read(int.from_bytes(head, "little")) if len(head) == _LENGTH else None


class IntakeProcess:
    """The front's side. The process is started when it is needed, and started again when it is lost."""

    def __init__(self, tokenizer: Tokenizer, plan: Plan, config: ServerConfig) -> None:
        self._setup = Setup(str(tokenizer.model_dir), str(tokenizer.directory), plan, config)
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._busy = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: the smallest body first
        self._serial = itertools.count()
        self._idle: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """None while there is no such process."""
        return None if self._process is None else self._process.pid

    async def take(self, kind: Kind, body: bytes, vocab_size: int, serving: bool, earlier: bytes = b"") -> Taken:
        """Intake.take. ApiError 503 when it is not done in time, or the process was lost twice."""
        await self._turn(len(body))
        try:
            for _ in range(TRIES):
                try:
                    async with asyncio.timeout(WAIT_SECONDS):
                        return await self._ask(_encode(Order(kind, body, vocab_size, serving, earlier)))
                except TimeoutError:
                    self._end()
                    message = f"a body of {len(body)} bytes was not made into tokens within {WAIT_SECONDS:g} s"
                    raise unavailable(message) from None
                except (OSError, EOFError) as error:  # EOFError: IncompleteReadError is one
                    log.warning("event=intake_lost reason=%r", str(error))
                    self._end()
            raise unavailable("the process that takes large bodies was lost")
        except BaseException as error:  # whatever it was about to say is not the answer to the next one
            if not isinstance(error, ApiError):
                self._end()
            raise
        finally:
            self._pass_on()

    async def _turn(self, size: int) -> None:
        if not self._busy:
            self._busy = True
            if self._idle is not None:
                self._idle.cancel()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._serial), turn))
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came at the same moment
                self._pass_on()
            turn.cancel()
            if isinstance(error, TimeoutError):
                raise unavailable(f"other large bodies kept this one waiting for {WAIT_SECONDS:g} s") from None
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
        if self._process is not None:
            self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end)

    async def _ask(self, order: bytes) -> Taken:
        reader, writer = self._streams or await self._start()
        _write(writer, order)
        await writer.drain()
        size = int.from_bytes(await reader.readexactly(_LENGTH), "little")
        return _answers.decode(await reader.readexactly(size))

    async def _start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            command = child_command("server.intake_process", ["--fd", str(theirs.fileno())])
            self._process = subprocess.Popen(
                command, env=child_environment(1), stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )
        os.setpriority(
            os.PRIO_PROCESS, self._process.pid, NICE
        )  # from here, so that its imports wait for the ranks too
        self._streams = await asyncio.open_unix_connection(sock=ours)
        _write(self._streams[1], _encode(self._setup))
        return self._streams

    def _end(self) -> None:
        streams, self._streams = self._streams, None
        process, self._process = self._process, None
        if streams is not None:
            streams[1].transport.abort()
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)

    def close(self) -> None:
        """Ends the process. May be called again."""
        if self._idle is not None:
            self._idle.cancel()
        self._end()


def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(len(frame).to_bytes(_LENGTH, "little"))
    writer.write(frame)


if __name__ == "__main__":
    main()
