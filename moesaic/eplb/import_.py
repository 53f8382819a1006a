"""`moesaic eplb import`: a peer's file becomes a trace or a placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from eplb.offline.formats.registry import FORMATS, Found, read_any
from eplb.offline.formats.source import Hints, MissingHint
from eplb.offline.placement_file import write_placement
from eplb.offline.trace import write_trace
from moesaic.eplb.common import Output, needed_output, output_options
from moesaic.eplb.options import hint_options

HELP = "Formats: " + "; ".join(f"{name} ({entry.what})" for name, entry in FORMATS.items()) + "."


@click.command("import", epilog=HELP)
@click.argument("path")
@click.option("--format", "format_name", type=click.Choice(list(FORMATS)), help="Default: found out from the file.")
@click.option(
    "--kind",
    type=click.Choice(["load", "placement", "ids"]),
    help="Of arrays that do not say which they are; ids: the experts that every token chose.",
)
@click.option("--skip-cut-line", is_flag=True, help="Leave out a last line that a recording left half written.")
@click.option("--experts", type=click.IntRange(1), help="Of ids: experts of a layer; default: the highest id says it.")
@click.option(
    "--record-tokens", type=click.IntRange(1), default=4096, show_default=True, help="Of ids: tokens to a record."
)
@click.option(
    "--steps-per-record",
    type=click.IntRange(1),
    help="Steps that a record counts, where the file does not say: default 1.",
)
@hint_options
@output_options
def command(
    path: str,
    format_name: str | None,
    kind: str | None,
    skip_cut_line: bool,
    experts: int | None,
    record_tokens: int,
    steps_per_record: int | None,
    ranks: int | None,
    model: str,
    top_k: int | None,
    layers: tuple[int, ...],
    out: Output,
) -> None:
    """Read PATH, a peer's trace or placement, and write --output: a trace (.jsonl, or .npz to save space) or a
    placement (.json)."""
    target = needed_output(out)
    with out.progress(f"reading {path}") as tell:
        hints = Hints(
            ranks=ranks or 0,
            model=model,
            top_k=top_k or 0,
            layers=layers,
            skip_cut_line=skip_cut_line,
            experts=experts or 0,
            record_tokens=record_tokens,
            steps=steps_per_record or 0,
            progress=tell,
        )
        try:
            found = read_any(Path(path), hints, format_name or "", kind or "")
        except MissingHint as error:
            raise click.UsageError(str(error)) from None
    summary = _write(found, target, out)
    out.written(summary, " ".join(f"{name} {value}," for name, value in summary.items()).rstrip(","))


def _write(found: Found, target: Path, out: Output) -> dict[str, Any]:
    if found.trace is not None:
        trace = found.trace
        with out.progress(f"writing {target}") as tell:
            write_trace(target, trace, tell)
        return {
            "kind": "load",
            "format": found.format,
            "records": trace.num_records,
            "layers": trace.num_layers,
            "experts": trace.num_experts,
            "output": str(target),
        }
    assert found.placement is not None
    write_placement(target, found.placement)
    placement = found.placement.placement
    return {
        "kind": "placement",
        "format": found.format,
        "layers": placement.num_layers,
        "experts": placement.num_experts,
        "ranks": placement.num_ranks,
        "slots": max(found.placement.slots),
        "output": str(target),
    }
