"""Keyword arguments of `moesaic.LLM` and `moesaic.AsyncLLM` that EngineConfig does not know, or not in that spelling:
taken as `moesaic serve` takes the options of these names, and vLLM's beside them (moesaic/vllm_flags.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from configs.engine import EngineConfig
from moesaic.command_line import VllmCommand
from moesaic.options import engine_config, engine_options

_FIELDS = {field.name: field.default for field in structs.fields(EngineConfig)}


def config_of(asked: Mapping[str, Any]) -> EngineConfig:
    """TypeError for a keyword that is none; ValueError, one line that names it, for a value that cannot be."""
    if "config" in asked:  # on a command line a file of options
        raise TypeError("there is no keyword argument 'config'; LLM.from_config takes an EngineConfig")
    words, kept = list[str](), dict[str, Any]()
    for name, value in asked.items():
        if name in _FIELDS and not _can_be_written(value):
            kept[name] = value
        elif value is not None:
            words += _words(name, value)
    try:
        config = engine_config(_command.make_context("LLM", words).params)
    except click.NoSuchOption as error:
        name = _as_keyword(error.option_name)
        raise TypeError(f"there is no keyword argument {name!r}{_alternatives(error.possibilities or ())}") from None
    except click.UsageError as error:
        text = error.format_message().replace("Invalid value for ", "")
        raise ValueError(re.sub(r"'?(--[a-z0-9-]+)'?", lambda found: _as_keyword(found[1]), text)) from None
    return structs.replace(config, **kept)


@click.command(cls=VllmCommand, add_help_option=False)
@engine_options
def _command(**options: Any) -> None:
    """Its words are parsed, and it is never called."""


def _can_be_written(value: object) -> bool:
    """None is as if nothing had been given."""
    written = isinstance(value, str | int | float | Path | dict | list | tuple)
    return written or value is None or str(value).startswith("torch.")


def _words(name: str, value: Any) -> list[str]:
    """As on a command line."""
    flag, own = "--" + name.replace("_", "-"), _FIELDS.get(name)
    if isinstance(value, bool):
        if name == "enable_dbo":
            return [f"{flag}={'on' if value else 'off'}"]
        return [flag] if value else [f"--no-{flag[2:]}"] if isinstance(own, bool) else []
    if name not in _FIELDS and value in ("", [], (), {}):  # nothing is asked for
        return []
    if isinstance(value, dict | list | tuple):
        try:
            return [f"{flag}={json.dumps(value)}"]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must hold what JSON can: {error}") from None
    return [f"{flag}={str(value).removeprefix('torch.')}"]


def _as_keyword(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _alternatives(flags: Iterable[str]) -> str:
    names = sorted(map(_as_keyword, flags))
    return f"; did you mean {' or '.join(names)}?" if names else ""
