"""`moesaic eplb sample`: a synthetic trace, so that the other verbs can be tried without a cluster."""

from __future__ import annotations

import click

from eplb.offline.shapes import load_shape
from eplb.offline.synthetic import synthetic_trace
from eplb.offline.trace import write_trace
from moesaic.eplb.common import Output, needed_output, output_options
from moesaic.eplb.options import Layers


@click.command("sample")
@click.option("--model", default="deepseek-v3", show_default=True, help="Named shape, or a model's config.json.")
@click.option("--ranks", type=click.IntRange(1), default=32, show_default=True)
@click.option("--records", type=click.IntRange(1), default=50, show_default=True)
@click.option("--steps-per-record", type=click.IntRange(1), default=20, show_default=True)
@click.option("--tokens-per-rank", type=click.IntRange(1), default=128, show_default=True, help="In each step.")
@click.option("--switch-at", type=Layers(), default=(), help="Records at which the workload changes: 25 or 20,40.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Fewer layers than the model has.")
@output_options
def command(
    model: str,
    ranks: int,
    records: int,
    steps_per_record: int,
    tokens_per_rank: int,
    switch_at: tuple[int, ...],
    seed: int,
    layers: int | None,
    out: Output,
) -> None:
    """Write a synthetic trace to --output (.jsonl or .npz): loads as skewed as published ones of DeepSeek-V3, which
    drift by assumption. It is for trying the verbs; decide by recordings of your own."""
    target = needed_output(out)
    shape = load_shape(model)
    layer_ids = range(shape.num_dense_layers, shape.num_layers)[:layers]
    with out.progress("drawing") as tell:
        trace = synthetic_trace(
            layer_ids,
            shape.num_experts,
            shape.experts_per_token,
            records=records,
            steps_per_record=steps_per_record,
            tokens_per_step=tokens_per_rank * ranks,
            seed=seed,
            switch_at=switch_at,
            model=shape.name,
            ranks=ranks,
            progress=tell,
        )
    with out.progress(f"writing {target}") as tell:
        write_trace(target, trace, tell)
    result = {
        "output": str(target),
        "model": shape.name,
        "records": records,
        "layers": trace.num_layers,
        "experts": trace.num_experts,
        "ranks": ranks,
        "synthetic": True,
    }
    out.written(result, f"{target}: synthetic, {records} records of {trace.num_layers} layers, {ranks} ranks")
