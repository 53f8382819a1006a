"""Where the real one says how the ranks find each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class MnnvlConfig:
    comm_backend: Any = None
