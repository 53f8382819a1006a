"""`moesaic`: each command's module is imported only when that command runs, so that --help answers at once."""

from __future__ import annotations

import importlib
import sys

import click

COMMANDS = {
    "serve": ("moesaic.serve", "Serve a model over HTTP (OpenAI-compatible)."),
    "generate": ("moesaic.generate", "Continue prompts on this machine and print the text."),
    "chat": ("moesaic.chat", "Talk to a running server in the terminal."),
    "ranks": ("moesaic.ranks", "Show the ranks of a running server; grow or shrink it."),
    "bench": ("moesaic.bench", "Measure throughput, latency, or a running server."),
    "explain": ("moesaic.explain", "Print the plan for a model, with the reason for every choice."),
}


class LazyGroup(click.Group):
    """Lists commands from a table; loads the one that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The short help comes from the table: the modules need not be imported for it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moesaic")
def cli() -> None:
    """Moesaic: an inference engine for mixture-of-experts language models."""


def main() -> None:
    """Bad input is one line on stderr and exit code 2; a traceback means a bug."""
    try:
        cli(prog_name="moesaic")
    except ValueError as error:
        print(f"moesaic: error: {error}", file=sys.stderr)
        sys.exit(2)
