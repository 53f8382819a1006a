"""What a process says on stdout and stderr: the reader of that may leave, stop reading, or have no room for it, and
nothing else may suffer from it.

`guard_console` puts a queue and a thread behind both streams, for the processes of a server: no write waits or fails.
What cannot be written is dropped. Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import sys
import threading
import time
from collections import deque

MAX_WAITING_BYTES = 1 << 20  # of a stream that is not read; what comes then is dropped
LAST_WORDS_SECONDS = 1.0  # at the end of the process, for what is still waiting to be written
_RETRY_SECONDS = 0.05


class GuardedStream(io.TextIOBase):
    """Text for a descriptor, written by a thread of its own, in order and by whole writes. Any thread may use it."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self._descriptor = descriptor
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0  # waiting, with what is just being written
        self._num_dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    encoding = "utf-8"
    errors = "backslashreplace"

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._num_bytes + len(data) > MAX_WAITING_BYTES:
                self._num_dropped += 1
            elif data:
                self._waiting.append(data)
                self._num_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread writes as soon as it can. See `drain`."""

    def close(self) -> None:
        """Nothing: the stream lives as long as the process."""

    def drain(self, seconds: float = LAST_WORDS_SECONDS) -> None:
        """Wait until all is written or dropped, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = b"".join(self._waiting)
                self._waiting.clear()
                dropped, self._num_dropped = self._num_dropped, 0
            if dropped:
                data += b"moesaic: %d piece(s) of text were dropped, as nothing read them\n" % dropped
            self._write(data)
            with self._changed:
                self._num_bytes = sum(map(len, self._waiting))
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        """To its end, or until an error: the reader is gone, the disk is full, ..."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another process has made the pipe so
                with contextlib.suppress(OSError, ValueError):
                    select.select([], [self._descriptor], [], _RETRY_SECONDS)
            except OSError:
                return


def guard_console() -> None:
    """sys.stdout and sys.stderr cannot fail or wait from now on. To be called once, at the start of a process, before
    anything keeps one of them, and before descriptors are opened: 0, 1 and 2 are opened when they are closed."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(free, True)
    os.close(free)
    if isinstance(sys.stderr, GuardedStream):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    sys.stdout, sys.stderr = GuardedStream(1, "<stdout>"), GuardedStream(2, "<stderr>")
    atexit.register(drain_console)


def drain_console() -> None:
    """Give what was said last the time to be written, where guard_console was called."""
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, GuardedStream):
            stream.drain(max(0.0, deadline - time.monotonic()))


def say_line(text: str) -> None:
    """On stderr, also where that is the caller's own stream. Does not fail."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def say_text(text: str) -> None:
    say_line(f"moesaic: {text}")


def say(event: str, **fields: object) -> None:
    """One line, for people and programs."""
    say_line(" ".join([f"moesaic: event={event}", *(f"{name}={value}" for name, value in fields.items())]))
