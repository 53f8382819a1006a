"""`moesaic eplb whatif`: what the loss of ranks would uncover, cost and leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from msgspec import structs
from rich.table import Table

from eplb.balance import Floats
from eplb.offline.formats.registry import read_any
from eplb.offline.formats.source import Hints
from eplb.offline.placement_file import PlacementFile, describe
from eplb.offline.replay import slot_part
from eplb.offline.trace import Trace
from eplb.offline.whatif import guarantees, loss, parse_kill, scan
from eplb.placement import Placement
from moesaic.eplb.common import BalanceGate, CoverageGate, Infeasible, Output, Refused, output_options, trace_of
from moesaic.eplb.described import Costing, Described, described_options
from moesaic.eplb.layout import LayoutOptions, layout_options
from moesaic.eplb.options import with_nodes
from moesaic.options import Number

_DEFAULT_BYTES = 44 << 20


@click.command("whatif")
@click.argument("path", metavar="TRACE|PLACEMENT")
@click.option(
    "--kill",
    "kills",
    multiple=True,
    metavar="WHAT",
    help="rank:3, rank:3,7 (at once), node:1, any-rank, any-node or k=2. Default: any-rank and any-node.",
)
@click.option("--trace", "trace_path", help="Loads, when PATH is a placement. Without: every expert alike.")
@click.option(
    "--read-gbps",
    type=Number(0, min_open=True),
    default=25.0,
    show_default=True,
    help="GB/s at which a survivor reads lost experts (host memory 25 to 50, a disk 2 to 7).",
)
@click.option("--max-uncovered", type=Number(0), help="In the worst case, mean of layers; else exit code 4.")
@click.option("--max-load", type=Number(0, 1), help="Part of the tokens that lost experts take; else 4.")
@click.option("--min-balance", type=Number(0, 1), help="After the repair with new shares; else exit code 3.")
@layout_options
@described_options
@output_options
def command(
    path: str,
    kills: tuple[str, ...],
    trace_path: str | None,
    read_gbps: float,
    max_uncovered: float | None,
    max_load: float | None,
    min_balance: float | None,
    asked: LayoutOptions,
    described: Described,
    out: Output,
) -> None:
    """Lose ranks or nodes of a placement (or of the plan that `plan` makes from a trace): experts without a copy, the
    load they carry, what is read again, the balance after the repair, and which guarantees hold.

    Exit codes: 3 --min-balance, 4 --max-uncovered and --max-load, 6 when the survivors of a --kill have too few slots
    (prints the smallest S that would do).
    """
    file, load_LE, known = _placement(path, trace_path, asked, described, out)
    placement = file.placement
    shape = described.shape_of(placement.num_experts, placement.num_layers, file.model)
    costing = described.costing(placement.num_ranks, shape)
    size = _DEFAULT_BYTES if shape is None else shape.expert_bytes
    cases = []
    for kill in kills or ("any-rank", "any-node"):
        sets = parse_kill(kill, placement)
        with out.progress(f"losing {kill}"):
            scanned = scan(placement, sets)
            predict = _predictor(costing, placement, len(scanned["worst_ranks"]))
            worst = loss(placement, scanned["worst_ranks"], load_LE, file.slots, size, read_gbps, predict=predict)
        case = {"kill": kill, **scanned, "worst": worst, "guarantees": guarantees(placement, file.slots, worst)}
        if costing is not None:
            worst["step_ms_before"] = costing.step(slot_part(placement, load_LE)).total_ms
        cases.append(case)
    failures = _failures(cases if kills else [], cases, max_uncovered, max_load, min_balance)
    notes = _notes(known, shape is not None, cases, read_gbps) + ([] if costing is None else costing.words())
    result = {"cases": cases, "passed": not failures, "failed": [str(failure) for failure in failures], "notes": notes}
    out.result(result, *[part for case in cases for part in _shown(case)], *notes)
    if failures:
        raise failures[0]


def _placement(
    path: str, trace_path: str | None, asked: LayoutOptions, described: Described, out: Output
) -> tuple[PlacementFile, Floats, bool]:
    """(placement, loads, are they known)."""
    found = read_any(Path(path), Hints(ranks=asked.ranks or 0))
    if found.placement is not None:
        nodes = None if found.placement.placement.failure_domains else described.ranks_per_node
        file = with_nodes(found.placement, nodes)
        shape = (file.placement.num_layers, file.placement.num_experts)
        if trace_path is None:
            return file, np.ones(shape), False
        trace = trace_of(trace_path, out)
        if (trace.num_layers, trace.num_experts) != shape:
            raise ValueError(
                f"{trace_path} has {trace.num_layers} layers of {trace.num_experts} experts; {path} "
                f"has {shape[0]} of {shape[1]}"
            )
        return file, trace.window(0, trace.num_records), True
    assert found.trace is not None
    if trace_path is not None:
        raise click.UsageError("--trace goes with a placement; PATH is a trace already")
    return _planned(found.trace, asked, described), found.trace.window(0, found.trace.num_records), True


def _planned(trace: Trace, asked: LayoutOptions, described: Described) -> PlacementFile:
    layout = asked.layout(trace.num_experts, trace.meta.ranks, described)
    made = layout.plan(trace.window(0, trace.num_records), layout.slots)
    return describe(made.placement, trace.meta.model, trace.layer_ids)


def _predictor(costing: Costing | None, placement: Placement, lost: int) -> Callable[[Floats], dict[str, float]] | None:
    """A step of the survivors: each keeps its own requests, those of the lost ranks wait elsewhere."""
    live = sum(placement.alive) - lost
    if costing is None or live < 1:
        return None
    smaller = structs.replace(costing, cluster=structs.replace(costing.cluster, num_gpus=live))
    return lambda part: smaller.step(part).as_dict()


def _failures(
    asked: list[dict[str, Any]],
    cases: list[dict[str, Any]],
    max_uncovered: float | None,
    max_load: float | None,
    min_balance: float | None,
) -> list[Refused]:
    failures: list[Refused] = []
    for case in cases:
        worst = case["worst"]
        name = f"--kill {case['kill']}"
        if not worst["feasible"] and case in asked:
            failures.append(
                Infeasible(
                    f"{name}: {worst['survivors']} survivors have too few slots; the smallest feasible S is "
                    f"{worst['smallest_slots']}"
                )
            )
        if max_uncovered is not None and worst["uncovered"] > max_uncovered:
            failures.append(
                CoverageGate(f"{name}: {worst['uncovered']:.2f} experts; --max-uncovered is {max_uncovered:g}")
            )
        if max_load is not None and worst["load_part"] > max_load:
            failures.append(CoverageGate(f"{name}: {worst['load_part']:.2%} of the tokens; --max-load is {max_load:g}"))
        if min_balance is not None and worst["feasible"] and worst["balance_repaired"] < min_balance:
            failures.append(BalanceGate(f"{name}: {worst['balance_repaired']:.4f}; --min-balance is {min_balance:g}"))
    return sorted(failures, key=lambda failure: failure.exit_code)


def _notes(known: bool, sized: bool, cases: list[dict[str, Any]], read_gbps: float) -> list[str]:
    notes = [
        f"seconds: the busiest survivor reads its share at {read_gbps:g} GB/s; finding out that a "
        "rank is dead comes first"
    ]
    if not known:
        notes.append("no loads were given (--trace): every expert counts alike")
    if not sized:
        notes.append("the model is not known (--model): experts are taken to be of 44 MiB")
    for case in cases:
        if not case["complete"]:
            notes.append(f"--kill {case['kill']}: a sample of {case['scenarios']} sets of ranks")
    return notes


_LABELS = {
    "uncovered": ("experts without a copy, mean of layers", "{:.2f}"),
    "uncovered_worst_layer": ("in the worst layer", "{}"),
    "load_part": ("part of the tokens that they take, mean of layers", "{:.2%}"),
    "load_part_worst_layer": ("in the worst layer", "{:.2%}"),
    "reload_gb": ("GB read again, all layers", "{:.2f}"),
    "reload_gb_busiest": ("by the busiest survivor", "{:.3f}"),
    "reload_s": ("seconds to read", "{:.4f}"),
    "balance_before": ("balance before", "{:.4f}"),
    "balance_even": ("after the repair, shares even", "{:.4f}"),
    "balance_repaired": ("after the repair, new shares", "{:.4f}"),
    "balance_moved": ("and after three moves a layer at most", "{:.4f}"),
    "step_ms_before": ("predicted step before, ms", "{:.2f}"),
    "step_ms_after": ("predicted step of the survivors, ms", "{:.2f}"),
}


def _shown(case: dict[str, Any]) -> tuple[str, Table, Table]:
    worst = case["worst"]
    ranks = ", ".join(str(rank) for rank in worst["ranks"][:4]) + (" ..." if len(worst["ranks"]) > 4 else "")
    title = (
        f"--kill {case['kill']}: the worst of {case['scenarios']} is rank {ranks} "
        f"({case['without_reload']} need no reload)"
    )
    table = Table("measure", "value", box=None)
    for key, (label, form) in _LABELS.items():
        if key in worst:
            table.add_row(label, form.format(worst[key]))
    if not worst["feasible"]:
        table.add_row("survivors have too few slots; smallest feasible S", str(worst["smallest_slots"]))
    verdicts = Table("guarantee", "holds", "", box=None)
    for row in case["guarantees"]:
        verdicts.add_row(row["id"], {True: "yes", False: "no", None: "-"}[row["holds"]], row["says"])
    return title, table, verdicts
