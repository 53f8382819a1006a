"""Reading and writing the balancer's files: errors are one line that names the file, and a file appears whole or not
at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Kind = TypeVar("Kind")


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open for reading; ValueError naming the file when it cannot be."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    with stream:
        yield stream


def read_bytes(path: Path) -> bytes:
    with open_file(path) as stream:
        return stream.read()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream beside `path` that takes its place at the end, and is gone when writing fails."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            yield stream
        part.replace(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as stream:
        stream.write(data)


def decode_json(data: bytes | msgspec.Raw, kind: type[Kind] | Any, where: object) -> Kind:
    """`data` as `kind`. ValueError in one line that begins with `where` and names the place in the JSON; NaN and
    Infinity, which Python writes but JSON does not have, too."""
    try:
        value: Kind = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {_what_is_wrong(bytes(data), error)}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from None
    return value


def _what_is_wrong(data: bytes, error: msgspec.DecodeError) -> str:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return " ".join(str(error).split())
    place = _not_finite(value, "$")
    return f"{place}; it must be a finite number" if place else str(error)


def _not_finite(value: object, place: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{place} is {value}"
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found = _not_finite(item, f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}".removeprefix("$."))
        if found:
            return found
    return ""


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a .npz by name, or that of a .npy under "". Nothing is unpickled.

    ValueError, one line with the file's name, when it is damaged.
    """
    with open_file(path) as stream:
        try:
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"": loaded}
            with loaded as arrays:
                return {name: arrays[name] for name in arrays}
        except Exception as error:  # numpy parses headers as Python text: damage shows in many ways
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise ValueError(f"{path} is no readable .npy or .npz file: {reason}") from None
