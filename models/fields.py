"""Reads typed fields out of a config.json, with errors that name the file, the field and what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", bool, int, float, str)

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


class ConfigError(ValueError):
    """A config.json that cannot be used: one line with file, field, and what was expected."""


class _Required:
    """Marks a field without a default."""


REQUIRED = _Required()


class Fields:
    """One JSON object. `source` is the file's name for messages; `prefix` the path of this object inside it."""

    def __init__(self, raw: dict[str, Any], source: str, prefix: str = "") -> None:
        self.raw = raw
        self.source = source
        self.prefix = prefix

    @staticmethod
    def from_file(path: Path) -> Fields:
        """Raises ConfigError when the file is missing, unreadable or not a JSON object."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: expected a JSON object, got {type(raw).__name__}")
        return Fields(raw, str(path))

    def error(self, name: str, expected: str) -> ConfigError:
        """The error to raise for field `name`."""
        got = f"got {json.dumps(self.raw[name])[:80]}" if name in self.raw else "it is missing"
        return ConfigError(f"{self.source}: {self.prefix}{name}: expected {expected}, {got}")

    def has(self, name: str) -> bool:
        """Present and not null."""
        return self.raw.get(name) is not None

    def _get(self, name: str, kind: type[T], default: T | _Required) -> T:
        value = self.raw.get(name)
        if value is None:
            if isinstance(default, _Required):
                raise self.error(name, _NAMES[kind])
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, _NAMES[kind])
        return value

    def integer(self, name: str, default: int | _Required = REQUIRED, minimum: int = 1) -> int:
        value = self._get(name, int, default)
        if value < minimum:
            raise self.error(name, f"a whole number of at least {minimum}")
        return value

    def number(self, name: str, default: float | _Required = REQUIRED) -> float:
        return self._get(name, float, default)

    def positive(self, name: str, default: float | _Required = REQUIRED) -> float:
        value = self._get(name, float, default)
        if not value > 0:
            raise self.error(name, "a number above 0")
        return value

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, default: bool | _Required = REQUIRED) -> bool:
        return self._get(name, bool, default)

    def text(self, name: str, default: str | _Required = REQUIRED) -> str:
        return self._get(name, str, default)

    def integers(self, name: str, default: tuple[int, ...] | _Required = REQUIRED) -> tuple[int, ...]:
        value = self.raw.get(name)
        if value is None and not isinstance(default, _Required):
            return default
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise self.error(name, "a list of whole numbers")
        return tuple(value)

    def first_of(self, name: str) -> str:
        """The first of a list of strings that must not be empty."""
        value = self.raw.get(name)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise self.error(name, "a list of strings")
        return value[0]

    def section(self, name: str) -> Fields:
        """The JSON object under `name`; raises if it is absent or something else."""
        value = self.raw.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, self.source, f"{self.prefix}{name}.")

    def only(self, name: str, *allowed: object, reason: str = "is supported") -> None:
        """Refuse any value but `allowed` (absent is fine): for fields that change the arithmetic."""
        if name in self.raw and self.raw[name] not in allowed:
            choices = " or ".join(json.dumps(value) for value in allowed)
            raise self.error(name, f"{choices} (nothing else {reason})")
