"""`moesaic eplb`: the balancer's tools on files. A verb's module, and numpy with it, is imported when that verb runs.

Exit codes: 0 ok, 1 usage, 2 bad input, 3 balance gate, 4 coverage gate, 5 move budget, 6 infeasible.
"""

from __future__ import annotations

from typing import Any

import click

from moesaic.lazy import LazyGroup

VERBS = {
    "sample": ("moesaic.eplb.sample", "Write a synthetic trace of a named shape, to try the other verbs."),
    "import": ("moesaic.eplb.import_", "Turn a peer's file into a trace or a placement."),
    "stats": ("moesaic.eplb.stats", "Skew, drift and noise of a trace."),
    "explain": ("moesaic.eplb.explain", "One layer of a trace in words."),
    "plan": ("moesaic.eplb.plan", "Make a placement from a trace."),
    "replay": ("moesaic.eplb.replay", "Run policies over a trace: balance, moves, pauses."),
    "curve": ("moesaic.eplb.curve", "Redundancy against memory and balance."),
    "whatif": ("moesaic.eplb.whatif", "What the loss of a rank or a node would uncover."),
    "cost": ("moesaic.eplb.cost", "Milliseconds of a step on a described cluster."),
    "diff": ("moesaic.eplb.diff", "What moves between two placements."),
    "check": ("moesaic.eplb.check", "Is a placement valid, balanced and covered? For CI."),
    "export": ("moesaic.eplb.export", "Turn a trace or a placement into a peer's file."),
    "report": ("moesaic.eplb.report", "One HTML file with heatmaps and curves."),
}

EXIT_USAGE = 1


class EplbGroup(LazyGroup):
    """Usage errors exit with 1: 2 means bad input here, and click's own 2 would hide it from a script."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*args, **options)
        except click.UsageError as error:
            error.show()
            raise click.exceptions.Exit(EXIT_USAGE) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            error.show()
            raise click.exceptions.Exit(EXIT_USAGE) from None


@click.group("eplb", cls=EplbGroup, table=VERBS)
def command() -> None:
    """Where experts live: see the load, plan, replay, predict and check before anything moves.

    Exit codes: 0 ok, 1 usage, 2 bad input, 3 balance gate failed, 4 coverage gate failed, 5 move budget exceeded,
    6 infeasible.
    """
