"""Libraries that need not be there: imported when the backend that wants one is made, never before."""

from __future__ import annotations

import importlib
from types import ModuleType


def load(module: str, install: str) -> ModuleType:
    """The module. Raises ValueError, one line that names what to type (`install`), when it cannot be imported: such
    libraries fail in many ways on a machine that does not suit them, and none of them is ours to mend."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{module} cannot be imported ({reason}); to install it: {install}") from error
