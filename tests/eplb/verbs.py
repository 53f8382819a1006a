"""`moesaic eplb` through click's runner, for the tests of its verbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from moesaic.cli import cli


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["eplb", *map(str, arguments)])


def answer(*arguments: str | Path) -> dict[str, Any]:
    """What the verb prints with --json."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value
