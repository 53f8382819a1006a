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
_MOST, _MOST_ROUND = 20_000, 10**6  # of multipleOf: any, and those of the factors 2 and 5
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
    if key == "multipleOf":
        _check_multiple(value)
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


def beside_zero(schema: dict[str, Any]) -> None:
    """Bounds that leave out zero leave out all that is nearer to it than 10^-15 too: of numbers that must be above
    0 and below 1 llguidance lets 0 through."""
    if schema.get("type") == "integer":
        return
    for bound, exclusive, nearest in (("minimum", "exclusiveMinimum", 1e-15), ("maximum", "exclusiveMaximum", -1e-15)):
        given, excludes = schema.get(bound), schema.get(exclusive)
        if excludes is True and given == 0 and not isinstance(given, bool):  # as drafts 3 and 4 had it
            schema[bound] = nearest
            del schema[exclusive]
        elif excludes == 0 and isinstance(excludes, int | float) and not isinstance(excludes, bool):
            del schema[exclusive]
            if isinstance(given, int | float) and not isinstance(given, bool):
                nearest = max(nearest, given) if bound == "minimum" else min(nearest, given)
            schema[bound] = nearest


def _check_multiple(value: float) -> None:
    """The back end makes a machine of as many states as the number has ones of its last decimal."""
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"multipleOf must be above 0, not {value!r}")
    number = Decimal(repr(value))
    while number != number.to_integral_value():
        number *= 10
    bare = int(number)
    for factor in (2, 5):
        while bare % factor == 0:
            bare //= factor
    if number > (_MOST_ROUND if bare == 1 else _MOST):
        raise ValueError(f"multipleOf: {value!r} is too large a number to be followed")
