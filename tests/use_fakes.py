"""The fakes of tests/fakes in the place of the libraries whose names they have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAKES = Path(__file__).parent / "fakes"
NAMES = {path.stem for path in FAKES.iterdir() if not path.stem.startswith(("_", "fake_"))}


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in NAMES]:
        del sys.modules[name]


@contextmanager
def use_fakes() -> Iterator[None]:
    """Importable inside, gone afterwards."""
    _forget()
    paths = [str(FAKES), str(FAKES / "fake_parts")]
    sys.path[:0] = paths
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)
        _forget()
