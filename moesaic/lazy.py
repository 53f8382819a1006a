"""A click group whose commands are imported only when one of them runs, so that --help answers at once."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click

from moesaic.rooms import no_collections


class LazyGroup(click.Group):
    """table: name -> (module, short help). The module's `command` is the click command."""

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.table:
            return None
        with no_collections():
            command = importlib.import_module(self.table[name][0]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """UsageError for an unknown command names those that are like it."""
        alike = difflib.get_close_matches(args[0], self.table)
        if args[0] in self.table or args[0].startswith("-") or not alike:
            return super().resolve_command(ctx, args)
        raise click.UsageError(f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, alike))}?", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The short help comes from the table: the modules need not be imported for it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])
