"""A directory that is made once, whole or not at all, and then stays. Free of torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from layers.identity import CheckpointError


def made_directory(directory: Path, complete: str, fill: Callable[[Path], None]) -> Path:
    """`directory`, which `fill` has written if it was not there yet. complete: a file of it. Raises CheckpointError,
    one line, where it cannot be written."""
    if (directory / complete).is_file():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            fill(made)
            _put(made, directory, complete)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error.strerror}") from None
    return directory


def _put(made: Path, directory: Path, complete: str) -> None:
    """Another process may have made the same meanwhile."""
    try:
        os.rename(made, directory)
    except OSError:
        if not (directory / complete).is_file():
            raise
