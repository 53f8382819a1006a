"""Whether our rooms (docs/design.md) are the ones that Python finds: their names are common words, and a file of the
user's, such as configs.py in the working directory, would be imported in their place. Standard library only."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOMS = (
    "cache", "configs", "dbo", "engine", "ep", "eplb", "front", "launch", "layers", "mla", "models", "moe_kernels",
    "native", "server", "store",
)  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent


def check_rooms(rooms: Iterable[str] = ROOMS) -> None:
    """ImportError on one line that names the file or folder which stands in the place of a room."""
    for room in rooms:
        spec = importlib.util.find_spec(room)
        if spec is None:
            raise ImportError(f"moesaic is not installed whole: there is no package {room}")
        found = spec.origin or next(iter(spec.submodule_search_locations or ()), "something else")
        if Path(found).resolve() != ROOT / room / "__init__.py":
            raise ImportError(
                f"{found} would be imported in the place of Moesaic's package {room}: rename it, or start Moesaic from "
                "another directory"
            )


@functools.cache
def check_own_rooms() -> None:
    """The same, once, of all but the server's, whose name a script may have."""
    check_rooms(room for room in ROOMS if room != "server")


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """For a block that imports: what it makes is no garbage, and it would be looked through while it grows."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
