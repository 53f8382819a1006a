"""`moesaic eplb stats`: skew, drift and noise of a trace, per layer and in short."""

from __future__ import annotations

from typing import Any

import click
import numpy as np
from rich.table import Table

from eplb.balance import balancedness, rank_load
from eplb.bounds import balance_bound
from eplb.offline.stats import Drift, Skew, drift, skew, step_noise, window_records
from eplb.offline.trace import Trace
from eplb.placement import linear_placement
from moesaic.eplb.common import Output, grid, output_options, trace_of


@click.command("stats")
@click.argument("trace_path", metavar="TRACE")
@click.option("--window", type=click.IntRange(1), help="Records per window; default: as many as make 100 steps.")
@click.option("--ranks", type=click.IntRange(1), help="Add the balance of this many ranks without any balancer.")
@click.option("--slots", type=click.IntRange(1), help="Slots per rank: add the best balance that they allow.")
@click.option("--per-layer", is_flag=True, help="A row for every layer.")
@output_options
def command(
    trace_path: str, window: int | None, ranks: int | None, slots: int | None, per_layer: bool, out: Output
) -> None:
    """How uneven the experts' load in TRACE is, and how fast it changes."""
    trace = trace_of(trace_path, out)
    result = summarize(trace, window or window_records(trace), ranks or trace.meta.ranks, slots or 0, out)
    breaks = ", ".join(str(item["step"]) for item in result["domain_breaks"])
    notes = (
        f"windows of {result['window_records']} record(s); the workload changes domain at step {breaks or '(never)'}"
    )
    tables = [_layer_table(result["layers"])] if per_layer else []
    out.result(result, _summary_table(result), notes, *tables)


def summarize(trace: Trace, records: int, ranks: int, slots: int, out: Output) -> dict[str, Any]:
    """The verb's JSON: totals, a summary over layers, a row per layer."""
    load_LE = trace.window(0, trace.num_records)
    skewed = skew(load_LE)
    with out.progress("comparing windows") as tell:
        moving = drift(trace, records, tell)
    columns = _columns(trace, load_LE, skewed, moving, ranks, slots)
    layers = [
        {"layer": layer, **{name: values[index] for name, values in columns.items()}}
        for index, layer in enumerate(trace.layer_ids)
    ]
    return {
        "model": trace.meta.model,
        "source": trace.meta.source,
        "records": trace.num_records,
        "steps": int(trace.steps.sum()),
        "tokens": int(trace.tokens.sum()),
        "num_layers": trace.num_layers,
        "num_experts": trace.num_experts,
        "ranks": ranks,
        "window_records": records,
        "windows": len(moving.spearman) + 1,
        "domain_breaks": [{"window": at, "step": int(trace.step[at * records])} for at in moving.breaks],
        "summary": {name: _summary(name, values, trace) for name, values in columns.items()},
        "layers": layers,
    }


def _columns(
    trace: Trace, load_LE: Any, skewed: Skew, moving: Drift, ranks: int, slots: int
) -> dict[str, np.ndarray[Any, Any]]:
    """name -> [L], in the order of the table."""
    columns: dict[str, np.ndarray[Any, Any]] = {
        "gini": skewed.gini,
        "max_over_mean": skewed.top_over_mean,
        "top10_share": skewed.top10_share,
        "idle_experts": skewed.idle,
    }
    if len(moving.spearman):
        columns |= {"spearman_next": moving.spearman.mean(0), "load_moved_next": moving.moved.mean(0)}
    columns["step_noise"] = step_noise(trace)
    if ranks:
        home = linear_placement(trace.num_layers, trace.num_experts, ranks)
        columns["balance_unplanned"] = balancedness(rank_load(home.slot_to_expert, home.share, load_LE))
    if ranks and slots:
        most = min(slots, trace.num_experts)  # a second copy on the same rank changes nothing
        columns["balance_bound"] = balance_bound(load_LE, ranks * most, ranks)
    return columns


def _summary(name: str, values: np.ndarray[Any, Any], trace: Trace) -> dict[str, Any]:
    """mean, and the layer where it is worst: for some measures the lowest, for others the highest."""
    if np.isnan(values).all():
        return {"mean": None, "worst": None, "worst_layer": None}
    low_is_bad = name in ("spearman_next", "balance_unplanned", "balance_bound")
    worst = int(np.nanargmin(values) if low_is_bad else np.nanargmax(values))
    return {"mean": np.nanmean(values), "worst": values[worst], "worst_layer": trace.layer_ids[worst]}


LABELS = {
    "gini": "Gini coefficient (0 even, 1 one expert)",
    "max_over_mean": "hottest expert / mean",
    "top10_share": "load on the hottest 10 % of experts",
    "idle_experts": "experts without a token",
    "spearman_next": "rank correlation with the next window",
    "load_moved_next": "load on other experts one window later",
    "step_noise": "difference of neighbouring records / that of random draws",
    "balance_unplanned": "balance (mean/max of ranks), experts in order",
    "balance_bound": "best balance that the slots allow",
}


def _summary_table(result: dict[str, Any]) -> Table:
    title = (
        f"{result['records']} records, {result['steps']} steps, {result['num_layers']} layers, "
        f"{result['num_experts']} experts" + (f", {result['ranks']} ranks" if result["ranks"] else "")
    )
    table = grid("measure", "mean", "worst", "in layer", title=title)
    for name, row in result["summary"].items():
        cells = (
            ("-",) * 3 if row["mean"] is None else (_text(row["mean"]), _text(row["worst"]), str(row["worst_layer"]))
        )
        table.add_row(LABELS[name], *cells)
    return table


def _layer_table(rows: list[dict[str, Any]]) -> Table:
    table = grid(*rows[0])
    for row in rows:
        table.add_row(*[str(value) if name == "layer" else _text(value) for name, value in row.items()])
    return table


def _text(value: Any) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}" if isinstance(value, float) else str(value)
