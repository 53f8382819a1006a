"""docs/eplb.md: its commands are real, and run as written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from moesaic.cli import cli
from moesaic.eplb import VERBS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "eplb.md").read_text()
COMMANDS = [line for line in PAGE.splitlines() if line.startswith(".venv/bin/moesaic eplb ")]


@pytest.mark.parametrize("line", COMMANDS, ids=[line[23:60] for line in COMMANDS])
def test_every_command_of_the_page_is_understood(line: str) -> None:
    """The parser takes it; nothing runs."""
    verb, *arguments = shlex.split(line)[2:]
    group = cli.get_command(click.Context(cli), "eplb")
    assert isinstance(group, click.Group)
    command = group.get_command(click.Context(group), verb)
    assert command is not None
    command.make_context(verb, arguments)


def test_the_page_names_every_verb_and_every_format() -> None:
    for verb in VERBS:
        assert re.search(rf"`{verb}\b", PAGE) or re.search(rf"`[a-z]+`, `{verb}", PAGE), verb
    assert len({shlex.split(line)[2] for line in COMMANDS}) >= 10


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """In a folder of its own in place of build/; every command ends with 0 and leaves the file that it says."""
    for line in COMMANDS:
        words = [word.replace("build/", f"{tmp_path}/") for word in shlex.split(line)[1:]]
        done = subprocess.run(
            [sys.executable, "-m", "moesaic", *words], capture_output=True, text=True, timeout=180, cwd=ROOT
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        if "-o" in words:
            assert Path(words[words.index("-o") + 1]).stat().st_size > 0
