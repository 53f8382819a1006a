"""The store of weights of one machine, in the process that starts its ranks, or is the only one: it makes the memory,
or takes a file of the cache on disk, holds it as long as it lives, and has a full one written to the cache once the
ranks serve."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Protocol

from configs.engine import Plan
from engine.process.child import child_command
from engine.process.places import store_capacity, store_names
from store.cache import WeightCache
from store.memory import Store, complete_key, make_store
from store.pages import brought_in

LOCK_SECONDS = 2.0  # after the ranks began to serve: not beside the first request
NICENESS = 10  # of what is done while they may be at work


class Keeper(Protocol):
    """Files in memory under names, as launch/processes.py: RuntimeDir has them."""

    def keep(self, name: str, file: int) -> None: ...
    def kept(self, name: str) -> int | None: ...
    def file(self, name: str) -> Path: ...


class WeightsKept:
    """cached: the weights come from the cache on disk. locks: this object keeps their pages in memory then."""

    def __init__(self, plan: Plan, runtime: Keeper, locks: bool = True) -> None:
        self.cached = False
        self._locks = locks
        self._directory = plan.weight_cache
        self._key = ""
        self._file = -1  # of one store; they are all alike
        self._name, *others = store_names(plan.store_nodes)
        self._runtime = runtime
        self._writer: subprocess.Popen[bytes] | None = None
        self._served_since = 0.0
        self._locking: threading.Thread | None = None
        self._locked = contextlib.ExitStack()
        if not plan.weight_store:
            return
        self._key = plan.weight_key
        found = WeightCache(Path(plan.weight_cache)).find(self._key) if plan.weight_cache else None
        self.cached = found is not None
        held = runtime.kept(self._name)
        if held is not None:  # the ranks of this machine begin anew, and their weights are still there
            self._file = held
            if found is not None:
                os.close(found)
            return
        self._file = make_store(self._name) if found is None else found
        runtime.keep(self._name, self._file)
        for name in others:  # a file of the cache lies where the system keeps it
            runtime.keep(name, make_store(name) if found is None else os.dup(found))

    def look(self) -> None:
        """Call it now and then while the ranks serve."""
        now = time.monotonic()
        self._served_since = self._served_since or now
        if self.cached and self._locks and self._locking is None and now - self._served_since >= LOCK_SECONDS:
            self._locking = threading.Thread(target=self._lock, name="locking weights", daemon=True)
            self._locking.start()
        if self._writer is not None:
            self._writer.poll()
        elif self._directory and not self.cached and self._file >= 0 and complete_key(self._file) == self._key:
            arguments = [
                "--store",
                str(self._runtime.file(self._name)),
                "--key",
                self._key,
                "--directory",
                self._directory,
            ]
            command = child_command("engine.process.cache_process", arguments)
            self._writer = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)

    def _lock(self) -> None:
        """Pages of a file on disk stay in memory while this process lives, as far as it may say so: a system that is
        short of memory, or takes back what has not been used for a while, would read them again in the middle of a
        step. Ranks do not say so themselves, so that the kernel need not unlock all of it to end one. They
        may be at work, and have the cores."""
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)  # on Linux of this thread
        self._locked.enter_context(brought_in(self._file, locked=True))

    def leave_writer(self) -> None:
        """To itself: it ends when it has written, or with this process."""
        if self._writer is not None:
            threading.Thread(target=self._writer.wait, name="writing weights", daemon=True).start()


class OwnWeights:
    """Of a rank in this process. store: None where its weights are not kept on disk."""

    def __init__(self, plan: Plan) -> None:
        self._files: dict[str, int] = {}
        self._weights = WeightsKept(plan, self, locks=False)  # the rank's own mapping does
        self._mapping: threading.Thread | None = None
        self.store: Store | None = None
        if plan.weight_store:
            self.store = Store(self.file(*self._files), plan.weight_key, store_capacity(plan))

    def map_ahead(self) -> None:
        """On a thread, as soon as there is something to be mapped; what has just been packed is written to disk."""
        self._weights.look()
        if self.store is not None:
            map_ahead = partial(self.store.map_ahead, locked=self._weights.cached)
            self._mapping = threading.Thread(target=map_ahead, name="mapping", daemon=True)
            self._mapping.start()

    def keep(self, name: str, file: int) -> None:
        self._files[name] = file

    def kept(self, name: str) -> int | None:
        return self._files.get(name)

    def file(self, name: str) -> Path:
        return Path(f"/proc/{os.getpid()}/fd/{self._files[name]}")

    def close(self) -> None:
        """The rank has ended, or never began. Pages that are being mapped are mapped to the end, a second or two: they
        cannot be given back meanwhile."""
        self._weights.leave_writer()
        if self._mapping is not None:
            self._mapping.join()
        if self.store is not None:
            self.store.close()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
