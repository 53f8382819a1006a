"""The fakes of tests/fakes in the place of the libraries whose names they have."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.env import child_environment

FAKES = Path(__file__).parent / "fakes"
NAMES = {path.stem for path in FAKES.iterdir() if not path.stem.startswith(("_", "fake_"))}


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in NAMES]:
        del sys.modules[name]


@contextmanager
def use_fakes() -> Iterator[None]:
    """Importable inside, gone afterwards."""
    _forget()
    before = set(os.environ)
    as_ranks = {key: value for key, value in child_environment(1, gpus=True).items() if key not in before}
    os.environ.update(as_ranks)
    paths = [str(FAKES), str(FAKES / "fake_parts")]
    sys.path[:0] = paths
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)
        for key in as_ranks:
            os.environ.pop(key, None)
        _forget()
