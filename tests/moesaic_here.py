"""The command line in the test's own process, which has torch already: for help and refusals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from engine.process.console import drain_console
from moesaic.cli import main


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `moesaic` with these arguments says, and its exit code."""
    before, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["moesaic", *arguments]
    try:
        with _said() as (said, errors), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
        signal.signal(signal.SIGTERM, handler)
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(arguments, ended.value.code, "".join(said), "".join(errors))


@contextlib.contextmanager
def _said() -> Iterator[tuple[list[str], list[str]]]:
    """What is written to stdout and stderr, or to their descriptors; there when it ends."""
    found: tuple[list[str], list[str]] = ([], [])
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        kept = [os.dup(number) for number in (1, 2)]
        for file, number in ((out, 1), (err, 2)):
            os.dup2(file.fileno(), number)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield found
                drain_console()  # of `moesaic serve`, which has a queue before both
        finally:
            for old, number in zip(kept, (1, 2), strict=True):
                os.dup2(old, number)
                os.close(old)
            for file, text in zip((out, err), found, strict=True):
                file.flush()
                file.seek(0)
                text.append(file.read())
