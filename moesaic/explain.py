"""`moesaic explain`: what would be decided for a model on this machine, and why."""

from __future__ import annotations

import copy
import importlib
import json
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.chips import CHIPS
from configs.engine import EngineConfig, Plan
from configs.env import read_env
from configs.gpu import MEBI, find_gpus
from configs.hosts import DEFAULT_PORT, Hosts, ranks_of
from configs.machine import this_machine
from configs.replicas import Sharing, memory_rate
from configs.store import STANDBY_BYTES
from engine.plan import expert_choices, is_for_gpus, make_plan, planned_cache
from eplb.placement import Distance, linear_placement
from moesaic.command_line import VllmCommand
from moesaic.options import EMBEDDED_RANKS, engine_config, engine_options
from moesaic.serve import command as serve

if TYPE_CHECKING:
    from engine.cluster import ClusterPlan

DEFAULT_CHIP = "h200"
BRINGS = {  # how a rank gets an expert that another one has
    Distance.SAME_STORE: "mapped: nothing is brought",
    Distance.SAME_MACHINE: "copied in the machine's memory",
    Distance.OTHER_MACHINE: "sent over the network",
}


@click.command("explain", cls=VllmCommand)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--gpu", type=click.Choice(list(CHIPS)), help="Plan for a cluster of these GPUs, which need not be here.")
@click.option("--world", type=int, help="The same as --data-parallel-size.")
@click.option("--installed", help="Libraries that the cluster has, with commas between them; default: all of them.")
@click.option(
    "--expect-mbit",
    type=click.FloatRange(0, min_open=True),
    default=10000.0,
    show_default=True,
    help="Of a link between --nnodes machines: megabits per second in each direction (moesaic doctor measures it).",
)
@click.option(
    "--expect-ms",
    type=click.FloatRange(0, min_open=True),
    default=0.2,
    show_default=True,
    help="Of a message and its answer between them.",
)
@engine_options
def command(
    as_json: bool,
    gpu: str | None,
    world: int | None,
    installed: str | None,
    expect_mbit: float,
    expect_ms: float,
    **options: Any,
) -> None:
    """Print the resolved plan for MODEL (default: the embedded one) with the reason for every choice.

    With --gpu, or --device cuda where there is no GPU, MODEL may be a name (deepseek-v3, qwen3-30b-a3b,
    qwen3-235b-a22b) or a directory with only a config.json, and everything that would run on each GPU is listed, with
    the reason against the others. With --nnodes N on CPUs it says whether N machines should share the experts, or serve
    each for itself.
    """
    if world is not None:
        options["data_parallel_size"] = world
    nodes, hosts = _machines(options)
    for parameter in OF_SERVE:  # how the server answers and where its ranks are changes nothing in a plan
        options.pop(str(parameter.name))
    config = engine_config(options, embedded_ranks=EMBEDDED_RANKS)
    for_gpus = config.device == "cuda" or is_for_gpus(config)
    if gpu is None and for_gpus and find_gpus(read_env().visible_gpus)[0] is None:
        gpu = DEFAULT_CHIP
    if gpu is not None:
        _explain_cluster(config, gpu, installed, as_json)
        return
    plan = make_plan(config, hosts=hosts)
    sharing = None if hosts is None else _sharing(plan, nodes, 1e6 / 8 * expect_mbit, expect_ms / 1000)
    _show(plan, as_json, sharing)


def _machines(options: dict[str, Any]) -> tuple[int, Hosts | None]:
    """How many there are, and this one as their head; None: one, or as many as there are GPUs for."""
    nodes = options["nnodes"]
    if nodes == -1:
        raise ValueError("--nnodes must be a number for explain: no system has started it")
    if nodes is None or nodes == 1:
        return 1, None
    size, local, _ = ranks_of(nodes, 0, options["data_parallel_size_local"] or (), options["data_parallel_size"])
    options["data_parallel_size"] = size
    return nodes, Hosts(head="", port=DEFAULT_PORT, size=size, first=0, local=local)


