"""`moesaic eplb replay`: policies over a recorded load, one row per combination."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from rich.table import Table

from eplb.balancer import BalancerConfig
from eplb.offline.replay import POLICIES, PolicyName, Settings, Setup, add_break_even, best_row, replay, step_counts
from eplb.offline.stats import window_records
from eplb.offline.trace import Trace
from eplb.placement import slots_needed
from moesaic.eplb.common import Infeasible, Output, Tell, output_options, trace_of
from moesaic.eplb.described import Costing, Described, described_options
from moesaic.eplb.layout import Layout, LayoutOptions, layout_options
from moesaic.options import Bytes

_KEYS = ("window", "interval", "reweight", "budget", "slots", "redundant")
_USED = {
    "none": (),
    "static": ("window",),
    "greedy": ("window", "interval"),
    "ours": ("window", "interval", "reweight", "budget"),
}
LIVE = BalancerConfig()
# What a record costs by default, in milliseconds of one core and for 58 layers of 288 slots; behind the limit, records
# are left out.
_SCORE_MS, _FULL_PLAN_MS, _MOVES_MS, _SHARES_MS, _SLOTS_TIMED = 1.0, 8.0, 20.0, 1.0, 58 * 288
_LIMIT_MS = 12_000


@click.command("replay")
@click.argument("trace_path", metavar="TRACE")
@click.option("--policies", default=",".join(POLICIES), show_default=True, help="Which to run.")
@click.option("--grid", multiple=True, metavar="KEY=A,B,...", help=f"Values to combine, of {', '.join(_KEYS)}.")
@click.option(
    "--memory", type=click.IntRange(1), default=20, show_default=True, help="Steps that `ours` averages over."
)
@click.option("--records", "max_records", type=click.IntRange(2), help="Replay the last N records only.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the single steps drawn from longer records.")
@layout_options
@described_options
@output_options
def command(
    trace_path: str,
    policies: str,
    grid: tuple[str, ...],
    memory: int,
    max_records: int | None,
    seed: int,
    asked: LayoutOptions,
    described: Described,
    out: Output,
) -> None:
    """Run policies over TRACE as it was recorded: what they see is the past only.

    Keys of --grid, in records unless said: window (what a full plan is made from), interval (between two full plans of
    `greedy`, between two rounds of moves of `ours`), reweight (between two re-weightings of `ours`), budget (bytes that
    a rank may receive per step, e.g. 64Mi), slots or redundant.
    """
    names = _policies(policies)
    values = _grid(grid)
    trace = trace_of(trace_path, out)
    layout = asked.layout(trace.num_experts, trace.meta.ranks, described)
    shape = described.shape_of(trace.num_experts, trace.num_layers, trace.meta.model)
    costing = described.costing(layout.num_ranks, shape)
    settings = _combinations(names, values, trace, layout)
    for setting in settings:
        _check_slots(setting.slots, asked, trace, layout)
    start, stop, note = _span(trace, settings, layout, max_records)
    setup = Setup(
        num_ranks=layout.num_ranks,
        domains=layout.domains,
        coverage=layout.coverage,
        min_copies=layout.min_copies,
        expert_bytes=LIVE.bytes_per_expert if shape is None else shape.expert_bytes,
        memory=memory,
        start=start,
        stop=stop,
        shape=shape,
        cluster=None if costing is None else costing.cluster,
        work=None if costing is None else costing.work,
    )
    rows = []
    counts_of = functools.cache(functools.partial(step_counts, trace, seed=seed))
    with out.progress("replaying") as tell:
        for index, setting in enumerate(settings):
            rows.append(replay(trace, setting, setup, counts_of, _nth(tell, index, len(settings), stop - start)))
    add_break_even(rows, max(1, int(np.median(trace.steps[start:stop]))))
    best, why = best_row(rows)
    for index, row in enumerate(rows):
        row["best"] = index == best
    notes = _notes(trace, note, costing, setup)
    result = {"rows": rows, "best": best, "why": why, "notes": notes, **layout.words}
    out.result(result, _table(rows), f"* {rows[best]['policy']}: {why}", *notes)


def _nth(tell: Tell, index: int, runs: int, records: int) -> Callable[[int], None]:
    return lambda done: tell(index * records + done, runs * records)


def _policies(text: str) -> list[PolicyName]:
    names = [name for name in POLICIES if name in text.split(",")]
    wrong = [name for name in text.split(",") if name not in POLICIES]
    if wrong or not names:
        raise click.UsageError(f"--policies has {wrong[0] if wrong else 'nothing'!r}; known are {', '.join(POLICIES)}")
    return names


def _grid(items: tuple[str, ...]) -> dict[str, list[int]]:
    values: dict[str, list[int]] = {}
    for item in itertools.chain.from_iterable(text.split() for text in items):
        key, equals, text = item.partition("=")
        if key not in _KEYS or not equals:
            raise click.UsageError(f"--grid {item}: it must be KEY=A,B with a key of {', '.join(_KEYS)}")
        kind: click.ParamType[Any] = Bytes() if key == "budget" else click.INT
        try:
            values[key] = [int(kind.convert(part, None, None)) for part in text.split(",")]
        except click.BadParameter as error:
            raise click.UsageError(f"--grid {item}: {error.message}") from None
        least = 0 if key in ("redundant", "reweight", "budget", "interval") else 1
        if min(values[key]) < least:
            raise click.UsageError(f"--grid {item}: values must be {least} or more")
    if "slots" in values and "redundant" in values:
        raise click.UsageError("--grid: slots and redundant say the same thing; give one")
    return values


def _combinations(
    names: list[PolicyName], values: dict[str, list[int]], trace: Trace, layout: Layout
) -> list[Settings]:
    """Every combination once; a key that a policy does not use does not multiply its rows."""
    per = max(1, int(np.median(trace.steps)))
    window = min(window_records(trace), max(1, trace.num_records // 2))
    slots = values.get("slots") or [
        slots_needed(trace.num_experts, layout.num_ranks, redundant) for redundant in values.get("redundant", [])
    ]
    axes = {
        "window": values.get("window", [window]),
        "interval": values.get("interval", [0]),
        "reweight": values.get("reweight", [max(1, round(LIVE.reweight_interval / per))]),
        "budget": values.get("budget", [LIVE.move_budget_bytes]),
    }
    found: dict[Settings, None] = {}
    for name in names:
        keys = [key for key in axes if key in _USED[name]]
        for count in slots or [layout.slots]:
            for combination in itertools.product(*(axes[key] for key in keys)):
                chosen = {"window": min(axes["window"]), **dict(zip(keys, combination, strict=True))}
                if "interval" in keys and chosen["interval"] == 0:
                    chosen["interval"] = (
                        chosen["window"] if name == "greedy" else max(1, round(LIVE.move_interval / per))
                    )
                found[Settings(policy=name, slots=count, **chosen)] = None
    return list(found)


def _check_slots(slots: int, asked: LayoutOptions, trace: Trace, layout: Layout) -> None:
    needed = asked.needed_slots(trace.num_experts, layout.num_ranks)
    if slots < needed:
        raise Infeasible(
            f"--grid slots={slots} cannot hold {trace.num_experts} experts on {layout.num_ranks} ranks; the smallest "
            f"feasible S is {needed}"
        )


def _span(
    trace: Trace, settings: list[Settings], layout: Layout, max_records: int | None
) -> tuple[int, int, str | None]:
    """(first record scored, last + 1, a note when some are left out): the latest records, behind each other."""
    widest = max(setting.window for setting in settings)
    if widest >= trace.num_records:
        raise ValueError(
            f"a window of {widest} record(s) leaves none to score: the trace has {trace.num_records}"
            + ("" if trace.num_records < 2 else "; choose a smaller one with --grid window=")
        )
    whole = trace.num_records - widest
    slots = trace.num_layers * layout.num_ranks
    cost_ms = sum(_record_ms(setting) * slots * setting.slots / _SLOTS_TIMED for setting in settings)
    count = min(whole, max_records or max(2 * widest, 100, int(_LIMIT_MS / cost_ms)))
    note = None
    if count < whole:
        note = f"the last {count} of {whole} records are replayed" + (
            "" if max_records else " to stay within a minute; --records N takes more"
        )
    return trace.num_records - count, trace.num_records, note


def _record_ms(setting: Settings) -> float:
    cost = _SCORE_MS
    if setting.policy == "greedy":
        cost += _FULL_PLAN_MS / setting.interval
    elif setting.policy == "ours":
        cost += _MOVES_MS / max(1, setting.interval) + _SHARES_MS / max(1, setting.reweight)
    return cost


def _notes(trace: Trace, note: str | None, costing: Costing | None, setup: Setup) -> list[str]:
    per = max(1, int(np.median(trace.steps[setup.start : setup.stop])))
    notes = [note] if note else []
    if per > 1:
        notes.append(
            f"records are of {per} steps: single steps are drawn from them at random, and shares can follow the load "
            "once a record, not every few steps"
        )
    if setup.shape is None:
        notes.append("the model is not known (--model): GiB are for experts of 44 MiB, and of the layers in the trace")
    elif setup.shape.num_moe_layers != trace.num_layers:
        notes.append(
            f"GiB and times are of all {setup.shape.num_moe_layers} MoE layers; the trace has {trace.num_layers}"
        )
    return notes + ([] if costing is None else costing.words())


_COLUMNS = {
    "policy": "policy", "slots": "S", "window": "window", "interval": "every", "reweight": "re-weight",
    "budget": "budget", "in_window": "in-window", "next_window": "next window", "step": "step", "step_p50": "p50",
    "step_p95": "p95", "moved_per_window": "moved", "moved_gib": "GiB", "plan_ms": "plan ms", "step_ms": "step ms",
    "pause_s": "pause s", "break_even_steps": "pays after", "tokens_per_s_per_gpu": "tok/s/GPU",
}  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="balance: mean/max of ranks, mean of layers", title_justify="left", box=None)
    shown = {key: title for key, title in _COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    table.add_column("")
    for title in shown.values():
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row("*" if row["best"] else "", *[_cell(key, row.get(key)) for key in shown])
    return table


def _cell(key: str, value: Any) -> str:
    if value is None or (value == 0 and key in ("interval", "reweight", "budget")):
        return "-"
    if isinstance(value, str):
        return value
    if key == "budget":
        return f"{value / (1 << 20):.0f}Mi"
    if key == "moved_per_window":
        return f"{value:.2%}"
    if key in ("in_window", "next_window", "step", "step_p50", "step_p95"):
        return f"{value:.4f}"
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
