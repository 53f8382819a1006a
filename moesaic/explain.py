"""`moesaic explain`: what would be decided for a model on this machine, and why."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.chips import CHIPS
from configs.engine import EngineConfig, Plan
from configs.env import read_env
from configs.gpu import MEBI, find_gpus
from configs.store import STANDBY_BYTES
from engine.plan import is_for_gpus, make_plan
from moesaic.command_line import VllmCommand
from moesaic.options import EMBEDDED_RANKS, engine_config, engine_options
from moesaic.serve import command as serve

if TYPE_CHECKING:
    from engine.cluster import ClusterPlan

DEFAULT_CHIP = "h200"


@click.command("explain", cls=VllmCommand)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--gpu", type=click.Choice(list(CHIPS)), help="Plan for a cluster of these GPUs, which need not be here.")
@click.option("--world", type=int, help="The same as --data-parallel-size.")
@click.option("--installed", help="Libraries that the cluster has, with commas between them; default: all of them.")
@engine_options
def command(as_json: bool, gpu: str | None, world: int | None, installed: str | None, **options: Any) -> None:
    """Print the resolved plan for MODEL (default: the embedded one) with the reason for every choice.

    With --gpu, or --device cuda where there is no GPU, MODEL may be a name (deepseek-v3, qwen3-30b-a3b,
    qwen3-235b-a22b) or a directory with only a config.json, and everything that would run on each GPU is listed, with
    the reason against the others.
    """
    if world is not None:
        options["data_parallel_size"] = world
    for parameter in OF_SERVE:  # how the server answers and where its ranks are changes nothing in a plan
        options.pop(str(parameter.name))
    config = engine_config(options, embedded_ranks=EMBEDDED_RANKS)
    for_gpus = config.device == "cuda" or is_for_gpus(config)
    if gpu is None and for_gpus and find_gpus(read_env().visible_gpus)[0] is None:
        gpu = DEFAULT_CHIP
    if gpu is not None:
        _explain_cluster(config, gpu, installed, as_json)
        return
    _show(make_plan(config), as_json)


def _hidden(parameter: click.Parameter) -> click.Parameter:
    found = copy.copy(parameter)
    if isinstance(found, click.Option):
        found.hidden = True
    return found


# A line that serves can be explained as it is.
OF_SERVE = [_hidden(found) for found in serve.params if found.name not in {own.name for own in command.params}]
command.params += OF_SERVE


def _explain_cluster(config: EngineConfig, gpu: str, installed: str | None, as_json: bool) -> None:
    module = importlib.import_module("engine.cluster")  # imports torch
    there = module.LIBRARIES if installed is None else [name.strip() for name in installed.split(",") if name.strip()]
    unknown = [name for name in there if name not in module.LIBRARIES]
    if unknown:
        raise ValueError(f"installed: {unknown[0]!r} is none of {', '.join(module.LIBRARIES)}")
    cluster: ClusterPlan = module.plan_cluster(config, gpu, lambda name: name in there)
    if as_json:
        values = dataclasses.asdict(cluster)
        reasons = values["plan"].pop("reasons")
        print(json.dumps({**values, "reasons": reasons, "installed": list(there)}))
        return
    _show(cluster.plan, False)
    console = Console()
    table = Table("part", "runs", "candidate", "verdict", title="On each GPU", title_justify="left")
    for choice in cluster.choices:
        rows = list(choice.verdicts.items()) or [("", "")]
        for index, (name, verdict) in enumerate(rows):
            first = index == 0
            table.add_row(choice.part if first else "", choice.chosen if first else "", name, escape(verdict))
    console.print(table)
    memory = Table(
        "of a GPU's memory", "MiB", title=f"{cluster.gpu.name}: {cluster.gpu.memory // MEBI} MiB", title_justify="left"
    )
    for name, size in cluster.memory.items():
        memory.add_row(name, f"{size // MEBI}")
    console.print(memory)
    console.print(f"Libraries taken to be installed: {', '.join(there) or 'none'}.")


def _show(plan: Plan, as_json: bool) -> None:
    values = dataclasses.asdict(plan)
    reasons = values.pop("reasons")
    values["checkpoint"] = {name: digest for name, (_, _, _, digest) in plan.checkpoint.items()}
    if as_json:
        print(json.dumps({"plan": values, "reasons": reasons}))
        return
    table = Table("field", "value", "why", title=f"Plan for {plan.served_model_names[0]}", title_justify="left")
    for name, value in values.items():
        default = "from the model" if name in ("model_path", "architecture") else "the default or as asked"
        table.add_row(name, escape(_shown(value)), escape(reasons.get(name, default)))
    Console().print(table)
    if plan.device == "cpu":
        _show_memory(plan)


def _show_memory(plan: Plan) -> None:
    """What the weights and the cache take, on the machine and in each rank (docs/memory.md)."""
    ranks = plan.data_parallel_size_local or plan.data_parallel_size
    table = Table("memory", "of a rank, MiB", "of the machine, MiB", title="Memory", title_justify="left")
    stores = max(1, len(plan.store_nodes)) * plan.store_bytes
    if plan.weight_store:
        table.add_row("weights in the store, mapped by each rank", "0", f"{stores // MEBI}")
        table.add_row("cache", f"{plan.rank_bytes // MEBI}", f"{ranks * plan.rank_bytes // MEBI}")
    else:
        table.add_row("weights and cache", f"{plan.rank_bytes // MEBI}", f"{ranks * plan.rank_bytes // MEBI}")
    table.add_row("a server's process that waits to become a rank, about", "", f"{STANDBY_BYTES // MEBI}")
    table.add_row("together", "", f"{(stores + ranks * plan.rank_bytes + STANDBY_BYTES) // MEBI}")
    Console().print(table)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return "off" if value is None else str(value)
