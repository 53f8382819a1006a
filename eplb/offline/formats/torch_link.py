"""The way to torch files that does not import torch before there is one: it takes seconds."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def read(path: Path) -> Any:
    """See eplb.offline.formats.torch_file.read."""
    return importlib.import_module("eplb.offline.formats.torch_file").read(path)


def write(path: Path, value: Any) -> None:
    """See eplb.offline.formats.torch_file.write."""
    importlib.import_module("eplb.offline.formats.torch_file").write(path, value)
