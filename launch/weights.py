"""The store of weights of one machine, in the process that starts its ranks: it makes the memory, or takes a file of
the cache on disk, holds it as long as it lives, and has a full one written to the cache once the ranks serve."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from configs.engine import Plan
from engine.process.orphan import child_command
from engine.process.places import store_names
from launch.processes import RuntimeDir
from store.cache import WeightCache
from store.memory import complete_key, make_store


class WeightsKept:
    """cached: the weights come from the cache on disk."""

    def __init__(self, plan: Plan, runtime: RuntimeDir) -> None:
        self.cached = False
        self._directory = plan.weight_cache
        self._key = ""
        self._file = -1  # of one store; they are all alike
        self._name, *others = store_names(plan.store_nodes)
        self._runtime = runtime
        self._writer: subprocess.Popen[bytes] | None = None
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
