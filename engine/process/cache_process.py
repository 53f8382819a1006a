"""Writes a full store of weights to the cache on disk, beside the server and after everything else that wants the disk
or a core: `python -m engine.process.cache_process --store FILE --key KEY --directory DIR --parent PID`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from engine.process.console import guard_console, say
from engine.process.orphan import die_with_parent
from store.cache import WeightCache

NICENESS = 19


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.process.cache_process", description="writes packed weights to disk")
    parser.add_argument("--store", type=Path, required=True, help="the server's store of weights")
    parser.add_argument("--key", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--parent", type=int, help="process id of the parent; this process does not outlive it")
    options = parser.parse_args()
    guard_console()
    die_with_parent(options.parent)
    os.nice(NICENESS)
    began = time.monotonic()
    try:
        store = os.open(options.store, os.O_RDONLY | os.O_CLOEXEC)
        written = WeightCache(options.directory).write(store, options.key)
    except OSError as error:
        say("weight_cache_failed", directory=str(options.directory), reason=repr(error.strerror))
        return
    size = os.fstat(store).st_size
    if not written:
        say("weight_cache_full", directory=str(options.directory), bytes=size)
        return
    say(
        "weight_cache_written", directory=str(options.directory), bytes=size, seconds=round(time.monotonic() - began, 1)
    )


if __name__ == "__main__":
    main()
