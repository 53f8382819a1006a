"""`moesaic eplb plan`: a placement from a trace, with what it would do and the gates that a pipeline wants."""

from __future__ import annotations

import time
from typing import Any

import click
import numpy as np
from msgspec import Struct, structs
from rich.table import Table

from eplb.balance import Floats, balancedness, placement_balance, rank_load
from eplb.bounds import balance_bound
from eplb.coverage import domains_of, fewest_uncovered, host_matrix, worst_node, worst_rank
from eplb.mover import improve
from eplb.offline.budget import layer_slots
from eplb.offline.placement_file import PlacementFile, describe, write_placement
from eplb.offline.replay import slot_part, step_counts
from eplb.offline.trace import Trace
from eplb.placement import Placement
from eplb.repair import even_shares
from eplb.shares import reweight
from moesaic.eplb.common import (
    BalanceGate,
    CoverageGate,
    Infeasible,
    MoveBudget,
    Output,
    output_options,
    placement_of,
    trace_of,
)
from moesaic.eplb.described import Costing, Described, described_options
from moesaic.eplb.layout import Layout, LayoutOptions, layout_options
from moesaic.options import Number

GIB = 1 << 30
_STEPS_SCORED = 20  # single steps of the fitted records that are scored; they lie evenly


class _Moves(Struct, frozen=True):
    """The placement in use and what may move from it. full: take the full plan or nothing."""

    current: PlacementFile | None
    max_gib: float | None
    full: bool
    expert_bytes: float | None

    def budget(self) -> int | None:
        """Experts that may move, or None."""
        if self.max_gib is None:
            return None
        if self.expert_bytes is None:
            raise click.UsageError("--max-move-gib needs the size of an expert: give --model NAME or its config.json")
        return int(self.max_gib * GIB / self.expert_bytes)


@click.command("plan")
@click.argument("trace_path", metavar="TRACE")
@click.option("--window", type=click.IntRange(1), help="Plan from the last N records. Default: all.")
@click.option("--slots-per-layer", help="`auto` (with --total-slots), or a number for each layer: 9,9,10,...")
@click.option("--total-slots", type=click.IntRange(1), help="Slots of a rank, all layers together, for `auto`.")
@click.option("--current", "current_path", metavar="FILE", help="The placement in use: move as little as can be.")
@click.option("--max-move-gib", type=Number(0), help="Weights that may move from --current in all.")
@click.option("--full", is_flag=True, help="With --max-move-gib: the full plan or none, not the best moves within it.")
@click.option("--min-balance", type=Number(0, 1), help="In-window balance, mean of layers; else exit code 3.")
@click.option("--max-uncovered", type=Number(0), help="By the worst rank, mean of layers; else exit code 4.")
@layout_options
@described_options
@output_options
def command(
    trace_path: str,
    window: int | None,
    slots_per_layer: str | None,
    total_slots: int | None,
    current_path: str | None,
    max_move_gib: float | None,
    full: bool,
    min_balance: float | None,
    max_uncovered: float | None,
    asked: LayoutOptions,
    described: Described,
    out: Output,
) -> None:
    """Make a placement from the loads in TRACE, say what it does, and write it to --output.

    Printed: balance on the loads it was made from (in-window), of a plan made the same way from the window before on
    this one (next window), of single steps, and the best that any placement in these slots could have (bound).

    Exit codes: 3 --min-balance, 4 --max-uncovered, 5 --max-move-gib, 6 the experts do not fit (prints the smallest S).
    Nothing is written when a gate fails.
    """
    if max_move_gib is not None and current_path is None:
        raise click.UsageError("--max-move-gib needs --current FILE")
    trace = trace_of(trace_path, out)
    current = None if current_path is None else _current(current_path, trace, asked)
    known_ranks = trace.meta.ranks if current is None else current.placement.num_ranks
    known_slots = 0 if current is None else current.placement.slots_per_rank
    layout = asked.layout(trace.num_experts, known_ranks, described, known_slots)
    shape = described.shape_of(trace.num_experts, trace.num_layers, trace.meta.model)
    costing = described.costing(layout.num_ranks, shape)
    records = min(window or trace.num_records, trace.num_records)
    load_LE = trace.window(trace.num_records - records, trace.num_records)
    slots_L = _slots(slots_per_layer, total_slots, load_LE, layout)
    moves = _Moves(current, max_move_gib, full, None if shape is None else shape.expert_bytes)
    began = time.process_time()
    with out.progress("planning"):
        placement, method = _made(load_LE, layout, slots_L, moves)
    result: dict[str, Any] = {**layout.words, "slots_per_layer": list(slots_L), "method": method, "records": records}
    result |= _balances(trace, records, placement, layout, slots_L, load_LE)
    result |= coverage_facts(placement, slots_L)
    result |= _moved(current, placement, moves)
    result["plan_ms"] = (time.process_time() - began) * 1e3
    result |= _predicted(trace, placement, costing)
    failures = _failures(result, min_balance, max_uncovered, max_move_gib)
    result |= {"passed": not failures, "failed": [str(failure) for failure in failures]}
    if out.output is not None and not failures:
        write_placement(out.output, _file(placement, trace, slots_L, result))
        result["output"] = str(out.output)
    notes = [] if costing is None else costing.words()
    out.written({**result, "assumptions": notes}, *_shown(result), *notes)
    if failures:
        raise failures[0]


