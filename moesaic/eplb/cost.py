"""`moesaic eplb cost`: the predicted time of a step on a described cluster, and the model's check against published
figures."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from eplb.offline.cost import balanced_part
from eplb.offline.published import check, summary
from eplb.offline.shapes import load_shape
from eplb.placement import slots_needed
from moesaic.eplb.common import Infeasible, Output, output_options
from moesaic.eplb.described import Costing, Described, described_options


@click.command("cost")
@click.option("--gpus", type=int, help="Ranks of the cluster (not with --cluster).")
@click.option("--slots", type=int, help="Slots of a rank and layer. Default: what the experts and one spare need.")
@click.option("--balance", default="1,0.95,0.9,0.8,0.6,0.4", show_default=True, help="Mean / max of the ranks' loads.")
@click.option("--check", "check_", is_flag=True, help="Predict published figures and print the errors.")
@described_options
@output_options
def command(gpus: int | None, slots: int | None, balance: str, check_: bool, described: Described, out: Output) -> None:
    """Milliseconds and tokens/s of a step for several balances. Needs --gpu and --gpus, or --cluster FILE.

    With --check the model predicts published figures of DeepSeek-class serving instead, and shows the errors.
    """
    if check_:
        _check(out)
        return
    cluster = described.cluster(gpus)
    if cluster is None:
        raise click.UsageError("--gpu and --gpus, or --cluster FILE, say what cluster to predict for")
    costing = Costing(cluster, load_shape(described.model or "deepseek-v3", described.expert_dtype), described.work)
    fewest = slots_needed(costing.shape.num_experts, cluster.num_gpus)
    num_slots = fewest + 1 if slots is None else slots
    if num_slots < fewest:
        raise Infeasible(
            f"{num_slots} slots a rank cannot hold {costing.shape.num_experts} experts; the smallest "
            f"feasible S is {fewest}"
        )
    rows = []
    for value in _balances(balance):
        part = balanced_part(cluster.num_gpus, num_slots, value)
        rows.append({"balance": value, **costing.step(part).as_dict()})
    words = costing.words()
    table = Table(title=f"One step; {num_slots} slots a rank", title_justify="left", box=None)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*[f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}" for value in row.values()])
    out.result({"slots": num_slots, "rows": rows, "assumptions": words}, table, *words)


def _balances(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--balance is {text!r}; it must be numbers, comma-separated") from None


def _check(out: Output) -> None:
    rows = check()
    table = Table(title="* sets the model's constants; the others were not used for it", title_justify="left", box=None)
    for name in ("figure", "published", "predicted", "error", "source", "assumed"):
        table.add_column(name, justify="right" if name in ("published", "predicted", "error") else "left")
    for row in rows:
        table.add_row(*_shown(row))
    total = summary(rows)
    lines = [f"{name.replace('_', ' ')}: {value:g}" for name, value in total.items()]
    out.result({"summary": total, "rows": rows}, table, *lines)


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    digits = 0 if row["published"] >= 100 else 2
    mark = " *" if row["fitted"] else ""
    return (
        row["name"] + mark,
        f"{row['published']:,.{digits}f} {row['unit']}",
        f"{row['predicted']:,.{digits}f}",
        f"{row['error_percent']:+.1f} %",
        row["source"],
        row["assumed"],
    )
