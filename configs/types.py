"""Whether the fields of a configuration hold what they are declared to hold: Python does not look. Standard library
only."""

from __future__ import annotations

import functools
import os
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "a text", NoneType: "None"}


def check_types(config: Any) -> None:
    """config: a Struct. ValueError names the first field with a value of another type, and what it may be."""
    kind: type = type(config)
    for name, hint in _hints(kind).items():
        value = getattr(config, name)
        if not _fits(value, hint):
            raise ValueError(f"{name} must be {_words(hint)}, not {value!r:.100}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in parts
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple | list) and all(_fits(item, parts[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict)
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    if hint is str and isinstance(value, os.PathLike):
        return True
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(parts)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_words(part) for part in parts)
    if get_origin(hint) is tuple:
        return f"a tuple, each {_words(parts[0])}"
    return _WORDS.get(hint, f"of type {hint.__name__}")
