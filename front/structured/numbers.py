"""Numbers of a JSON schema, as far as the back end keeps them: it reads them as float64, by a short way that is exact
for few digits only, and bounds of integers as int64."""

from __future__ import annotations

import decimal
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_DIGITS, _POWER = 2**53, 22  # below these, digits and powers of ten are float64
_INT64 = 2**63 - 1
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
NUMBERS = frozenset((*_UPPER, *_LOWER, "multipleOf", "const", "enum"))


def kept(schema: Mapping[str, Any], key: str) -> Any:
    """What a keyword's value is to the back end. Bounds that it would round are narrowed. ValueError names the keyword
    where a constant or another number cannot be kept."""
    value = schema[key]
    if key in ("const", "enum"):
        return _constant(key, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if math.isnan(value) or (_exact(value) and abs(value) <= _INT64):
        return value
    if key in _UPPER:
        fits = schema.get("type") == "integer" and value >= _INT64
        return _INT64 if fits else _rounded(min(value, _INT64), decimal.ROUND_FLOOR)
    if key in _LOWER:
        return _rounded(max(value, -_INT64), decimal.ROUND_CEILING)
    raise _too_long(key, value)


def _constant(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_constant(key, one) for one in value]
    if isinstance(value, dict):
        return {name: _constant(key, one) for name, one in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if not _exact(value):
        raise _too_long(key, value)
    return int(value) if value == int(value) else value  # also minus zero


def _exact(value: float) -> bool:
    if not math.isfinite(value):
        return False
    _, digits, power = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(power, int)
    return int("".join(map(str, digits))) < _DIGITS and abs(power) <= _POWER


def _rounded(value: float, way: str) -> float:
    """To 15 digits."""
    rounded = decimal.Context(prec=15, rounding=way).create_decimal(repr(value))
    return int(rounded) if rounded == int(rounded) else float(rounded)


def _too_long(key: str, value: float) -> ValueError:
    return ValueError(f"{key}: {value!r} has more digits than can be followed")
