"""`moesaic node`: `moesaic serve` that is started again when it is killed, for systems that do not do this."""

from __future__ import annotations

import sys

import click

from engine.process.console import guard_console
from launch.launchers.agent import Agent
from moesaic import serve


@click.command("node", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[WORDS OF serve]")
def command(words: tuple[str, ...]) -> None:
    """Keep `moesaic serve` running on this node: it comes back when it was killed, and lost machines are met again.

    Takes the words of `moesaic serve`. SIGTERM and SIGINT are passed on to it, once, and end both.
    """
    guard_console()
    drain = serve.command.make_context("serve", list(words)).params["shutdown_timeout"]
    agent = Agent(words, drain=drain)
    agent.catch_signals()
    sys.exit(agent.run())
