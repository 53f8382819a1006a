"""`moesaic eplb check`: is a placement valid, balanced, covered and near enough? Made for CI: an exit code per gate."""

from __future__ import annotations

from typing import Any

import click
import numpy as np
from rich.table import Table

from eplb.balance import placement_balance
from eplb.bounds import balance_bound
from eplb.coverage import domains_of, fewest_uncovered, worst_node, worst_rank
from eplb.offline.difference import difference
from eplb.offline.placement_file import PlacementFile
from eplb.offline.trace import Trace
from moesaic.eplb.common import (
    BalanceGate,
    CoverageGate,
    MoveBudget,
    Output,
    grid,
    output_options,
    placement_of,
    trace_of,
)
from moesaic.eplb.diff import GIB
from moesaic.eplb.options import expert_bytes, node_options, with_nodes
from moesaic.options import Number


@click.command("check")
@click.argument("path", metavar="PLACEMENT")
@click.option("--trace", "trace_path", help="Loads to judge the balance by.")
@click.option("--against", "old_path", metavar="OLD", help="The placement in use: count what would move from it.")
@click.option("--min-balance", type=Number(0, 1), help="Mean over layers of mean/max; else exit code 3.")
@click.option("--min-worst-balance", type=Number(0, 1), help="The same of the worst layer.")
@click.option(
    "--max-uncovered",
    type=Number(0),
    help="Experts that the worst rank takes along, mean over layers; else 4.",
)
@click.option("--max-uncovered-node", type=Number(0), help="The same of the worst node.")
@click.option("--max-move-gib", type=Number(0), help="Weights that --against would move; else 5.")
@click.option("--max-moved", type=Number(0, 1), help="Part of the slots that --against would move; else 5.")
@click.option("--max-slots", type=click.IntRange(1), help="Slots that a rank has memory for; else 2.")
@node_options
@output_options
def command(
    path: str,
    trace_path: str | None,
    old_path: str | None,
    ranks: int | None,
    ranks_per_node: int | None,
    model: str,
    bytes_each: int | None,
    out: Output,
    **gates: float | None,
) -> None:
    """Check PLACEMENT: that it is valid, and every gate that is given. The first gate that fails sets the exit code."""
    _check_usage(trace_path, old_path, gates)
    file = with_nodes(placement_of(path, ranks or 0), ranks_per_node)
    limit = gates["max_slots"]
    if limit is not None and max(file.slots) > limit:
        raise ValueError(f"{path} has {max(file.slots)} slots per rank; --max-slots is {int(limit)}")
    result: dict[str, Any] = {
        "valid": True,
        "layers": file.placement.num_layers,
        "experts": file.placement.num_experts,
        "ranks": file.placement.num_ranks,
        "slots": max(file.slots),
    }
    if trace_path:
        result |= _balance(file, trace_of(trace_path, out))
    result |= _coverage(file)
    if old_path:
        old = with_nodes(placement_of(old_path, ranks or 0), ranks_per_node)
        result |= _moves(old, file, expert_bytes(model or file.model, bytes_each), gates["max_move_gib"] is not None)
    failures = _failures(result, gates)
    result |= {"passed": not failures, "failed": [str(failure) for failure in failures]}
    out.result(result, _table(result), *(result["failed"] or ["passed"]))
    if failures:
        raise failures[0]


def _check_usage(trace_path: str | None, old_path: str | None, gates: dict[str, float | None]) -> None:
    for needs, given, names in (
        ("--trace", trace_path, ("min_balance", "min_worst_balance")),
        ("--against", old_path, ("max_move_gib", "max_moved")),
    ):
        for name in names:
            if gates[name] is not None and not given:
                raise click.UsageError(f"--{name.replace('_', '-')} needs {needs}")


