"""The command lines of processes that this one starts. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def child_command(module: str, arguments: Sequence[str]) -> list[str]:
    """The words that run `module` as a child of this process. -P: no file of the working directory is imported in the
    place of one of ours."""
    return [sys.executable, "-P", "-m", module, *arguments, "--parent", str(os.getpid())]
