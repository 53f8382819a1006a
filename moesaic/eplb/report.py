"""`moesaic eplb report`: a trace, placements and results of other verbs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from eplb.balance import balancedness, rank_load
from eplb.bounds import balance_bound
from eplb.coverage import worst_rank
from eplb.offline.files import decode_json, read_bytes, write_bytes
from eplb.offline.placement_file import PlacementFile, describe
from eplb.offline.stats import Drift, drift, window_records, windows
from eplb.offline.trace import Trace
from eplb.placement import Placement, linear_placement
from moesaic.eplb.common import Output, needed_output, output_options, placement_of, plain, trace_of
from moesaic.eplb.heatmap import heatmap, key
from moesaic.eplb.line_chart import Chart, Line, svg
from moesaic.eplb.report_page import cards, note, number, page, part, section, table
from moesaic.eplb.stats import LABELS, summarize

_LOAD_EDGES = (0.125, 0.25, 0.5, 1, 2, 4, 8)
_RANK_EDGES = (0.75, 0.9, 0.97, 1.03, 1.1, 1.25, 1.5)
_MOVED_EDGES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
_NAME = 22  # characters of a name that a legend has room for
_COLUMNS = 256  # of a heatmap over time; a longer trace is averaged


@click.command("report")
@click.argument("trace_path", metavar="TRACE")
@click.option(
    "--placement", "placements", multiple=True, metavar="[NAME=]FILE", help="Judge this placement; repeatable."
)
@click.option("--replay", "replays", multiple=True, metavar="FILE", help="What `replay --json` printed; repeatable.")
@click.option("--curve", "curves", multiple=True, metavar="FILE", help="What `curve --json` printed; repeatable.")
@click.option("--window", type=click.IntRange(1), help="Records per window; default: as many as make 100 steps.")
@click.option("--ranks", type=click.IntRange(1), help="Ranks, where neither the trace nor a placement says it.")
@click.option("--title", default="", help="Default: the model's name.")
@output_options
def command(
    trace_path: str,
    placements: tuple[str, ...],
    replays: tuple[str, ...],
    curves: tuple[str, ...],
    window: int | None,
    ranks: int | None,
    title: str,
    out: Output,
) -> None:
    """Write --output, a self-contained HTML page about TRACE: where the load is, how it drifts, how placements bear
    it."""
    target = needed_output(out)
    results = [("replay", path, _result(path)) for path in replays] + [
        ("curve", path, _result(path)) for path in curves
    ]
    trace = trace_of(trace_path, out)
    records = window or window_records(trace)
    files = [_named(text, ranks or 0, trace) for text in placements]
    num_ranks = ranks or trace.meta.ranks or (files[0][1].placement.num_ranks if files else 0)
    if num_ranks:
        home = linear_placement(trace.num_layers, trace.num_experts, num_ranks)
        # Experts in order, which is what an engine without a balancer has.
        files.insert(0, ("no balancer", describe(home, layer_ids=trace.layer_ids)))
    facts = plain(summarize(trace, records, num_ranks, 0, out))
    with out.progress("comparing windows") as tell:
        moving = drift(trace, records, tell)
    sections = [_overview(facts), _load(trace), _drift(trace, moving, records)]
    sections += [_placements(trace, files, records)] if files else []
    sections += [_from_result(kind, path, value) for kind, path, value in results]
    sections.append(section("Every layer", _layers(facts, trace, files)))
    name = title or f"Expert load of {trace.meta.model or Path(trace_path).name}"
    text = page(name, _subtitle(trace), sections)
    write_bytes(target, text.encode())
    out.written(
        {"output": str(target), "bytes": len(text.encode()), "sections": len(sections), "placements": len(files)},
        f"{target}: {len(text.encode()) / 1e3:.0f} kB",
    )


def _result(path: str) -> dict[str, Any]:
    value: Any = decode_json(read_bytes(Path(path)), Any, path)
    rows = value.get("rows") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} has no rows; it must be what `moesaic eplb replay --json` or `curve --json` printed")
    assert isinstance(value, dict)
    return value


def _named(text: str, ranks: int, trace: Trace) -> tuple[str, PlacementFile]:
    name, equals, path = text.partition("=")
    if not equals or Path(text).exists():
        name, path = Path(text).name, text
    file = placement_of(path, ranks or trace.meta.ranks)
    if file.placement.num_experts != trace.num_experts or file.layer_ids != trace.layer_ids:
        raise ValueError(
            f"{path} has {file.placement.num_experts} experts in {len(file.layer_ids)} layers from "
            f"{file.layer_ids[0]}; the trace has {trace.num_experts} in {trace.num_layers} from {trace.layer_ids[0]}"
        )
    return name, file


def _subtitle(trace: Trace) -> str:
    facts = [
        f"{trace.num_records} records of {int(trace.steps.sum())} steps",
        f"{trace.num_layers} layers of {trace.num_experts} experts",
    ]
    facts += [f"{trace.meta.ranks} ranks"] if trace.meta.ranks else []
    facts += [f"source: {trace.meta.source}"] if trace.meta.source else []
    return ", ".join(facts)


def _overview(facts: dict[str, Any]) -> str:
    items = [(number(row["mean"]), LABELS[name]) for name, row in facts["summary"].items() if row["mean"] is not None]
    breaks = ", ".join(str(item["step"]) for item in facts["domain_breaks"])
    return cards(items) + note(f"Means over layers. The workload changes domain at step {breaks or '(never)'}.")


def _load(trace: Trace) -> str:
    load_LE = trace.window(0, trace.num_records)
    mean = load_LE.mean(1, keepdims=True)
    times = np.divide(load_LE, mean, out=np.zeros_like(load_LE), where=mean > 0)
    by_id = heatmap(times, _LOAD_EDGES, "s", trace.layer_ids, "expert", "load of every expert in every layer")
    falling = heatmap(
        -np.sort(-times, axis=1), _LOAD_EDGES, "s", trace.layer_ids, "experts by load", "loads of every layer, sorted"
    )
    legend = key(_LOAD_EDGES, "s", "times the layer's mean")
    return section("Where the load is", legend, by_id, part("The same, hottest first", falling))


def _drift(trace: Trace, moving: Drift, records: int) -> str:
    if not len(moving.spearman):
        return section("How it drifts", note("One window only: nothing to compare."))
    begins = [int(trace.step[(index + 1) * records]) for index in range(len(moving.spearman))]
    lines = [
        Line("rank correlation", moving.spearman.mean(1).tolist()),
        Line("load moved", moving.moved.mean(1).tolist()),
    ]
    chart = svg(Chart("From window to window, mean of layers", "step", "", begins, lines))
    picture = heatmap(
        _at_most(moving.moved.T, _COLUMNS),
        _MOVED_EDGES,
        "s",
        trace.layer_ids,
        "window",
        "drift of every layer over time",
    )
    title = part(
        "Part of the load that moved to other experts, by layer", key(_MOVED_EDGES, "s", "of the load"), picture
    )
    return section("How it drifts", chart, title)


def _at_most(values: npt.NDArray[np.floating[Any]], columns: int) -> npt.NDArray[np.floating[Any]]:
    if values.shape[1] <= columns:
        return values
    return np.stack([group.mean(1) for group in np.array_split(values, columns, axis=1)], axis=1)


def _balance(placement: Placement, load_LE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return balancedness(rank_load(placement.slot_to_expert, placement.share, load_LE), placement.alive)


def _placements(trace: Trace, files: list[tuple[str, PlacementFile]], records: int) -> str:
    lines: dict[str, list[float | None]] = {name: [] for name, _ in files}
    begins = []
    for index, load_LE in enumerate(windows(trace, records)):
        begins.append(int(trace.step[min(index * records, trace.num_records - 1)]))
        for name, file in files:
            lines[name].append(float(_balance(file.placement, load_LE).mean()))
    chart = svg(
        Chart(
            "Balance of each window, mean of layers",
            "step",
            "mean / max of ranks",
            begins,
            [Line(name[:_NAME], values) for name, values in lines.items()],
        )
    )
    load_LE = trace.window(0, trace.num_records)
    pictures = [key(_RANK_EDGES, "d", "times the mean of the ranks")]
    for name, file in files:
        load_LG = rank_load(file.placement.slot_to_expert, file.placement.share, load_LE)
        mean = load_LG.mean(1, keepdims=True)
        times = np.divide(load_LG, mean, out=np.ones_like(load_LG), where=mean > 0)
        balance = balancedness(load_LG, file.placement.alive).mean()
        pictures.append(
            part(
                f"{name}: balance {balance:.3f}",
                heatmap(times, _RANK_EDGES, "d", trace.layer_ids, "rank", f"load of every rank under {name}"),
            )
        )
    return section("How placements bear it", chart, *pictures)


def _layers(facts: dict[str, Any], trace: Trace, files: list[tuple[str, PlacementFile]]) -> str:
    rows = [dict(row) for row in facts["layers"]]
    load_LE = trace.window(0, trace.num_records)
    for name, file in files[1:] if len(files) > 1 else []:
        placement = file.placement
        live = sum(placement.alive)
        columns = {
            f"{name}: balance": _balance(placement, load_LE),
            f"{name}: bound": balance_bound(load_LE, np.array(file.slots) * live, live),
            f"{name}: uncovered by the worst rank": worst_rank(placement)[1],
        }
        for column, values in columns.items():
            for row, value in zip(rows, plain(values), strict=True):
                row[column] = value
    return table(rows)


def _from_result(kind: str, path: str, value: dict[str, Any]) -> str:
    rows = value["rows"]
    best = value.get("best")
    if kind == "curve":
        best = next((i for i, row in enumerate(rows) if row.get("slots") == value.get("best_slots")), -1)
    parts = [_curve(rows)] if kind == "curve" else []
    parts.append(table(rows, best if isinstance(best, int) else -1))
    parts += [note(str(text)) for text in (value.get("why"), *value.get("notes", [])) if text]
    title = "Redundancy against balance" if kind == "curve" else "Policies over the trace"
    return section(f"{title} ({Path(path).name})", *parts)


def _curve(rows: list[dict[str, Any]]) -> str:
    names = {"in_window": "in-window", "next_window": "next window", "step": "single steps", "bound": "bound"}
    lines = [Line(name, [row.get(field) for row in rows], field == "bound") for field, name in names.items()]
    slots = [float(row.get("slots", index)) for index, row in enumerate(rows)]
    return svg(Chart("Balance by slots of a rank", "slots of a rank", "mean / max of ranks", slots, lines))
