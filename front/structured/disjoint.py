"""Whether two JSON schemas can hold for one value. `oneOf` of schemas of which no two can is `anyOf`, which back ends
follow. What is not evident counts as overlapping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 8  # of references, and of properties in properties
_TYPES = frozenset(("string", "number", "boolean", "null", "array", "object"))


class Disjoint:
    """top: the document in which references point. It counts what it compares, so that a schema cannot make it long."""

    def __init__(self, top: object, budget: int = 20_000) -> None:
        self._top = None if _has_inner_id(top) else top
        self._budget = budget

    def pairwise(self, schemas: Sequence[object]) -> bool:
        return all(self._apart(a, b, 0) for place, a in enumerate(schemas) for b in schemas[:place])

    def _apart(self, one: object, other: object, depth: int) -> bool:
        self._budget -= 1
        if depth > MAX_DEPTH or self._budget < 0:
            return False
        a, b = self.found(one), self.found(other)
        if a is False or b is False:
            return True
        if not isinstance(a, Mapping) or not isinstance(b, Mapping):
            return False
        first, second = _values(a), _values(b)
        if first is not None and second is not None:
            return not any(_same(x, y) for x in first for y in second)
        types = _types(a, first) & _types(b, second)
        if not types:
            return True
        if types == {"object"}:
            return self._objects_apart(a, b, depth) or self._objects_apart(b, a, depth)
        if types == {"string"}:
            return _ranges_apart(a, b, "minLength", "maxLength")
        return types == {"number"} and _ranges_apart(a, b, "minimum", "maximum")

    def _objects_apart(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        """A property that a must have is one that b has otherwise, or cannot have."""
        needed, own, others = a.get("required"), a.get("properties"), b.get("properties")
        others = others if isinstance(others, Mapping) else {}
        closed = b.get("additionalProperties") is False and "patternProperties" not in b
        for name in needed if isinstance(needed, list) else ():
            if not isinstance(name, str):
                return False
            if name not in others:
                if closed and "$ref" not in b and "allOf" not in b:
                    return True
            elif isinstance(own, Mapping) and name in own and self._apart(own[name], others[name], depth + 1):
                return True
        return False

    def found(self, schema: object) -> object:
        """What it refers to, where it says nothing else of its own that matters here."""
        for _ in range(MAX_DEPTH):
            name = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(name, str) or not (name == "#" or name.startswith("#/")):
                return schema
            schema = self._top
            for part in name.split("/")[1:]:
                key = unquote(part).replace("~1", "/").replace("~0", "~")
                schema = schema.get(key) if isinstance(schema, Mapping) else None
        return None


def _has_inner_id(top: object) -> bool:
    """References of what stands within point elsewhere."""
    level = list(top.values()) if isinstance(top, Mapping) else []
    while level:
        item = level.pop()
        if isinstance(item, Mapping):
            if isinstance(item.get("$id"), str):
                return True
            level += item.values()
        elif isinstance(item, list):
            level += item
    return False


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """All that may be valid; None: there is no list of them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and len(values) <= 256 else None


def _types(schema: Mapping[str, Any], values: list[Any] | None) -> frozenset[str]:
    """Those that a valid value may have; an integer is a number."""
    if values is not None:
        return frozenset(map(_type_of, values))
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind
    if not isinstance(kinds, list) or not kinds or not all(isinstance(one, str) for one in kinds):
        return _TYPES
    return frozenset("number" if one == "integer" else one for one in kinds)


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    kinds = ((int | float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _same(a: object, b: object) -> bool:
    """Of constants; lists and objects are not looked into."""
    kind = _type_of(a)
    return kind == _type_of(b) and (kind in ("array", "object") or a == b)


def _ranges_apart(a: Mapping[str, Any], b: Mapping[str, Any], low: str, high: str) -> bool:
    def bounds(schema: Mapping[str, Any]) -> tuple[float, float]:
        found = (schema.get(low), schema.get(high))
        least, most = (x if isinstance(x, int | float) and not isinstance(x, bool) else None for x in found)
        return -math.inf if least is None else least, math.inf if most is None else most

    (least, most), (other_least, other_most) = bounds(a), bounds(b)
    return most < other_least or other_most < least