def _current(path: str, trace: Trace, asked: LayoutOptions) -> PlacementFile:
    file = placement_of(path, asked.ranks or trace.meta.ranks)
    placement = file.placement
    if (placement.num_layers, placement.num_experts) != (trace.num_layers, trace.num_experts):
        raise ValueError(
            f"{path} has {placement.num_layers} layers of {placement.num_experts} experts; the trace has "
            f"{trace.num_layers} of {trace.num_experts}"
        )
    return file


def _slots(text: str | None, total: int | None, load_LE: Floats, layout: Layout) -> tuple[int, ...]:
    num_layers, num_experts = int(load_LE.shape[0]), int(load_LE.shape[1])
    if (text == "auto") != (total is not None):
        raise click.UsageError("--slots-per-layer auto and --total-slots N belong together")
    if text is None:
        return (layout.slots,) * num_layers
    needed = -(-num_experts * layout.min_copies // layout.num_ranks)
    if text == "auto":
        assert total is not None
        if total < needed * num_layers:
            raise Infeasible(
                f"{total} slots in all cannot hold {num_layers} layers of {num_experts} experts on {layout.num_ranks} "
                f"ranks; the smallest feasible total is {needed * num_layers} (S = {needed} in every layer)"
            )
        budget: tuple[int, ...] = layer_slots(load_LE, layout.num_ranks, total, layout.min_copies)
        return budget
    try:
        slots = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.UsageError(f"--slots-per-layer is {text!r}; it must be auto or numbers, comma-separated") from None
    if len(slots) != num_layers:
        raise ValueError(f"--slots-per-layer has {len(slots)} numbers for {num_layers} layers")
    if min(slots) < needed:
        raise Infeasible(f"--slots-per-layer has a layer of {min(slots)}; the smallest feasible S is {needed}")
    return slots


def _made(load_LE: Floats, layout: Layout, slots_L: tuple[int, ...], moves: _Moves) -> tuple[Placement, str]:
    """(placement, how it was made): a full plan, or the best moves from the current placement within the budget."""
    current = moves.current
    same = current is not None and current.placement.slot_to_expert.shape[1:] == (layout.num_ranks, max(slots_L))
    old = current.placement if current is not None and same else None
    epoch = 0 if current is None else current.placement.epoch + 1
    full = layout.plan(load_LE, slots_L, epoch=epoch, current=old)
    budget = moves.budget()
    if old is None or budget is None or moves.full or _num_moved(old, full.placement) <= budget:
        return full.placement, full.method
    better = improve(
        old,
        load_LE,
        max_moves=budget,
        max_moves_per_layer=max(slots_L) * layout.num_ranks,
        min_copies=layout.min_copies,
    )
    kept = old if better is None else better
    share = (
        even_shares(kept.slot_to_expert, kept.num_experts)
        if layout.method == "flat"
        else reweight(kept.slot_to_expert, load_LE, kept.alive)
    )
    placed = structs.replace(kept, epoch=full.placement.epoch, share=share)
    return (
        placed,
        "moves within the budget" if better is not None else "no move within the budget pays: new shares only",
    )


def _num_moved(old: Placement, new: Placement) -> int:
    """Experts that a rank hosts in `new` and did not in `old`."""
    return int((host_matrix(new) & ~host_matrix(old)).sum())


def _balances(
    trace: Trace, records: int, placement: Placement, layout: Layout, slots_L: tuple[int, ...], load_LE: Floats
) -> dict[str, Any]:
    balance_L = placement_balance(placement, load_LE)
    bound_L = balance_bound(load_LE, np.array(slots_L) * layout.num_ranks, layout.num_ranks, layout.min_copies)
    chosen = np.linspace(trace.num_records - records, trace.num_records - 1, min(_STEPS_SCORED, records))
    steps = []
    for record in sorted(set(chosen.round().astype(int).tolist())):
        loads = rank_load(placement.slot_to_expert, placement.share, step_counts(trace, record))
        steps.append(float(balancedness(loads, placement.alive).mean()))
    worst = int(balance_L.argmin())
    return {
        "in_window": float(balance_L.mean()),
        "in_window_worst": float(balance_L[worst]),
        "in_window_worst_layer": trace.layer_ids[worst],
        "next_window": _next_window(trace, records, layout, slots_L),
        "step": float(np.mean(steps)),
        "bound": float(bound_L.mean()),
        "balance_per_layer": balance_L,
        "bound_per_layer": bound_L,
    }


def _next_window(trace: Trace, records: int, layout: Layout, slots_L: tuple[int, ...]) -> float | None:
    """A plan made the same way from the window before, on this one. A window of more than half the trace: of its
    halves. None for a single record."""
    half = min(records, trace.num_records // 2)
    if half == 0:
        return None
    middle = trace.num_records - half
    made = layout.plan(trace.window(middle - half, middle), slots_L)
    return float(placement_balance(made.placement, trace.window(middle, trace.num_records)).mean())


def coverage_facts(placement: Placement, slots_L: tuple[int, ...]) -> dict[str, Any]:
    """Experts that the worst rank and the worst node would take along, mean over layers, and what no placement can
    be under."""
    live = sum(placement.alive)
    return {
        "uncovered_by_worst_rank": float(worst_rank(placement)[1].mean()),
        "uncovered_at_least": float(
            np.mean([fewest_uncovered(placement.num_experts, slots * live, live) for slots in slots_L])
        ),
        "uncovered_by_worst_node": float(worst_node(placement)[1].mean()),
        "nodes": len(set(domains_of(placement))),
    }


def _moved(current: PlacementFile | None, placement: Placement, moves: _Moves) -> dict[str, Any]:
    if current is None:
        return {}
    old = current.placement
    if old.num_ranks != placement.num_ranks:
        raise ValueError(f"--current has {old.num_ranks} ranks; the plan is for {placement.num_ranks}")
    count = _num_moved(old, placement)
    used = int((placement.slot_to_expert >= 0).sum())
    return {
        "moves": count,
        "moved_part": count / max(1, used),
        "move_gib": None if moves.expert_bytes is None else count * moves.expert_bytes / GIB,
    }


def _predicted(trace: Trace, placement: Placement, costing: Costing | None) -> dict[str, Any]:
    """The step of the last record's loads, and of the same loads with every rank equally busy."""
    if costing is None:
        return {}
    part = slot_part(placement, step_counts(trace, trace.num_records - 1))
    even = part.sum(2, keepdims=True)
    level = np.divide(part, even, out=np.zeros_like(part), where=even > 0) / placement.num_ranks
    return {"cost": costing.step(part).as_dict(), "cost_if_even": costing.step(level).as_dict()}


def _failures(
    result: dict[str, Any], min_balance: float | None, max_uncovered: float | None, max_move_gib: float | None
) -> list[BalanceGate | CoverageGate | MoveBudget]:
    failures: list[BalanceGate | CoverageGate | MoveBudget] = []
    if min_balance is not None and result["in_window"] < min_balance:
        failures.append(
            BalanceGate(f"in-window balance is {result['in_window']:.4f}; --min-balance is {min_balance:g}")
        )
    if max_uncovered is not None and result["uncovered_by_worst_rank"] > max_uncovered:
        failures.append(
            CoverageGate(
                f"the worst rank takes {result['uncovered_by_worst_rank']:.2f} experts along; "
                f"--max-uncovered is {max_uncovered:g}"
            )
        )
    if max_move_gib is not None and result["move_gib"] > max_move_gib:
        failures.append(MoveBudget(f"{result['move_gib']:.2f} GiB would move; --max-move-gib is {max_move_gib:g}"))
    return failures


def _file(placement: Placement, trace: Trace, slots_L: tuple[int, ...], result: dict[str, Any]) -> PlacementFile:
    facts = {name: result[name] for name in ("method", "records", "in_window", "next_window", "step", "bound")}
    facts |= {"trace": trace.meta.source, "steps": int(trace.steps.sum()), "made_by": "moesaic eplb plan"}
    return describe(placement, trace.meta.model, trace.layer_ids, slots_L, facts)


_LABELS = {
    "in_window": "balance in-window (mean/max of ranks, mean of layers)",
    "in_window_worst": "its worst layer",
    "next_window": "on the next window (a plan from the window before)",
    "step": "of single steps",
    "bound": "best that any placement in these slots can have",
    "uncovered_by_worst_rank": "experts that the worst rank takes along, mean of layers",
    "uncovered_at_least": "no placement in these slots has fewer than",
    "uncovered_by_worst_node": "experts that the worst node takes along",
    "moves": "experts that move",
    "move_gib": "GiB that move",
    "plan_ms": "milliseconds to plan and score",
}


def _shown(result: dict[str, Any]) -> tuple[str, Table, str]:
    slots = result["slots_per_layer"]
    held = str(slots[0]) if min(slots) == max(slots) else f"{min(slots)} to {max(slots)}"
    title = (
        f"{len(slots)} layers on {result['ranks']} ranks of {held} slots, {result['nodes']} nodes: {result['method']}"
    )
    table = Table("measure", "value", box=None)
    for key, label in _LABELS.items():
        value = result.get(key)
        if value is not None:
            table.add_row(label, str(value) if isinstance(value, int) else f"{value:.4f}")
    if "cost" in result:
        table.add_row("predicted step", _step(result["cost"]))
        table.add_row("with all ranks equally busy", _step(result["cost_if_even"]))
    written = f"written to {result['output']}" if "output" in result else "not written (--output FILE)"
    return title, table, "; ".join(result["failed"]) or written


def _step(cost: dict[str, float]) -> str:
    return f"{cost['total_ms']:.2f} ms, {cost['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU"
