"""`moesaic eplb explain`: one layer of a trace, in words and a small table."""

from __future__ import annotations

from typing import Any

import click
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from eplb.balance import balancedness, rank_load
from eplb.bounds import balance_bound
from eplb.coverage import worst_rank
from eplb.offline.placement_file import PlacementFile
from eplb.offline.stats import drift, skew, window_records
from eplb.offline.trace import Trace
from eplb.placement import Placement, linear_placement
from moesaic.eplb.common import Output, grid, output_options, placement_of, trace_of

Floats = npt.NDArray[np.float64]


@click.command("explain")
@click.argument("trace_path", metavar="TRACE")
@click.argument("layer", type=int)
@click.option("--placement", "placement_path", help="Explain how this placement serves the layer.")
@click.option("--ranks", type=click.IntRange(1), help="Ranks, where neither the trace nor the placement says it.")
@click.option("--slots", type=click.IntRange(1), help="Slots per rank to give the bound for, without a placement.")
@click.option("--top", type=click.IntRange(1), default=8, show_default=True, help="Experts in the table.")
@output_options
def command(
    trace_path: str,
    layer: int,
    placement_path: str | None,
    ranks: int | None,
    slots: int | None,
    top: int,
    out: Output,
) -> None:
    """Explain LAYER (the model's number of it) of TRACE: which experts are hot, what they need, what limits the
    balance."""
    trace = trace_of(trace_path, out)
    index = _row(trace.layer_ids, layer, trace_path)
    file = placement_of(placement_path, ranks or 0) if placement_path else None
    if file is not None and file.placement.num_experts != trace.num_experts:
        raise ValueError(
            f"{placement_path} has {file.placement.num_experts} experts; {trace_path} has {trace.num_experts}"
        )
    num_ranks = file.placement.num_ranks if file else ranks or trace.meta.ranks
    view = _view(trace, index, num_ranks, slots or 0)
    if file is not None:
        view = _with_placement(view, file, _row(file.layer_ids, layer, str(placement_path)))
    rows = [_expert(view, int(expert), rank) for rank, expert in enumerate(np.argsort(-view.load_E)[:top])]
    result = {**view.facts, "layer": layer, "experts": rows}
    table = grid("expert", "share", "x mean", "copies needed", "copies", "on ranks", "parts")
    for row in rows:
        table.add_row(
            str(row["expert"]),
            f"{row['share']:.2%}",
            f"{row['times_mean']:.1f}",
            str(row["copies_needed"] or "-"),
            str(row["copies"] or "-"),
            " ".join(map(str, row["ranks"])) or "-",
            " ".join(f"{part:.2f}" for part in row["parts"]) or "-",
        )
    out.result(result, *_sentences(view, layer), "", table)


class _View(Struct, frozen=True):
    """load_E: the layer's loads; placement: of this layer alone."""

    load_E: Floats
    num_ranks: int
    facts: dict[str, Any]
    placement: Placement | None = None


def _row(layer_ids: tuple[int, ...], layer: int, where: str) -> int:
    if layer not in layer_ids:
        raise ValueError(f"{where} has no layer {layer}; its layers are {min(layer_ids)} to {max(layer_ids)}")
    return layer_ids.index(layer)


def _only(trace: Trace, index: int) -> Trace:
    return Trace(np.array(trace.load[:, index : index + 1]), trace.step, trace.steps, trace.tokens)


def _view(trace: Trace, index: int, num_ranks: int, slots: int) -> _View:
    one = _only(trace, index)
    load_E = one.window(0, one.num_records)[0]
    if not load_E.any():
        raise ValueError(f"layer {trace.layer_ids[index]} received no token")
    skewed = skew(load_E[None])
    moving = drift(one, window_records(one))
    facts: dict[str, Any] = {
        "num_experts": len(load_E),
        "ranks": num_ranks,
        "gini": skewed.gini[0],
        "max_over_mean": skewed.top_over_mean[0],
        "top10_share": skewed.top10_share[0],
        "idle_experts": skewed.idle[0],
        "spearman_next": moving.spearman.mean() if moving.spearman.size else None,
        "load_moved_next": moving.moved.mean() if moving.moved.size else None,
    }
    if num_ranks:
        home = linear_placement(1, len(load_E), num_ranks)
        facts["balance_unplanned"] = balancedness(rank_load(home.slot_to_expert, home.share, load_E[None]))[0]
        if slots:
            facts |= {"slots": slots, "balance_bound": balance_bound(load_E[None], slots * num_ranks, num_ranks)[0]}
    return _View(load_E, num_ranks, facts)


