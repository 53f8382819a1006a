"""The options that describe a cluster, a model and a step, for the verbs that print milliseconds."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from eplb.offline.cluster import GPUS, Cluster, load_cluster, make_cluster
from eplb.offline.cost import ASSUMPTIONS, DEFAULT, Phase, StepCost, Workload, step_cost
from eplb.offline.shapes import MODELS, WEIGHT_BYTES, ModelShape, load_shape
from moesaic.eplb.common import FILE, taking
from moesaic.options import Number


class Described(Struct, frozen=True):
    """What was said on the command line."""

    model: str | None
    expert_dtype: str | None
    phase: Phase
    tokens_per_gpu: int | None
    context: int
    micro_batches: int
    fp8_cache: bool
    gpu: str | None
    gpus_per_node: int | None
    nvlink_gbps: float | None
    rdma_gbps: float | None
    cluster_file: Path | None

    @property
    def work(self) -> Workload:
        tokens = self.tokens_per_gpu or (128 if self.phase == "decode" else 16384)
        return Workload(self.phase, tokens, self.context, self.micro_batches, self.fp8_cache)

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or 8

    def cluster(self, num_ranks: int | None) -> Cluster | None:
        """None when no GPU was named. ValueError when the described cluster has another number of GPUs than there
        are ranks."""
        if self.cluster_file is not None:
            cluster = load_cluster(self.cluster_file)
            if num_ranks is not None and cluster.num_gpus != num_ranks:
                raise ValueError(
                    f"{self.cluster_file}: gpus is {cluster.num_gpus}; the loads are for {num_ranks} ranks"
                )
            return cluster
        if self.gpu is None or num_ranks is None:
            return None
        return make_cluster(self.gpu, num_ranks, self.ranks_per_node, self.nvlink_gbps, self.rdma_gbps)

    def shape_of(self, num_experts: int, num_layers: int, model: str = "") -> ModelShape | None:
        """The model of loads [num_layers, num_experts]: --model, else the one that the trace names, else the only known
        one that fits. ValueError when --model has another number of experts."""
        if self.model is not None:
            shape = load_shape(self.model, self.expert_dtype)
            if shape.num_experts != num_experts:
                raise ValueError(
                    f"--model {shape.name} has {shape.num_experts} experts a layer; the loads are of {num_experts}"
                )
            return shape
        fits = [shape for shape in MODELS.values() if shape.num_experts == num_experts]
        named = [shape for shape in fits if shape.name in model.lower()]
        exact = [shape for shape in fits if shape.num_moe_layers == num_layers]
        for found in (named, exact, fits):
            if len(found) == 1:
                return load_shape(found[0].name, self.expert_dtype)
        return None

    def costing(self, num_ranks: int, shape: ModelShape | None) -> Costing | None:
        """What predicts a step, or None without a cluster. click.UsageError when the model is not known."""
        cluster = self.cluster(num_ranks)
        if cluster is None:
            return None
        if shape is None:
            raise click.UsageError("milliseconds need the model's sizes: give --model NAME or its config.json")
        return Costing(cluster, shape, self.work)


class Costing(Struct, frozen=True):
    """A cluster, a model and a step: all that turns loads into milliseconds."""

    cluster: Cluster
    shape: ModelShape
    work: Workload

    def step(self, slot_part: npt.NDArray[np.float64]) -> StepCost:
        """slot_part [L, G, S]: the part of a layer's tokens that each slot receives."""
        return step_cost(self.cluster, self.shape, self.work, slot_part)

    def words(self) -> list[str]:
        """What the numbers stand on, one line each."""
        gpu, shape = self.cluster.gpu, self.shape
        return [
            f"{shape.name}, experts in {shape.expert_dtype} ({shape.expert_bytes / 1e6:.1f} MB each)",
            self.cluster.describe(),
            self.work.describe(),
            f"peaks: {gpu.bf16_tflops:g} bfloat16 and {gpu.tflops(shape.expert_dtype):g} {shape.expert_dtype} TFLOP/s, "
            f"{gpu.hbm_gbps:g} GB/s; reached: {gpu.reach:.0%} of the TFLOP/s, {DEFAULT.hbm:.0%} of the GB/s",
            *ASSUMPTIONS,
            "checked against published figures by `moesaic eplb cost --check`",
        ]


# What costs are predicted for.
described_options = taking(
    "described",
    Described,
    click.option(
        "--gpu", type=click.Choice(list(GPUS)), help="Print milliseconds for GPUs of this kind, one per rank."
    ),
    click.option("--gpus-per-node", "--ranks-per-node", "gpus_per_node", type=click.IntRange(1), help="Default: 8."),
    click.option(
        "--nvlink-gbps",
        type=Number(0, min_open=True),
        help="GB/s of one direction of a GPU's NVLink. Default: the table's.",
    ),
    click.option(
        "--rdma-gbps", type=Number(0, min_open=True), help="GB/s of a GPU's network card. Default: the table's."
    ),
    click.option(
        "--cluster", "cluster_file", type=FILE, help="A JSON file that describes the cluster, in place of --gpu."
    ),
    click.option("--model", help=f"{', '.join(MODELS)}, or a config.json. Default: what the trace says or fits."),
    click.option("--expert-dtype", type=click.Choice(list(WEIGHT_BYTES)), help="Default: the model's."),
    click.option("--phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True),
    click.option("--tokens-per-gpu", type=int, help="Of a step. Default: 128 (decode), 16384 (prefill)."),
    click.option("--context", type=int, default=4096, show_default=True, help="Cached tokens, or the prompt's length."),
    click.option(
        "--micro-batches", type=click.IntRange(1, 2), default=2, show_default=True, help="2: links overlapped."
    ),
    click.option("--fp8-cache", is_flag=True, help="KV cache and attention in FP8."),
)
