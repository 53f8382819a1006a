"""What all verbs share: options, output, progress, exit codes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import click
import numpy as np
from msgspec import Struct
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from eplb.offline.files import write_bytes
from eplb.offline.formats.registry import read_any_placement, read_any_trace
from eplb.offline.formats.source import Hints
from eplb.offline.placement_file import PlacementFile
from eplb.offline.trace import Trace

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
Tell = Callable[[int, int], None]


class Option(Protocol):
    """What click.option gives."""

    def __call__(self, command: Command, /) -> Command: ...


class Refused(click.ClickException):
    """One line on stderr and an exit code of its own."""

    def show(self, file: Any = None) -> None:
        print(f"moesaic eplb: {self.message}", file=sys.stderr)


class BalanceGate(Refused):
    exit_code = 3


class CoverageGate(Refused):
    exit_code = 4


class MoveBudget(Refused):
    exit_code = 5


class Infeasible(Refused):
    """The message says the smallest number of slots per rank that would do."""

    exit_code = 6


class Output(Struct, frozen=True):
    """How a verb answers: its result as JSON or as text, on stdout or in a file; progress unless quiet."""

    as_json: bool
    quiet: bool
    output: Path | None

    def result(self, value: Mapping[str, Any], *shown: RenderableType) -> None:
        """The result of a verb that only looks: goes to --output when given, else to stdout."""
        self._print(value, shown, self.output)

    def written(self, value: Mapping[str, Any], *shown: RenderableType) -> None:
        """The summary of a verb that wrote --output itself: goes to stdout; nothing when quiet without --json."""
        if self.as_json or not self.quiet:
            self._print(value, shown, None)

    def _print(self, value: Mapping[str, Any], shown: tuple[RenderableType, ...], path: Path | None) -> None:
        if self.as_json:
            text = json.dumps(plain(value), allow_nan=False) + "\n"
        else:
            # A file, or a pipe, is given the width that the tables ask for.
            console = Console(width=None if path is None and sys.stdout.isatty() else 160, record=True, quiet=True)
            with console.capture() as capture:
                console.quiet = False
                for part in shown:
                    console.print(part)
            text = "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
        if path is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            write_bytes(path, text.encode())

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Tell]:
        """A function (done, total) that moves a bar on stderr; no bar when quiet or when stderr is no terminal."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda done, total: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def taking(into: str, make: Callable[..., Any], *options: Option) -> Option:
    """A decorator that adds `options`; the command takes make(**their values) as `into`. The names of `make`'s
    parameters are those of the options."""
    names = tuple(inspect.signature(make).parameters)

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def gather(*args: Any, **given: Any) -> Any:
            made = make(**{name: given.pop(name) for name in names})
            return command(*args, **{into: made}, **given)

        return with_options(*options)(cast(Command, gather))

    return add


def with_options(*options: Option) -> Option:
    """A decorator that adds all of them, in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


output_options = taking(
    "out",
    Output,
    click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output."),
    click.option("--quiet", "-q", is_flag=True, help="No progress and no summary."),
    click.option("--output", "-o", type=FILE, metavar="PATH", help="Write to this file."),
)


def grid(*columns: str, title: str = "") -> Table:
    """A table without lines: the first column for names, numbers right-aligned."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", overflow="fold")
    return table


def needed_output(out: Output) -> Path:
    """The path of a verb that makes a file."""
    if out.output is None:
        raise click.UsageError("--output PATH is needed: this verb writes a file")
    return out.output


def plain(value: Any) -> Any:
    """`value` with numpy's numbers and arrays as Python's, and what is no finite number as null (JSON has no NaN)."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return round(float(value), 6) if math.isfinite(value) else None
    return value


def trace_of(path: str, out: Output) -> Trace:
    """The loads in a file of any format, with a bar. ValueError naming the file when it cannot be read."""
    with out.progress(f"reading {path}") as tell:
        return read_any_trace(Path(path), Hints(progress=tell))


def placement_of(path: str, ranks: int = 0) -> PlacementFile:
    """The placement in a file of any format. ranks: for formats that do not say it."""
    return read_any_placement(Path(path), Hints(ranks=ranks))
