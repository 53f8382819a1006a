"""`moesaic eplb diff`: what moves between two placements."""

from __future__ import annotations

from typing import Any

import click
import numpy as np
from rich.table import Table

from eplb.offline.difference import Difference, difference
from eplb.offline.placement_file import PlacementFile
from moesaic.eplb.common import Output, grid, output_options, placement_of
from moesaic.eplb.options import expert_bytes, node_options, with_nodes

GIB = 1 << 30
_LINKS_SHOWN = 8


@click.command("diff")
@click.argument("old_path", metavar="OLD")
@click.argument("new_path", metavar="NEW")
@node_options
@output_options
def command(
    old_path: str,
    new_path: str,
    ranks: int | None,
    ranks_per_node: int | None,
    model: str,
    bytes_each: int | None,
    out: Output,
) -> None:
    """What has to travel to come from the placement OLD to NEW: experts and bytes per rank, link and node, and
    rounds."""
    old = with_nodes(placement_of(old_path, ranks or 0), ranks_per_node)
    new = with_nodes(placement_of(new_path, ranks or 0), ranks_per_node)
    if old.layer_ids != new.layer_ids:
        raise ValueError(f"{old_path} and {new_path} are not about the same layers of the model")
    size = expert_bytes(model or new.model, bytes_each)
    moved = difference(old.placement, new.placement)
    result = describe(moved, new, size)
    out.result(result, _summary(result), _links(result) if moved.num_moves else "")


def describe(moved: Difference, new: PlacementFile, size: float | None) -> dict[str, Any]:
    """The verb's JSON. size: bytes of one expert; without it bytes are null."""

    def in_bytes(count: Any) -> Any:
        return None if size is None else np.asarray(count) * size

    links = [
        {"from": int(a), "to": int(b), "experts": int(moved.links[a, b]), "bytes": in_bytes(moved.links[a, b])}
        for a, b in np.argwhere(moved.links)
    ]
    used = int((new.placement.slot_to_expert >= 0).sum())
    return {
        "moves": moved.num_moves,
        "moved_part": moved.num_moves / max(1, used),
        "bytes": in_bytes(moved.num_moves),
        "bytes_per_expert": size,
        "changed_layers": moved.changed_layers,
        "from_checkpoint": int(moved.loaded.sum()),
        "across_nodes": moved.across_nodes,
        "bytes_across_nodes": in_bytes(moved.across_nodes),
        "rounds": moved.rounds,
        "rounds_per_layer": moved.rounds_per_layer,
        "reshared_slots": moved.reshared,
        "received_per_rank": moved.received,
        "sent_per_rank": moved.sent,
        "most_bytes_received": in_bytes(moved.received.max()),
        "most_bytes_sent": in_bytes(moved.sent.max()),
        "links": sorted(links, key=lambda link: -link["experts"]),
        "layers": [
            {"layer": layer, "moves": sum(1 for move in moved.transfers if move.layer == index)}
            for index, layer in enumerate(new.layer_ids)
        ],
    }


def gib(size: Any) -> str:
    """Bytes for people; "-" when not known."""
    return "-" if size is None else f"{float(size) / GIB:.3f} GiB"


def _summary(result: dict[str, Any]) -> Table:
    table = grid("measure", "value", title="What moves")
    rows = (
        ("experts that travel", f"{result['moves']} ({result['moved_part']:.2%} of the slots)"),
        ("in layers", result["changed_layers"]),
        ("bytes", gib(result["bytes"])),
        ("between nodes", f"{result['across_nodes']} experts, {gib(result['bytes_across_nodes'])}"),
        ("read from the checkpoint", result["from_checkpoint"]),
        (
            "most received by a rank",
            f"{result['received_per_rank'].max()} experts, {gib(result['most_bytes_received'])}",
        ),
        ("most sent by a rank", f"{result['sent_per_rank'].max()} experts, {gib(result['most_bytes_sent'])}"),
        ("rounds, one expert in and out per rank", f"{result['rounds']} ({result['rounds_per_layer']} layer by layer)"),
        ("slots with another share only", result["reshared_slots"]),
    )
    for name, value in rows:
        table.add_row(name, str(value))
    return table


def _links(result: dict[str, Any]) -> Table:
    table = grid("from rank", "to rank", "experts", "bytes", title="Busiest links")
    for link in result["links"][:_LINKS_SHOWN]:
        table.add_row(str(link["from"]), str(link["to"]), str(link["experts"]), gib(link["bytes"]))
    return table