def _balance(file: PlacementFile, trace: Trace) -> dict[str, Any]:
    placement = file.placement
    missing = [layer for layer in file.layer_ids if layer not in trace.layer_ids]
    if missing or trace.num_experts != placement.num_experts:
        raise ValueError(
            f"the trace has {trace.num_experts} experts and layers {trace.layer_ids[0]} to {trace.layer_ids[-1]}; the "
            f"placement has {placement.num_experts} and {file.layer_ids[0]} to {file.layer_ids[-1]}"
        )
    rows = [trace.layer_ids.index(layer) for layer in file.layer_ids]
    load_LE = trace.window(0, trace.num_records)[rows]
    balance = placement_balance(placement, load_LE)
    live = sum(placement.alive)
    bound = balance_bound(load_LE, np.array(file.slots) * live, live)
    worst = int(balance.argmin())
    return {
        "balance": balance.mean(),
        "worst_balance": balance[worst],
        "worst_balance_layer": file.layer_ids[worst],
        "balance_bound": bound.mean(),
        "balance_per_layer": balance,
    }


def _coverage(file: PlacementFile) -> dict[str, Any]:
    placement = file.placement
    rank, by_rank = worst_rank(placement)
    node, by_node = worst_node(placement)
    at_rank, at_node = int(by_rank.argmax()), int(by_node.argmax())
    live = sum(placement.alive)
    fewest = [fewest_uncovered(placement.num_experts, slots * live, live) for slots in file.slots]
    return {
        "uncovered_by_worst_rank": by_rank.mean(),
        "uncovered_by_any_rank_at_least": float(np.mean(fewest)),
        "most_uncovered_by_a_rank": {
            "layer": file.layer_ids[at_rank],
            "rank": rank[at_rank],
            "experts": by_rank[at_rank],
        },
        "nodes": len(set(domains_of(placement))),
        "uncovered_by_worst_node": by_node.mean(),
        "most_uncovered_by_a_node": {
            "layer": file.layer_ids[at_node],
            "node": node[at_node],
            "experts": by_node[at_node],
        },
    }


def _moves(old: PlacementFile, new: PlacementFile, size: float | None, need_size: bool) -> dict[str, Any]:
    if size is None and need_size:
        raise click.UsageError("--max-move-gib needs the size of an expert: give --expert-bytes or --model")
    moved = difference(old.placement, new.placement)
    used = int((new.placement.slot_to_expert >= 0).sum())
    return {
        "moves": moved.num_moves,
        "moved_part": moved.num_moves / max(1, used),
        "move_gib": None if size is None else moved.num_moves * size / GIB,
    }


def _failures(result: dict[str, Any], gates: dict[str, float | None]) -> list[BalanceGate | CoverageGate | MoveBudget]:
    failures: list[BalanceGate | CoverageGate | MoveBudget] = []
    for option, key, kind in (
        ("min_balance", "balance", BalanceGate),
        ("min_worst_balance", "worst_balance", BalanceGate),
        ("max_uncovered", "uncovered_by_worst_rank", CoverageGate),
        ("max_uncovered_node", "uncovered_by_worst_node", CoverageGate),
        ("max_move_gib", "move_gib", MoveBudget),
        ("max_moved", "moved_part", MoveBudget),
    ):
        limit = gates[option]
        if limit is None:
            continue
        found = float(result[key])
        if found < limit if option.startswith("min") else found > limit:
            failures.append(kind(f"{key} is {found:.4f}; --{option.replace('_', '-')} is {limit:g}"))
    return failures


LABELS = {
    "balance": "balance (mean/max of ranks), mean of layers",
    "worst_balance": "balance of the worst layer",
    "balance_bound": "best balance that the slots allow",
    "uncovered_by_worst_rank": "experts that the worst rank takes along, mean of layers",
    "uncovered_by_any_rank_at_least": "no placement in these slots has fewer than",
    "uncovered_by_worst_node": "experts that the worst node takes along, mean of layers",
    "moves": "experts that would move",
    "moved_part": "part of the slots that would move",
    "move_gib": "GiB that would move",
}


def _table(result: dict[str, Any]) -> Table:
    title = "{layers} layers, {experts} experts, {ranks} ranks with {slots} slots: valid".format(**result)
    table = grid("measure", "value", title=title)
    for key, label in LABELS.items():
        if result.get(key) is not None:
            value = result[key]
            table.add_row(label, str(value) if isinstance(value, int) else f"{float(value):.4f}")
    return table