def _with_placement(view: _View, file: PlacementFile, index: int) -> _View:
    whole = file.placement
    slots = file.slots[index]
    layer = slice(index, index + 1)
    one = replace(whole, slot_to_expert=whole.slot_to_expert[layer], share=whole.share[layer])
    load_LG = rank_load(one.slot_to_expert, one.share, view.load_E[None])
    live = sum(whole.alive)
    rank, lost = worst_rank(one)
    facts = {
        **view.facts,
        "slots": slots,
        "balance": balancedness(load_LG, one.alive)[0],
        "fullest_rank": int(load_LG[0].argmax()),
        "balance_bound": balance_bound(view.load_E[None], slots * live, live)[0],
        "worst_rank_to_lose": rank[0],
        "experts_lost_with_it": lost[0],
    }
    return _View(view.load_E, view.num_ranks, facts, one)


def _expert(view: _View, expert: int, rank: int) -> dict[str, Any]:
    share = view.load_E[expert] / view.load_E.sum()
    row: dict[str, Any] = {
        "rank": rank,
        "expert": expert,
        "share": share,
        "times_mean": share * len(view.load_E),
        "copies_needed": int(np.ceil(share * view.num_ranks - 1e-9)) if view.num_ranks else None,
        "copies": None,
        "ranks": [],
        "parts": [],
    }
    if view.placement is not None:
        places = np.argwhere(view.placement.slot_to_expert[0] == expert)
        row["copies"] = len(places)
        row["ranks"] = [int(place[0]) for place in places]
        row["parts"] = [float(view.placement.share[0, place[0], place[1]]) for place in places]
    return row


def _sentences(view: _View, layer: int) -> list[str]:
    facts = view.facts
    hottest = int(view.load_E.argmax())
    count = max(1, round(len(view.load_E) / 10))
    lines = [
        f"Layer {layer}: expert {hottest} is the hottest, with {facts['max_over_mean']:.1f} times the mean load. The "
        f"{count} hottest of {len(view.load_E)} experts take {facts['top10_share']:.0%} of the load (Gini "
        f"{facts['gini']:.2f}); {facts['idle_experts']} received no token."
    ]
    if facts["spearman_next"] is not None:
        lines.append(
            f"From window to window the order of the experts correlates by {facts['spearman_next']:.2f}, and "
            f"{facts['load_moved_next']:.1%} of the load moves to other experts."
        )
    if view.num_ranks:
        fair = view.load_E.sum() / view.num_ranks
        over = int((view.load_E > fair).sum())
        lines.append(
            f"A fair part of {view.num_ranks} ranks is {1 / view.num_ranks:.2%}. {over} expert(s) have more than that "
            "and need copies. Experts in order, without a balancer, would give a balance of "
            f"{facts['balance_unplanned']:.3f} (mean / max of the ranks; 1 is best)."
        )
    if "balance" in facts:
        lines.append(_verdict(facts))
    elif "balance_bound" in facts:
        lines.append(f"With {facts['slots']} slots a rank no placement can exceed {facts['balance_bound']:.3f}.")
    return lines


def _verdict(facts: dict[str, Any]) -> str:
    balance, bound = facts["balance"], facts["balance_bound"]
    limit = (
        "the number of slots is the limit"
        if bound < 0.97 and bound - balance < 0.02
        else "there is nothing to gain"
        if bound - balance < 0.02
        else "the placement is the limit: a new plan or new shares would help"
    )
    return (
        f"The placement gives {balance:.3f}; rank {facts['fullest_rank']} is the fullest. With {facts['slots']} slots "
        f"a rank no placement can exceed {bound:.3f}, so {limit}. Losing rank {facts['worst_rank_to_lose']} would take "
        f"{facts['experts_lost_with_it']} expert(s) without another copy."
    )
