"""Files that the caches of ranks lie in, which their ranks' ends leave as they are."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from pathlib import Path

from cache import shared


@cache
def ended() -> int:
    """The life of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid | 1 << 30


class CacheFiles:
    """Of every rank. `end`: what is in a rank's was left by a process that has ended."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: None: one that goes with this object."""
        self._folder = folder or Path(tempfile.mkdtemp())
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self._folder)

    def __call__(self, rank: int) -> list[Path]:
        files = [self._folder / f"{rank}-{number}" for number in (0, 1)]
        for file in files:
            file.touch()
        return files

    def end(self, rank: int) -> None:
        for file in self(rank):
            raw = file.read_bytes()[: shared._HEADER.size]
            if len(raw) == shared._HEADER.size:
                magic, life, _, digest = shared._HEADER.unpack(raw)
                with file.open("r+b") as there:
                    there.write(shared._HEADER.pack(magic, life, ended(), digest))
