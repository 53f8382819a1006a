"""`moesaic explain`: what would be decided for a model on this machine, and why."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from engine.plan import make_plan
from moesaic.options import engine_config, engine_options


@click.command("explain")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@engine_options
def command(as_json: bool, **options: Any) -> None:
    """Print the resolved plan for MODEL (default: the embedded one) with the reason for every choice."""
    plan = make_plan(engine_config(options))
    values = dataclasses.asdict(plan)
    reasons = values.pop("reasons")
    if as_json:
        print(json.dumps({"plan": values, "reasons": reasons}))
        return
    table = Table("field", "value", "why", title=f"Plan for {plan.served_model_names[0]}", title_justify="left")
    for name, value in values.items():
        table.add_row(
            name,
            _shown(value),
            reasons.get(
                name, "from the model" if name in ("model_path", "architecture") else "the default or as asked"
            ),
        )
    Console().print(table)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return "off" if value is None else str(value)
