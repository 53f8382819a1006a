"""Processes are started by a thread that lasts as long as this process, as the kernel ends them with the thread that
started them (engine/process/orphan.py), and threads of a caller's come and go. Standard library only."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from typing import Any

Started = subprocess.Popen[bytes] | BaseException


class _Thread:
    """Made when it is first needed; a daemon, so that it ends with the process only."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._asked: queue.SimpleQueue[tuple[list[str], dict[str, Any], queue.SimpleQueue[Started]]]
        self._asked = queue.SimpleQueue()
        threading.Thread(target=self._run, name="starting processes", daemon=True).start()

    @property
    def here(self) -> bool:
        """Not that of the process that this one was forked from."""
        return self._process == os.getpid()

    def popen(self, command: list[str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
        answer: queue.SimpleQueue[Started] = queue.SimpleQueue()
        self._asked.put((command, options, answer))
        started = answer.get()
        if isinstance(started, BaseException):
            raise started
        return started

    def _run(self) -> None:
        while True:
            command, options, answer = self._asked.get()
            try:
                answer.put(subprocess.Popen(command, **options))
            except Exception as error:
                answer.put(error)


_lock = threading.Lock()
_threads: list[_Thread] = []  # at most one of this process


def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """subprocess.Popen; what it starts does not end with the thread that calls this."""
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, **options)
    with _lock:
        if not _threads or not _threads[-1].here:
            _threads[:] = [_Thread()]
        thread = _threads[-1]
    return thread.popen(command, options)
