"""Which Moesaic this is, and which torch is installed, without importing it, nor what Python's library needs to read
the data of packages (an e-mail parser among it). Standard library only."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

__version__ = "0.1.0"


def torch_version() -> str:
    """ "": there is none."""
    return torch_says("__version__")


def torch_says(name: str) -> str:
    """What its version.py does; "": nothing."""
    home = torch_home()
    text = (home / "version.py").read_text() if home is not None and (home / "version.py").exists() else ""
    found = re.search(rf"^{name}\b[^=\n]*= *'([^']*)'", text, re.MULTILINE)
    return found[1] if found else ""


def torch_home() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
