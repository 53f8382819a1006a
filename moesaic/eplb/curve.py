"""`moesaic eplb curve`: redundancy against memory and balance, with the bound that no algorithm passes."""

from __future__ import annotations

import html
from typing import Any

import click
from rich.table import Table

from eplb.offline.curve import Pair, memory, point, window_pairs
from eplb.offline.files import write_bytes
from eplb.offline.shapes import ModelShape
from eplb.offline.stats import window_records
from moesaic.eplb.common import Output, output_options, trace_of
from moesaic.eplb.described import Costing, Described, described_options
from moesaic.eplb.layout import Layout, LayoutOptions, layout_options
from moesaic.eplb.line_chart import Chart, Line, svg, text


@click.command("curve")
@click.argument("trace_path", metavar="TRACE")
@click.option("--max-slots", type=click.IntRange(1), help="The last S of the curve. Default: 8 beyond what is needed.")
@click.option("--window", type=click.IntRange(1), help="Records per window. Default: as many as make 100 steps.")
@click.option("--pairs", type=click.IntRange(1), default=3, show_default=True, help="Pairs of windows to average over.")
@layout_options
@described_options
@output_options
def command(
    trace_path: str,
    max_slots: int | None,
    window: int | None,
    pairs: int,
    asked: LayoutOptions,
    described: Described,
    out: Output,
) -> None:
    """One plan for every number of slots: its balance in-window, on the next window and of single steps, the bound,
    what the replicas take from the memory of a GPU and from its KV cache.

    --output x.svg or x.html draws it; anything else gets the text, or with --json the object. With --slots or
    --redundant the curve begins there.
    """
    trace = trace_of(trace_path, out)
    layout = asked.layout(trace.num_experts, trace.meta.ranks, described)
    shape = described.shape_of(trace.num_experts, trace.num_layers, trace.meta.model)
    costing = described.costing(layout.num_ranks, shape)
    needed = asked.needed_slots(trace.num_experts, layout.num_ranks)
    begin = layout.slots if asked.slots or asked.redundant else needed
    end = max_slots or begin + 8
    if end < begin:
        raise ValueError(f"--max-slots is {end}; the curve begins at {begin}")
    records = min(window or window_records(trace), max(1, trace.num_records // 2))
    sampled = window_pairs(trace, records, pairs)
    end = max(begin, min(end, trace.num_experts))
    rows = []
    with out.progress("planning") as tell:
        for slots in range(begin, end + 1):
            rows.append(_row(sampled, slots, needed, layout, shape, costing))
            tell(slots - begin + 1, end - begin + 1)
    notes = [f"means over {len(sampled)} pair(s) of windows of {records} record(s); {trace.num_records} in the trace"]
    notes += ["memory needs the model's sizes: give --model"] if shape is None else []
    notes += [] if costing is None else costing.words()
    best, why = _best(rows)
    result = {
        "rows": rows,
        "best_slots": best,
        "why": why,
        "notes": notes,
        "window_records": records,
        "pairs": len(sampled),
        **layout.words,
    }
    chart = _chart(rows, trace.meta.model, layout)
    table = _table(rows)
    if out.output is not None and out.output.suffix in (".svg", ".html"):
        drawn = svg(chart) if out.output.suffix == ".svg" else _page(chart, rows, notes)
        write_bytes(out.output, drawn.encode())
        out.written(result, text(chart), table, f"S = {best}: {why}", *notes)
    else:
        out.result(result, text(chart), table, f"S = {best}: {why}", *notes)


def _row(
    sampled: list[Pair], slots: int, needed: int, layout: Layout, shape: ModelShape | None, costing: Costing | None
) -> dict[str, Any]:
    found = point(
        sampled,
        layout.num_ranks,
        slots,
        domains=layout.domains,
        method=layout.method,
        coverage=layout.coverage,
        min_copies=layout.min_copies,
        predict=None if costing is None else lambda part: costing.step(part).as_dict(),
    )
    row = {"slots": slots, "redundant": slots * layout.num_ranks - sampled[0].fit_LE.shape[1], **found}
    if shape is not None:
        row |= memory(shape, slots, needed, None if costing is None else costing.cluster)
    if costing is not None:
        work = costing.work
        row["fits"] = row["kv_tokens"] >= work.tokens_per_gpu * (work.context if work.phase == "decode" else 1)
    return row


def _best(rows: list[dict[str, Any]]) -> tuple[int, str]:
    """(S, why): the most tokens/s among those whose cache fits; without a cluster the least S within .005 of the best
    balance of single steps."""
    if "tokens_per_s_per_gpu" in rows[0]:
        fitting = [row for row in rows if row["fits"]] or rows
        best = max(fitting, key=lambda row: float(row["tokens_per_s_per_gpu"]))
        return best["slots"], "most tokens per second" + (
            "" if best["fits"] else "; the cache of this step fits with no S"
        )
    top = max(row["step"] for row in rows)
    return next(
        row["slots"] for row in rows if row["step"] >= top - 0.005
    ), "the least within .005 of the best single steps"


def _chart(rows: list[dict[str, Any]], model: str, layout: Layout) -> Chart:
    lines = [
        Line("in-window", [row["in_window"] for row in rows]),
        Line("next window", [row["next_window"] for row in rows]),
        Line("single steps", [row["step"] for row in rows]),
        Line("bound of any placement", [row["bound"] for row in rows], dashed=True),
    ]
    second = [f"{row['expert_gb']:.0f} GB" for row in rows] if "expert_gb" in rows[0] else []
    title = f"Balance of {model or 'the trace'} on {layout.num_ranks} ranks"
    name = "slots of a rank" + (" (experts' weights on a GPU)" if second else "")
    return Chart(title, name, "mean / max of ranks", [row["slots"] for row in rows], lines, second)


_COLUMNS = {
    "slots": "S", "redundant": "redundant", "in_window": "in-window", "next_window": "next window", "step": "step",
    "bound": "bound", "uncovered_by_worst_rank": "uncovered", "expert_gb": "experts GB", "replica_gb": "replicas GB",
    "kv_tokens_lost": "KV tokens lost", "kv_tokens": "KV tokens left", "fits": "fits", "total_ms": "step ms",
    "tokens_per_s_per_gpu": "tok/s/GPU",
}  # fmt: skip


def _cells(row: dict[str, Any], keys: list[str]) -> list[str]:
    cells = []
    for key in keys:
        value = row.get(key)
        if value is None or isinstance(value, bool):
            cells.append({True: "yes", False: "no", None: "-"}[value])
        elif isinstance(value, int):
            cells.append(f"{value:,}")
        else:
            cells.append(f"{value:,.0f}" if value >= 100 else f"{value:.4f}" if value <= 1 else f"{value:.2f}")
    return cells


def _shown(rows: list[dict[str, Any]]) -> list[str]:
    return [key for key in _COLUMNS if any(row.get(key) is not None for row in rows)]


def _table(rows: list[dict[str, Any]]) -> Table:
    keys = _shown(rows)
    table = Table(box=None)
    for key in keys:
        table.add_column(_COLUMNS[key], justify="right")
    for row in rows:
        table.add_row(*_cells(row, keys))
    return table


def _page(chart: Chart, rows: list[dict[str, Any]], notes: list[str]) -> str:
    keys = _shown(rows)
    head = "".join(f"<th>{html.escape(_COLUMNS[key])}</th>" for key in keys)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(row, keys))}</tr>" for row in rows)
    said = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    style = "body{font-family:sans-serif;margin:2em}td,th{padding:2px 10px;text-align:right}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(chart.title)}</title><style>{style}'
        f"</style>{svg(chart)}<table><tr>{head}</tr>{body}</table><ul>{said}</ul></html>\n"
    )
