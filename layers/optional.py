"""Libraries that need not be there: imported when what wants one is made, never before."""

from __future__ import annotations

import importlib
from typing import Any


class MissingLibrary(ImportError, ValueError):
    """What was asked for needs a library that cannot be imported here; one line that names what to type."""


def load(module: str, install: str) -> Any:
    """The module. Raises MissingLibrary, whatever went wrong: a library that was built for another machine has many
    ways to say so, and none of them is ours to mend. install: the line to type."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MissingLibrary(f"{module} cannot be imported ({reason}); to install it: {install}") from error