def _sharing(plan: Plan, nodes: int, link: float, round_trip: float) -> Sharing | None:
    """None for a model without experts."""
    if not plan.num_experts:
        return None
    experts, others, chosen, layers, hidden = expert_choices(plan)
    item = 4 if plan.dtype == "float32" else 2
    return Sharing(
        nodes=nodes,
        ranks=max(1, plan.data_parallel_size // nodes),
        experts=plan.num_experts,
        chosen=chosen,
        layers=layers,
        hidden=hidden,
        item=item,
        sent_item=1 if plan.dispatch_rows == "fp8" else item,
        expert_bytes=experts,
        other_bytes=others,
        link=link,
        round_trip=round_trip,
        memory=this_machine().free_memory,
        reads=memory_rate(plan.threads_per_rank * plan.data_parallel_size_local),
    )


def _show_sharing(sharing: Sharing) -> None:
    table = Table(
        "streams of a machine", "replica reads experts, ms", "shared: reads, ms", "exchanges, ms",
        "a step is shorter by, ms",
        title=f"Experts over {sharing.nodes} machines, or a replica on each", title_justify="left",
    )  # fmt: skip
    for row in sharing.rows():
        numbers = (row.replica_ms, row.shared_ms, row.exchange_ms, row.saved_ms)
        table.add_row(str(row.streams), *(f"{number:.1f}" for number in numbers))
    console = Console()
    console.print(table)
    console.print(
        f"A token sends {sharing.bytes_per_token:.0f} bytes to other machines over links of "
        f"{8e-6 * sharing.link:g} Mbit/s; round trips of {1000 * sharing.round_trip:g} ms take "
        f"{1000 * sharing.round_trips:.1f} ms of each step; memory is read at {1e-9 * sharing.reads:.1f} GB/s "
        "(measured). The rest of a step is the same."
    )
    console.print(sharing.advice)


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
        values = msgspec.to_builtins(cluster)
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
    total, active = (f"{number / 1e9:.2f}" for number in (cluster.parameters.total, cluster.parameters.active))
    console.print(f"{total} billion parameters, of which a token is multiplied by {active} billion.")
    console.print(f"Libraries taken to be installed: {', '.join(there) or 'none'}.")


def _show(plan: Plan, as_json: bool, sharing: Sharing | None = None) -> None:
    values = msgspec.to_builtins(plan)
    reasons = values.pop("reasons")
    values["checkpoint"] = {name: digest for name, (_, _, _, digest) in plan.checkpoint.items()}
    if as_json:
        machines = {} if sharing is None else {"machines": _numbers_of(sharing)}
        distances = {distance.name.lower(): ranks for distance, ranks in _distances(plan).items()}
        found = {"cache": planned_cache(plan), "distances": distances}
        print(json.dumps({"plan": values, "reasons": reasons, **found, **machines}))
        return
    table = Table("field", "value", "why", title=f"Plan for {plan.served_model_names[0]}", title_justify="left")
    for name, value in values.items():
        default = "from the model" if name in ("model_path", "architecture") else "the default or as asked"
        table.add_row(name, escape(_shown(value)), escape(reasons.get(name, default)))
    Console().print(table)
    if plan.device == "cpu":
        _show_memory(plan)
        _show_distances(plan)
    if sharing is not None:
        _show_sharing(sharing)


def _numbers_of(sharing: Sharing) -> dict[str, Any]:
    rows = [{**msgspec.to_builtins(row), "saved_ms": row.saved_ms} for row in sharing.rows()]
    found = {"bytes_per_token": sharing.bytes_per_token, "round_trips_ms": 1000 * sharing.round_trips, "rows": rows}
    return {**msgspec.to_builtins(sharing), **found, "advice": sharing.advice}


def _show_memory(plan: Plan) -> None:
    """What the weights and the cache take, on the machine and in each rank (docs/memory.md)."""
    ranks = plan.data_parallel_size_local or plan.data_parallel_size
    cache = planned_cache(plan)
    table = Table("memory", "of a rank, MiB", "of the machine, MiB", title="Memory", title_justify="left")
    stores = max(1, len(plan.store_nodes)) * plan.store_bytes
    if plan.weight_store:
        table.add_row("weights in the store, mapped by each rank", "0", f"{stores // MEBI}")
    else:
        weights = plan.rank_bytes - sum(cache.values())
        table.add_row("weights", f"{weights // MEBI}", f"{ranks * weights // MEBI}")
    for name, size in cache.items():
        table.add_row(f"cache: {name}", f"{size // MEBI}", f"{ranks * size // MEBI}")
    waiting = ranks * STANDBY_BYTES
    table.add_row("a server's processes that wait to become ranks, at most about", "", f"{waiting // MEBI}")
    table.add_row("together", "", f"{(stores + ranks * plan.rank_bytes + waiting) // MEBI}")
    Console().print(table)


def _distances(plan: Plan) -> dict[Distance, list[int]]:
    """The ranks at each distance of rank 0 (docs/memory.md), where each machine has as many as this one. Empty where
    there are no experts, or no other rank."""
    ranks, local = plan.data_parallel_size, plan.data_parallel_size_local or plan.data_parallel_size
    machines = tuple(rank // local for rank in range(ranks))
    stores = machines if plan.weight_store and not plan.store_nodes else ()
    found: dict[Distance, list[int]] = {}
    if plan.num_experts:
        placement = linear_placement(1, plan.num_experts, ranks, plan.slots_per_rank, machines, stores)
        for rank in range(1, ranks):
            found.setdefault(placement.distance(0, rank), []).append(rank)
    return found


def _show_distances(plan: Plan) -> None:
    found = _distances(plan)
    if not found:
        return
    table = Table("distance of rank 0", "ranks", "their experts are", title="Distances", title_justify="left")
    for distance, ranks in sorted(found.items()):
        own = distance is not Distance.SAME_STORE and plan.weight_store
        how = "in a store of their own too: nothing is brought" if own else BRINGS[distance]
        table.add_row(distance.name.lower().replace("_", " "), ", ".join(map(str, ranks)), how)
    Console().print(table)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return "off" if value is None else str(value)
