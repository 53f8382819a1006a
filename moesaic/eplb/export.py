"""`moesaic eplb export`: a trace or a placement becomes a peer's file."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import numpy as np

from eplb.offline.formats.registry import FORMATS, Found, read_any
from eplb.offline.formats.source import Hints
from eplb.offline.trace import Trace, make_trace
from moesaic.eplb.common import Output, needed_output, output_options

WRITERS = [name for name, entry in FORMATS.items() if entry.write_load or entry.write_placement]


@click.command("export")
@click.argument("path")
@click.option("--format", "format_name", type=click.Choice(WRITERS), required=True, help="Whose file to write.")
@click.option("--sum", "add_up", is_flag=True, help="Of a trace, write one table: all records added up.")
@output_options
def command(path: str, format_name: str, add_up: bool, out: Output) -> None:
    """Write PATH, a trace or a placement, as --output in a peer's format (SGLang's and vllm-ascend's loads: .pt or
    .json by the name of the output).

    What the format cannot carry is refused and named. Peers split an expert's tokens evenly over its copies: make plans
    for them with `moesaic eplb plan --flat`.
    """
    target = needed_output(out)
    entry = FORMATS[format_name]
    with out.progress(f"reading {path}") as tell:
        found = read_any(Path(path), Hints(progress=tell))
    if found.trace is not None:
        if entry.write_load is None:
            raise ValueError(f"{format_name} has no file of loads that this can write ({entry.what})")
        entry.write_load(target, _summed(found.trace) if add_up else found.trace)
    else:
        assert found.placement is not None
        if entry.write_placement is None:
            raise ValueError(f"{format_name} has no file of placements ({entry.what})")
        entry.write_placement(target, found.placement)
        _say_dropped(found, format_name, out)
    kind = "placement" if found.trace is None else "load"
    summary = {"kind": kind, "format": format_name, "output": str(target)}
    out.written(summary, f"{kind} written to {target} for {format_name}")


def _summed(trace: Trace) -> Trace:
    total = trace.window(0, trace.num_records)[None]
    first, steps, tokens = (int(n) for n in (trace.step.min(), trace.steps.sum(), trace.tokens.sum()))
    return make_trace(np.asarray(total), trace.meta, [first], [steps], [tokens])


def _say_dropped(found: Found, format_name: str, out: Output) -> None:
    """Labels that no peer's placement has: harmless to lose, but not silently."""
    assert found.placement is not None
    if format_name != "moesaic" and found.placement.placement.failure_domains and not out.quiet:
        print("moesaic eplb: note: the failure domains are left out; the format has none", file=sys.stderr)
